"""The modules that own weights: each one draws its own, from a given generator, in its constructor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmscale.architecture.shape import GPTShape
from llmscale.model.initialization import INIT_STD, fill_normal_


class Linear(nn.Linear):
    """`nn.Linear` with weights from N(0, std^2) and a bias of zeros."""

    def __init__(
        self, inputs: int, outputs: int, generator: torch.Generator, *, bias: bool, std: float = INIT_STD
    ) -> None:
        super().__init__(inputs, outputs, bias)
        fill_normal_(self.weight, std, generator)
        if bias:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs].

        The product is taken in two dimensions, because ZeRO-3's replacement of `F.linear` then adds the
        bias within it, as PyTorch does. In three it adds the bias in place in a second pass: slower, rounded
        twice, and a silent change of what selective activation checkpointing has saved.
        """
        return F.linear(input.flatten(0, -2), self.weight, self.bias).unflatten(0, input.shape[:-1])

    def reset_parameters(self) -> None:
        """Skips `nn.Linear`'s own draw: it is thrown away, and it would move the global generator."""


class Embedding(nn.Embedding):
    """`nn.Embedding` with rows from N(0, 0.02^2)."""

    def __init__(self, rows: int, width: int, generator: torch.Generator) -> None:
        super().__init__(rows, width)
        fill_normal_(self.weight, INIT_STD, generator)

    def reset_parameters(self) -> None:
        """Skips `nn.Embedding`'s own draw, as `Linear` does."""


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` in its weights' type: under autocast in fp32, as CUDA's autocast has it and a CPU's has not."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return F.rms_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps)


def build_norm(shape: GPTShape) -> nn.Module:
    """A norm of the residual stream."""
    if shape.norm == "rmsnorm":
        return RMSNorm(shape.n_embd, shape.norm_eps)
    return nn.LayerNorm(shape.n_embd, shape.norm_eps, bias=shape.bias)
