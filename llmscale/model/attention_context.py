"""What all blocks' attention needs beside the residual stream: where tokens stand, and whom they may see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmscale.architecture.shape import GPTShape, rotary_frequencies
from llmscale.errors import DataError

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


@dataclass(frozen=True)
class CachePositions:
    """Of the new tokens of one forward pass."""

    slots: Tensor
    """[t], or [batch, t] unless all sequences are equally long: where their keys and values are kept."""
    positions: Tensor
    """The same, but where documents do not see each other: [batch, t], counted from each one's beginning."""
    mask: Tensor | None
    """[t, kept] or [batch, 1, t, kept], true where a token sees what is kept and itself; None where that is everything,
    or as without a cache."""


class KVCache:
    """Of a batch of sequences, each as long as it is: what stands at a position lies in the slot of that number.

    Room for `max_len` positions, at most the model's, is taken at a layer's first use, in the precision of its keys.
    """

    def __init__(self, shape: GPTShape, batch: int, max_len: int) -> None:
        self.lengths = [0] * batch
        """Tokens kept of each sequence; lower numbers forget what lies beyond."""
        self._max_len = min(max_len, shape.seq_len)
        self._reach = shape.sliding_window - 1 if shape.has_window else shape.seq_len
        """How many positions before it a token sees."""
        self._document_end = shape.document_end
        self._tokens = torch.zeros(batch, self._max_len, dtype=torch.long)
        """By slot; filled only where documents do not see each other."""
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * shape.n_layer
        """Keys and values by layer, each [batch, n_kv_head, max_len, head_dim]."""

    def next_positions(self, tokens: Tensor) -> CachePositions:
        """Where `tokens` [batch, t] stand, that continue the sequences. Raises DataError when one of these has no
        room."""
        t, device = tokens.shape[1], tokens.device
        end = max(self.lengths) + t
        if end > self._max_len:
            raise DataError(
                f"{max(self.lengths)} tokens and {t} more do not fit a cache of {self._max_len} positions. Begin again "
                "with the last tokens, without a cache."
            )
        slots = torch.arange(t, device=device)
        slots = slots + (self.lengths[0] if self._is_even else torch.tensor(self.lengths, device=device)[:, None])
        if self._document_end is not None:
            positions = self._positions_in_documents(tokens, slots, self._document_end)
            return CachePositions(slots, positions, self._mask(slots, positions.clamp(max=self._reach), end))
        is_plain = self._is_even and (t == 1 or not any(self.lengths)) and end - 1 <= self._reach
        return CachePositions(slots, slots, None if is_plain else self._mask(slots, slots.clamp(max=self._reach), end))

    def _positions_in_documents(self, tokens: Tensor, slots: Tensor, document_end: int) -> Tensor:
        """[batch, t]: how many tokens of the same document come before."""
        self._tokens = self._tokens.to(tokens.device)
        of_tokens = slots.expand(tokens.shape)
        self._tokens.scatter_(1, of_tokens, tokens)
        return positions_in_documents(self._tokens, document_end).gather(1, of_tokens)

    @staticmethod
    def _mask(slots: Tensor, reach: Tensor, end: int) -> Tensor:
        """A token sees itself and `reach` slots before it, of the first `end`."""
        before = slots[..., :, None] - torch.arange(end, device=slots.device)
        seen = (before >= 0) & (before <= reach[..., :, None])
        return seen if seen.dim() == 2 else seen[:, None]

    def append(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep keys and values [batch, t, n_kv_head, head_dim] in `slots`; returns all that is kept of the layer,
        [batch, kept, n_kv_head, head_dim] each. Slots behind a shorter sequence's end hold finite numbers."""
        kept = self._kept[layer]
        if kept is None:
            batch, _, heads, head_dim = k.shape
            # Zeros: a slot that the mask hides still takes part, with the weight 0.
            room = (batch, heads, self._max_len, head_dim)
            kept = k.new_zeros(room), v.new_zeros(room)
            self._kept[layer] = kept
        end = max(self.lengths) + k.shape[1]
        for whole, new in zip(kept, (k, v), strict=True):
            if self._is_even:
                whole[:, :, self.lengths[0] : end] = new.transpose(1, 2)
            else:
                rows = torch.arange(len(self.lengths), device=slots.device)[:, None]
                whole[rows, :, slots] = new
        return kept[0][:, :, :end].transpose(1, 2), kept[1][:, :, :end].transpose(1, 2)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these sequences of the batch, in this order."""
        if list(rows) == list(range(len(self.lengths))):
            return
        self.lengths = [self.lengths[row] for row in rows]
        self._tokens = self._tokens[torch.tensor(rows, dtype=torch.long, device=self._tokens.device)]
        for layer, kept in enumerate(self._kept):
            if kept is not None:
                chosen = torch.tensor(rows, dtype=torch.long, device=kept[0].device)
                self._kept[layer] = kept[0][chosen], kept[1][chosen]

    @property
    def _is_even(self) -> bool:
        return len(set(self.lengths)) == 1


def kv_cache_bytes(shape: GPTShape, batch: int, max_len: int, element_bytes: int) -> int:
    """Of a cache with all its layers: a key and a value per layer, sequence, head and position."""
    positions = batch * min(max_len, shape.seq_len)
    return 2 * shape.n_layer * positions * shape.n_kv_head * shape.head_dim * element_bytes
