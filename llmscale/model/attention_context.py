"""Inputs of attention beside the residual stream: positions, masks, and the key-value cache of a continued text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from llmscale.architecture.rope_scaling import rotary_factor, rotary_frequencies
from llmscale.architecture.shape import GPTShape
from llmscale.errors import DataError

#: The memory-efficient kernel needs a mask's rows a multiple of this many elements apart
#: (aten/src/ATen/native/transformers/attention.cpp, preprocess_mask).
_ROW_MULTIPLE = 8
#: Positions of a block of FlexAttention's masks.
_BLOCK = 128


class SequenceSplit(Protocol):
    """Division of a sequence into equal parts, its last tokens padded, one of which the model gets.

    Attention sees all tokens for a part of the heads, in which positions and masks are those of the sequence.
    """

    @property
    def size(self) -> int:
        """Number of parts."""

    @property
    def index(self) -> int:
        """Number of the model's part."""

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange [batch, t / size, heads, head_dim] each for all tokens of some heads, [batch, t, h, head_dim]."""

    def to_tokens(self, y: Tensor) -> Tensor:
        """Exchange [batch, t, heads / size, head_dim] for [batch, t / size, heads, head_dim]."""

    def sum_over_parts(self, x: Tensor) -> Tensor:
        """Return the sum of the parts' tensors, without gradients."""


