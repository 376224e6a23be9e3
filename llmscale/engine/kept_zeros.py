"""`--keep-zeros`: what pruning set to zero stays zero, at every stage, without a mask to store or to resume."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from llmscale.architecture.layers import ParameterKind


def keep_zeros(model: nn.Module, kinds: Mapping[str, ParameterKind]) -> None:
    """Elements of the blocks' matrices that are 0 get no gradient from now on.

    AdamW then never moves them: its moments stay 0, and so does what weight decay takes of a zero. The gradient is
    masked where autograd hands it over, before any rank reduces, scales or clips it; the parameter is whole then, at
    stage 3 too, which releases it only after the backward pass of its module.
    """
    for name, parameter in model.named_parameters():
        if kinds[name] == "matrix":
            parameter.register_hook(_masking(parameter))


def _masking(parameter: Tensor) -> Callable[[Tensor], Tensor]:
    held = weakref.ref(parameter)  # a hook that holds its parameter would outlive the engine

    def mask(gradient: Tensor) -> Tensor:
        owner = held()
        assert owner is not None
        assert owner.shape == gradient.shape, "ZeRO-3 has released a parameter before its gradient was there"
        return torch.where(owner.detach() != 0, gradient, 0)

    return mask
