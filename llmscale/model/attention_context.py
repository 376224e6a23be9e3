"""What all blocks' attention needs beside the residual stream: where tokens stand, and whom they may see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmscale.architecture.rotary import rotary_frequencies
from llmscale.architecture.shape import GPTShape


@dataclass(frozen=True)
class AttentionContext:
    """Of one forward pass, shared by its blocks."""

    cos: Tensor | None = None
    """[..., t, 1, head_dim] in the precision of the computation; None without rotary positions."""
    sin: Tensor | None = None
    mask: Tensor | None = None
    """[..., t, t], true where a position (row) sees another (column); None: itself and all before it."""

    def rotate(self, heads: Tensor) -> Tensor:
        """Queries or keys [batch, t, heads, head_dim], turned by their positions.

        The two numbers of a pair stand half a head apart, as in GPT-NeoX and in transformers' Llama.
        """
        if self.cos is None or self.sin is None:
            return heads
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cos + torch.cat((-second, first), dim=-1) * self.sin


def build_context(shape: GPTShape, positions: Tensor, dtype: torch.dtype) -> AttentionContext:
    """For tokens at `positions` [..., t]; `dtype`: of the computation.

    Nothing is kept in buffers of the model: DeepSpeed would round them to 16 bit, and angles of late positions with
    them.
    """
    mask = _window_mask(positions, shape.sliding_window) if shape.has_window else None
    if shape.positions == "learned":
        return AttentionContext(mask=mask)
    frequencies = rotary_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
    turns = torch.tensor(frequencies, dtype=torch.float32, device=positions.device)
    angles = (positions[..., None].float() * turns)[..., None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return AttentionContext(angles.cos().to(dtype), angles.sin().to(dtype), mask)


def _window_mask(positions: Tensor, window: int) -> Tensor:
    """A position sees itself and the window - 1 before it."""
    before = positions[..., :, None] - positions[..., None, :]
    return (before >= 0) & (before < window)


def compute_dtype(x: Tensor) -> torch.dtype:
    """What matrix products of `x` are computed in: autocast's type, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