@dataclass(frozen=True)
class AttentionContext:
    """Rotations and mask of one forward pass, shared by all blocks with the sliding window, or all without."""

    cos: Tensor | None = None
    """[..., t, 1, head_dim] in the precision of the computation; None without rotary positions."""
    sin: Tensor | None = None
    mask: Tensor | BlockMask | None = None
    """[t, t] or [batch, 1, t, t] in the precision of the computation: 0 where a position (row) sees another (column),
    else -inf. Or FlexAttention's mask of the same. None for plain causal attention."""
    split: SequenceSplit | None = None
    """Division of the tokens; cos and sin are those of the model's part."""
    padding: int = 0
    """Padding tokens at the end of the model's part."""

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys [batch, t, heads, head_dim] by their positions.

        The two numbers of a pair are half a head apart, as in GPT-NeoX and in transformers' Llama.
        """
        if self.cos is None or self.sin is None:
            return heads
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cos + torch.cat((-second, first), dim=-1) * self.sin


def part_of_tokens(t: int, split: SequenceSplit | None) -> slice:
    """Return the model's part of `t` tokens, which may end after them."""
    part = t if split is None else -(-t // split.size)
    begin = 0 if split is None else part * split.index
    return slice(begin, begin + part)


@dataclass(frozen=True)
class AttentionContexts:
    """Contexts of all blocks."""

    local: AttentionContext
    """Context of the blocks with the sliding window; of all blocks without one."""
    dense: AttentionContext
    """Context of the blocks that see all earlier positions."""

    def with_masks(self, cached: CachePositions) -> AttentionContexts:
        """Return the contexts with the masks of a key-value cache."""
        return AttentionContexts(replace(self.local, mask=cached.mask), replace(self.dense, mask=cached.dense_mask))


def build_contexts(
    shape: GPTShape,
    positions: Tensor,
    dtype: torch.dtype,
    split: SequenceSplit | None = None,
    padding: int = 0,
    *,
    in_blocks: bool = False,
) -> AttentionContexts:
    """Build the contexts of tokens at `positions` [t] or [batch, t], in the computation's `dtype`.

    padding: padding tokens at the end of the model's part. in_blocks: masks are FlexAttention's. Nothing is kept in
    buffers of the model: DeepSpeed would round them, and the angles of late positions, to 16 bit.
    """
    window = shape.sliding_window if shape.has_window else None

    def build_mask(window: int | None) -> Tensor | BlockMask | None:
        if in_blocks:
            return _block_mask(positions, window)
        return _attention_mask(positions, window, dtype)

    local = AttentionContext(mask=build_mask(window), split=split, padding=padding)
    if shape.positions != "learned":
        cos, sin = _build_rotations(shape, positions[..., part_of_tokens(positions.shape[-1], split)], dtype)
        local = replace(local, cos=cos, sin=sin)
    if not shape.has_window or not shape.global_layers:
        return AttentionContexts(local, local)
    return AttentionContexts(local, replace(local, mask=build_mask(None)))


def _build_rotations(shape: GPTShape, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of positions [..., t], each [..., t, 1, head_dim]."""
    frequencies = rotary_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
    turns = torch.tensor(frequencies, dtype=torch.float32).to(positions.device, non_blocking=True)
    angles = (positions[..., None].float() * turns)[..., None, :]
    angles = torch.cat((angles, angles), dim=-1)
    factor = rotary_factor(shape.rope_scaling)

    def scale(x: Tensor) -> Tensor:
        return (x if factor == 1 else x.mul_(factor)).to(dtype)

    # One after the other, so that only one of them exists in fp32.
    cos = scale(angles.cos())
    return cos, scale(angles.sin())


def positions_in_documents(tokens: Tensor, document_end: int) -> Tensor:
    """Count the earlier tokens of the same document: [batch, t] -> [batch, t].

    `document_end` is a document's last token. The beginning of a sequence begins a document too.
    """
    index = torch.arange(tokens.shape[1], device=tokens.device)
    after_end = torch.where(tokens == document_end, index + 1, 0)
    first = F.pad(after_end[:, :-1], (1, 0)).cummax(dim=1).values
    return index - first


def _attention_mask(positions: Tensor, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """Return the mask with which a position sees itself and earlier ones, within its document and the window."""
    t = positions.shape[-1]
    if window is None and positions.dim() == 1:
        return None
    index = torch.arange(t, device=positions.device)
    if window is None:
        reach = positions
    else:
        reach = positions.clamp(max=window - 1)
    is_seen = index >= (index - reach)[..., None]
    is_seen &= index <= index[:, None]
    # One mask for all blocks, in the kernels' type: each block would convert a boolean one and keep the result for its
    # backward pass. The memory-efficient kernel would copy rows that are not _ROW_MULTIPLE apart.
    rows = torch.full((*is_seen.shape[:-1], -(-t // _ROW_MULTIPLE) * _ROW_MULTIPLE), -math.inf, dtype=dtype,
                      device=positions.device)  # fmt: skip
    mask = rows[..., :t].masked_fill_(is_seen, 0.0)
    return mask if mask.dim() == 2 else mask[:, None]


def _block_mask(positions: Tensor, window: int | None) -> BlockMask | None:
    """Return FlexAttention's mask of what `_attention_mask` shows.

    A position sees from a first one, which never comes earlier for later positions, to itself. So the ends of a block's
    rows tell which blocks of columns are seen completely, in part or not at all, without a matrix [t, t].
    """
    t = positions.shape[-1]
    device = positions.device
    if window is None and positions.dim() == 1:
        return None
    index = torch.arange(t, device=device)
    first = (index - (positions if window is None else positions.clamp(max=window - 1))).int()

    def sees(batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column <= row) & (column >= first[batch, row])

    def sees_window(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column <= row) & (column >= first[row])

    blocks = torch.arange(-(-t // _BLOCK), device=device)
    rows = first if first.dim() == 2 else first[None]
    of_top = rows[:, blocks * _BLOCK]
    of_bottom = rows[:, (blocks * _BLOCK + _BLOCK - 1).clamp(max=t - 1)]
    seen = (blocks >= (of_top // _BLOCK)[..., None]) & (blocks <= blocks[:, None])
    complete = seen & (blocks * _BLOCK >= of_bottom[..., None]) & (blocks < blocks[:, None])
    function = sees if first.dim() == 2 else sees_window
    return BlockMask.from_kv_blocks(
        *_as_table(seen & ~complete), *_as_table(complete), BLOCK_SIZE=_BLOCK, mask_mod=function, seq_lengths=(t, t)
    )


def _as_table(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many columns of each row are chosen, and their numbers first among all: [batch, rows, columns]."""
    numbers = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], numbers.int()[:, None]


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Compute softmax(q k^T) v over [batch, heads, t, head_dim] by FlexAttention, which shares key-value heads.

    It is compiled; on a CPU it runs eagerly, without a backward pass. A dry run replaces this function.
    """
    is_inside = torch.compiler.is_compiling() or q.device.type == "cpu"
    attend = flex_attention if is_inside else _compile_flex_attention()
    y: Tensor = attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])  # type: ignore[operator]
    return y


@cache
def _compile_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type of matrix products of `x`: autocast's type, or its own."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


@dataclass(frozen=True)
class CachePositions:
    """Cache slots, positions and mask of one forward pass's new tokens."""

    slots: Tensor
    """Slots of their keys and values: [t], or [batch, t] unless all sequences are equally long."""
    positions: Tensor
    """`slots`, or with a document mask positions within documents [batch, t]."""
    mask: Tensor | None
    """[t, kept] or [batch, 1, t, kept], true where a token sees a slot; None for attention as without a cache, or when
    every slot is seen."""
    dense_mask: Tensor | None
    """Mask of the blocks without the sliding window."""


class KVCache:
    """Keys and values computed earlier, of a batch of sequences of any lengths; position p is in slot p.

    A layer's first use allocates `max_len` slots, at most the model's positions, in the precision of its keys.
    """

    def __init__(self, shape: GPTShape, batch: int, max_len: int) -> None:
        self.lengths = [0] * batch
        """Tokens kept of each sequence; lowering a number forgets the tokens after it."""
        self._max_len = min(max_len, shape.seq_len)
        self._reach = shape.sliding_window - 1 if shape.has_window else shape.seq_len
        """Number of earlier positions that a token sees, in blocks with the window."""
        self._dense_reach = shape.seq_len if shape.global_layers else self._reach
        self._document_end = shape.document_end
        self._tokens = torch.zeros(batch, self._max_len, dtype=torch.long)
        """Tokens by slot; filled only with a document mask."""
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * shape.n_layer
        """Keys and values by layer, each [batch, n_kv_head, max_len, head_dim]."""

    def next_positions(self, tokens: Tensor) -> CachePositions:
        """Return slots, positions and mask of `tokens` [batch, t], which continue the sequences.

        Raises DataError when a sequence has no room.
        """
        t = tokens.shape[1]
        device = tokens.device
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
        else:
            positions = slots
        masks = {reach: self._mask_within(reach, slots, positions, end) for reach in (self._reach, self._dense_reach)}
        return CachePositions(slots, positions, masks[self._reach], masks[self._dense_reach])

    def _mask_within(self, reach: int, slots: Tensor, positions: Tensor, end: int) -> Tensor | None:
        is_plain = self._is_even and (slots.shape[-1] == 1 or not any(self.lengths)) and end - 1 <= reach
        if is_plain and self._document_end is None:
            return None
        return self._mask(slots, positions.clamp(max=reach), end)

    def _positions_in_documents(self, tokens: Tensor, slots: Tensor, document_end: int) -> Tensor:
        self._tokens = self._tokens.to(tokens.device)
        of_tokens = slots.expand(tokens.shape)
        self._tokens.scatter_(1, of_tokens, tokens)
        return positions_in_documents(self._tokens, document_end).gather(1, of_tokens)

    @staticmethod
    def _mask(slots: Tensor, reach: Tensor, end: int) -> Tensor:
        """Return the mask with which a token sees itself and `reach` slots before it, of the first `end`."""
        before = slots[..., :, None] - torch.arange(end, device=slots.device)
        seen = (before >= 0) & (before <= reach[..., :, None])
        return seen if seen.dim() == 2 else seen[:, None]

    def append(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [batch, t, n_kv_head, head_dim] in `slots`; return all of the layer's.

        Returns [batch, kept, n_kv_head, head_dim] each. Slots after the end of a shorter sequence hold finite numbers.
        """
        cached = self._kept[layer]
        if cached is None:
            batch, _, heads, head_dim = k.shape
            # Zeros: a slot that the mask hides still takes part, with the weight 0.
            size = (batch, heads, self._max_len, head_dim)
            cached = k.new_zeros(size), v.new_zeros(size)
            self._kept[layer] = cached
        end = max(self.lengths) + k.shape[1]
        for stored, new in zip(cached, (k, v), strict=True):
            if self._is_even:
                stored[:, :, self.lengths[0] : end] = new.transpose(1, 2)
            else:
                rows = torch.arange(len(self.lengths), device=slots.device)[:, None]
                stored[rows, :, slots] = new
        return cached[0][:, :, :end].transpose(1, 2), cached[1][:, :, :end].transpose(1, 2)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these sequences of the batch, in this order."""
        if list(rows) == list(range(len(self.lengths))):
            return
        self.lengths = [self.lengths[row] for row in rows]
        self._tokens = self._tokens[torch.tensor(rows, dtype=torch.long, device=self._tokens.device)]
        for layer, stored in enumerate(self._kept):
            if stored is not None:
                chosen = torch.tensor(rows, dtype=torch.long, device=stored[0].device)
                self._kept[layer] = stored[0][chosen], stored[1][chosen]

    @property
    def _is_even(self) -> bool:
        return len(set(self.lengths)) == 1


def kv_cache_bytes(shape: GPTShape, batch: int, max_len: int, element_bytes: int) -> int:
    """Return the bytes of a cache with all its layers: a key and a value per layer, sequence, head and position."""
    positions = batch * min(max_len, shape.seq_len)
    return 2 * shape.n_layer * positions * shape.n_kv_head * shape.head_dim * element_bytes
