"""Low-rank adapters beside a linear layer's frozen weights: W x + (alpha / r) B A x (Hu et al. 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from llmscale.architecture.shape import GPTShape


@dataclass(frozen=True)
class Adapter:
    """Adapters of the linear layers that are stacked in one of ours."""

    rank: int
    scale: float
    rows: tuple[int, ...]
    """Outputs of each linear layer."""

    def output(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Compute x [n, inputs], a [adapters x rank, inputs], b [outputs, rank] -> [n, outputs], 0 for b = 0."""
        inner = F.linear(x, a) * self.scale
        if len(self.rows) == 1:
            return F.linear(inner, b)
        parts = zip(inner.split(self.rank, dim=1), b.split(self.rows), strict=True)
        return torch.cat([F.linear(part, of_part) for part, of_part in parts], dim=1)


def find_adapter(shape: GPTShape, layer: str) -> Adapter | None:
    """Return the adapters of a block's linear layer, or None."""
    rows = shape.adapter_rows(layer)
    return Adapter(shape.lora_rank, shape.lora_alpha / shape.lora_rank, rows) if rows else None


def fill_adapter_(a: Tensor, b: Tensor, generator: torch.Generator) -> None:
    """Draw `a` from U(-1/sqrt(inputs), 1/sqrt(inputs)), as peft does, and fill `b` with zeros.

    Parameters without storage (meta device, fake tensors) are skipped.
    """
    if a.is_meta or isinstance(a, FakeTensor):
        return
    bound = 1 / math.sqrt(a.shape[1])
    # In fp32 on the CPU, as all initial weights are (model/layers.py).
    drawn = torch.rand(tuple(a.shape), generator=generator, dtype=torch.float32, device="cpu")
    a.detach().copy_(drawn.mul_(2 * bound).sub_(bound))
    b.detach().zero_()
