"""Matrix products in bf16 around fp32 weights, which DeepSpeed is to know nothing of.

DeepSpeed 0.19.8's own `torch_autocast` takes the type in which ranks exchange a gradient from the class of the module
(ZeROOptimizer.get_param_comm_dtype; Linear, but no subclass of it), not from `communication_data_type`, and remembers
for as long as the process lives that some engine had it. Without that section an engine is one in fp32, whose
gradients go in `communication_data_type` at every stage; autocast is then a matter of the model's forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def compute_in_bf16(model: nn.Module) -> None:
    """From now on the model's forward pass runs under autocast. Before `deepspeed.initialize`."""
    from deepspeed.accelerator import get_accelerator

    under_autocast = torch.autocast(get_accelerator().device_name(), torch.bfloat16)
    model.forward = under_autocast(model.forward)


def without_autocast(ds_config: Mapping[str, object]) -> dict[str, object]:
    """A resolved ds_config for DeepSpeed."""
    return {key: value for key, value in ds_config.items() if key != "torch_autocast"}
