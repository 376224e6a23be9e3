"""Our GPT as a model that transformers builds: what the product writes is held against this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmscale.architecture.families.family import HFTensor
from llmscale.architecture.hf_config import family_of
from llmscale.architecture.shape import GPTShape
from llmscale.evaluate.transformers_package import import_transformers
from llmscale.model.gpt import GPT

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def to_hf_state_dict(model: GPT) -> dict[str, Tensor]:
    """The model's weights under the names of its family, without padding rows; biases that it lacks and the family has
    are zeros."""
    state = model.state_dict()
    return {tensor.name: _converted(tensor, state) for tensor in family_of(model.shape).tensors(model.shape)}


def _converted(tensor: HFTensor, state: Mapping[str, Tensor]) -> Tensor:
    if not tensor.parameter:
        return torch.zeros(tensor.shape)
    rows = tensor.shape[1 if tensor.transposed else 0] - tensor.skipped_rows
    # All experts' rows are in one parameter.
    part = state[tensor.parameter].view(-1, *tensor.shape[1:] if not tensor.transposed else tensor.shape[:1])
    part = part[tensor.first_row : tensor.first_row + rows]
    if tensor.skipped_rows:
        part = torch.cat((part.new_zeros(tensor.skipped_rows, *part.shape[1:]), part))
    return (part.t() if tensor.transposed else part).contiguous()


def hf_config(shape: GPTShape, eot_token: int, dtype: torch.dtype) -> PretrainedConfig:
    """The configuration of the model that computes what a GPT of this shape computes.

    `eot_token`: the id that ends a text. `dtype`: of the stored weights.
    """
    family = family_of(shape)
    # So that `generate` ends a text where training did; the family's own id need not exist in this vocabulary.
    ends = {"bos_token_id": eot_token, "eos_token_id": eot_token}
    config: PretrainedConfig = import_transformers().AutoConfig.for_model(
        family.model_type, **family.write(shape), **ends, architectures=[family.architecture], torch_dtype=dtype
    )
    return config
