"""What all blocks' attention needs beside the residual stream: where tokens stand, and whom they may see."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmscale.architecture.rotary import rotary_frequencies
from llmscale.architecture.shape import GPTShape

#: Elements that the memory-efficient kernel wants a mask's rows to lie apart, or a multiple
#: (aten/src/ATen/native/transformers/attention.cpp, preprocess_mask).
_ROW_MULTIPLE = 8


@dataclass(frozen=True)
class AttentionContext:
    """Of one forward pass, shared by its blocks."""

    cos: Tensor | None = None
    """[..., t, 1, head_dim] in the precision of the computation; None without rotary positions."""
    sin: Tensor | None = None
    mask: Tensor | None = None
    """[t, t] or [batch, 1, t, t] in the precision of the computation: 0 where a position (row) sees another (column),
    else -inf. None: itself and all before it."""

    def rotate(self, heads: Tensor) -> Tensor:
        """Queries or keys [batch, t, heads, head_dim], turned by their positions.

        The two numbers of a pair stand half a head apart, as in GPT-NeoX and in transformers' Llama.
        """
        if self.cos is None or self.sin is None:
            return heads
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cos + torch.cat((-second, first), dim=-1) * self.sin


def build_context(shape: GPTShape, positions: Tensor, dtype: torch.dtype) -> AttentionContext:
    """For tokens at `positions` [t] or [batch, t]; `dtype`: of the computation.

    Nothing is kept in buffers of the model: DeepSpeed would round them to 16 bit, and angles of late positions with
    them.
    """
    mask = _attention_mask(positions, shape.sliding_window if shape.has_window else None, dtype)
    if shape.positions == "learned":
        return AttentionContext(mask=mask)
    frequencies = rotary_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
    turns = torch.tensor(frequencies, dtype=torch.float32).to(positions.device, non_blocking=True)
    angles = (positions[..., None].float() * turns)[..., None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return AttentionContext(angles.cos().to(dtype), angles.sin().to(dtype), mask)


def positions_in_documents(tokens: Tensor, document_end: int) -> Tensor:
    """[batch, t] -> [batch, t]: how many tokens of the same document come before. `document_end` is a document's last
    token; what a sequence begins with is a document too."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    after_end = torch.where(tokens == document_end, index + 1, 0)
    first = F.pad(after_end[:, :-1], (1, 0)).cummax(dim=1).values
    return index - first


def _attention_mask(positions: Tensor, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """A position sees itself and what came before it: of its document, and of the window.

    One tensor in the type that the kernels compute with, for all blocks: of a mask of true and false each block would
    make such a one for itself and keep it for its backward pass. Its rows are stored _ROW_MULTIPLE apart, or the
    memory-efficient kernel would copy it.
    """
    t = positions.shape[-1]
    if window is None and positions.dim() == 1:
        return None
    index = torch.arange(t, device=positions.device)
    reach = positions if window is None else positions.clamp(max=window - 1)
    is_seen = index >= (index - reach)[..., None]
    is_seen &= index <= index[:, None]
    rows = torch.full((*is_seen.shape[:-1], -(-t // _ROW_MULTIPLE) * _ROW_MULTIPLE), -math.inf, dtype=dtype,
                      device=positions.device)  # fmt: skip
    mask = rows[..., :t].masked_fill_(is_seen, 0.0)
    return mask if mask.dim() == 2 else mask[:, None]


def compute_dtype(x: Tensor) -> torch.dtype:
    """What matrix products of `x` are computed in: autocast's type, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
