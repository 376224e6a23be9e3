"""Keys and values that attention has computed already, so that a longer text costs its new tokens only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmscale.architecture.shape import GPTShape
from llmscale.errors import DataError


class KVCache:
    """Of a batch of sequences, each as long as it is: what stands at a position lies in the slot of that number.

    Room for `max_len` positions, at most the model's, is taken at a layer's first use, in the precision of its keys.
    """

    def __init__(self, shape: GPTShape, batch: int, max_len: int) -> None:
        self.max_len = min(max_len, shape.seq_len)
        self.window = shape.sliding_window if shape.has_window else 0
        self.lengths = [0] * batch
        """Positions kept of each sequence; lower numbers forget what lies beyond."""
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * shape.n_layer
        """Keys and values by layer, each [batch, n_kv_head, max_len, head_dim]."""

    def next_positions(self, t: int, device: torch.device) -> Tensor:
        """Where `t` more tokens of every sequence stand: [t], or [batch, t] unless all are equally long.

        Raises DataError when one of them has no room.
        """
        if max(self.lengths) + t > self.max_len:
            raise DataError(
                f"{max(self.lengths)} tokens and {t} more do not fit a cache of {self.max_len} positions. Begin again "
                "with the last tokens, without a cache."
            )
        new = torch.arange(t, device=device)
        if self._is_even:
            return new + self.lengths[0]
        return torch.tensor(self.lengths, device=device)[:, None] + new

    def mask(self, positions: Tensor) -> Tensor | None:
        """[t, kept] or [batch, 1, t, kept], true where a token at `positions` (of next_positions) sees what is kept
        and itself; None where that is everything, or as without a cache."""
        t = positions.shape[-1]
        kept = max(self.lengths) + t
        is_all_seen = self._is_even and (t == 1 or not any(self.lengths))
        if is_all_seen and (not self.window or kept <= self.window):
            return None
        before = positions[..., :, None] - torch.arange(kept, device=positions.device)
        seen = before >= 0
        if self.window:
            seen &= before < self.window
        return seen if self._is_even else seen[:, None]

    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep keys and values [batch, t, n_kv_head, head_dim] of `positions`; returns all that is kept of the layer,
        [batch, kept, n_kv_head, head_dim] each. Slots behind a shorter sequence's end hold finite numbers."""
        kept = self._kept[layer]
        if kept is None:
            batch, _, heads, head_dim = k.shape
            # Zeros: a slot that the mask hides still takes part, with the weight 0.
            kept = k.new_zeros(batch, heads, self.max_len, head_dim), v.new_zeros(batch, heads, self.max_len, head_dim)
            self._kept[layer] = kept
        end = max(self.lengths) + k.shape[1]
        for slots, new in zip(kept, (k, v), strict=True):
            if self._is_even:
                slots[:, :, self.lengths[0] : end] = new.transpose(1, 2)
            else:
                rows = torch.arange(len(self.lengths), device=positions.device)[:, None]
                slots[rows, :, positions] = new
        return kept[0][:, :, :end].transpose(1, 2), kept[1][:, :, :end].transpose(1, 2)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these sequences of the batch, in this order."""
        if list(rows) == list(range(len(self.lengths))):
            return
        self.lengths = [self.lengths[row] for row in rows]
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
