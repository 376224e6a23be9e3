"""Prune to 2:4 structured sparsity: set two of every four weights in a row to zero, by magnitude.

Sparse tensor cores (compute capability 8.0 and later) skip these zeros: Mishra et al. 2021, "Accelerating Sparse Deep
Neural Networks", section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmscale.architecture.attention_kernels import AMPERE, ComputeCapability
from llmscale.errors import ConfigError
from llmscale.model.experts import Experts
from llmscale.model.gpt import GPT

_GROUP = 4
_ZEROS = 2
#: Outputs and inputs of a layer must be multiples of these for CUTLASS's 2:4 kernels in 16 bit (cuSPARSELt's accept
#: smaller ones; torch.sparse.semi_structured).
_KERNEL_OUTPUTS = 32
_KERNEL_INPUTS = 64


@dataclass(frozen=True)
class Pruned:
    """Counts of pruned layers and weights."""

    num_layers: int
    """Linear layers of the blocks and stacks of experts; embeddings, head, norms and routers are not pruned."""
    num_weights: int
    """Weights of those layers."""
    num_zeros: int


def check_sparse_cores(whose: str, capability: ComputeCapability) -> None:
    """Raise ConfigError for a GPU whose tensor cores cannot skip zeros."""
    if capability < AMPERE:
        major, minor = capability
        raise ConfigError(
            f"{whose} has compute capability {major}.{minor}, and 2:4 sparsity is of use from 8.0 on (A100 and later). "
            "Name the GPU that the model is for with --gpu."
        )


def prune_linear_layers(model: GPT, *, for_gpu: bool) -> Pruned:
    """Set the two smallest of every four weights [outputs, inputs] along the inputs to zero, in place, experts' too.

    Raises ConfigError for a layer whose inputs are not a multiple of four, or, with `for_gpu`, for one that the kernels
    do not support.
    """
    weights = {
        f"{name}.{part}": weight.detach()
        for name, layer in model.blocks.named_modules()
        if isinstance(layer, (nn.Linear, Experts))
        for part, weight in layer.named_parameters()
        if weight.dim() > 1
    }
    for name, weight in weights.items():
        outputs, inputs = weight.shape[-2:]
        layer = f"blocks.{name.removesuffix('.weight')}"
        if for_gpu and (outputs % _KERNEL_OUTPUTS or inputs % _KERNEL_INPUTS):
            raise ConfigError(
                f"{layer} has {inputs} inputs and {outputs} outputs, and a GPU's kernels "
                f"for 2:4 sparsity take multiples of {_KERNEL_INPUTS} and {_KERNEL_OUTPUTS}. Prune a model of such "
                "widths; without --gpu, on a machine without one, any multiple of 4 goes."
            )
        if inputs % _GROUP:
            raise ConfigError(
                f"{layer} has {inputs} inputs, and 2:4 sparsity needs a multiple of {_GROUP}. Prune a "
                "model whose n_embd, mlp_width and expert_width are multiples of 4."
            )
    for weight in weights.values():
        groups = weight.unflatten(-1, (-1, _GROUP))
        groups.scatter_(-1, groups.abs().topk(_ZEROS, largest=False).indices, 0.0)
    return Pruned(
        len(weights),
        sum(weight.numel() for weight in weights.values()),
        sum(int((weight == 0).sum()) for weight in weights.values()),
    )


class ModelWeights:
    """Weights of a model in memory, in the form that an export reads (evaluate/export.py)."""

    def __init__(self, model: GPT) -> None:
        self._flat = {name: tensor.view(-1) for name, tensor in model.state_dict().items()}

    def read(self, name: str, start: int, elements: int) -> Tensor:
        """Return `elements` of a parameter from its element `start` on, flattened, in fp32 on the CPU."""
        return self._flat[name][start : start + elements].to("cpu", torch.float32)
