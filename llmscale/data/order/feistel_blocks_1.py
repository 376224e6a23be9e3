"""The first order, `feistel-blocks-1`, kept unchanged for the runs that began with it: see order.py for today's.

Position p of an epoch belongs to canonical row p % NCN and is that row's entry p // NCN. A row is a fixed span of the
shards in an order that the seed decides. Each epoch, each row shuffles its shards, then its samples within blocks of
`block_size` neighbours, the first block being cut at a random length. Rows that are few shards long, and short blocks,
show: batches that are no multiple of NCN come from a part of the set, and period NCN / batch is seen in the losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from llmscale.data.order.feistel import permute
from llmscale.data.order.hash64 import fold64, key64
from llmscale.errors import ConfigError

IntArray = NDArray[np.int64]

ALGORITHM = "feistel-blocks-1"

# Domains of the keys: equal (seed, epoch) must not give related shard orders, block cuts and block shuffles.
_SHARDS, _SPANS, _FIRST_BLOCK, _BLOCKS = range(4)


@dataclass(frozen=True)
class _EpochTable:
    """One epoch's order of spans: span i covers places [ends[i-1], ends[i]) of the concatenated rows."""

    starts: IntArray
    """First sample id of each span, [spans]."""
    begins: IntArray
    """First place of each span, [spans]."""
    ends: IntArray
    """Place behind each span, [spans]."""


class FeistelBlocksOrder:
    """Sample ids by stream position.

    Raises ConfigError for settings that cannot form an order.
    """

    def __init__(
        self,
        samples_per_shard: Sequence[int] | IntArray,
        *,
        seed: int,
        shuffle: bool = True,
        num_canonical_nodes: int,
        block_size: int,
    ) -> None:
        for name, value in (("num_canonical_nodes", num_canonical_nodes), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}.")
        self.samples_per_shard = np.asarray(samples_per_shard, np.int64)
        self.num_samples = int(self.samples_per_shard.sum())
        if self.num_samples < 1:
            raise ConfigError("The order of an empty set is not defined: the set holds no samples.")
        self.seed = seed
        self.shuffle = shuffle
        self.num_canonical_nodes = num_canonical_nodes
        self.block_size = block_size
        rows = np.arange(num_canonical_nodes, dtype=np.int64)
        #: Entries of each row, [NCN]: positions p < n with p % NCN == row.
        self._row_sizes = (self.num_samples - rows + num_canonical_nodes - 1) // num_canonical_nodes
        self._row_begins = np.cumsum(self._row_sizes) - self._row_sizes
        self._span_starts, self._span_sizes, self._span_rows = self._cut_rows()
        # Two epochs live at a time: a global batch may straddle them.
        self._epoch_table = lru_cache(maxsize=2)(self._build_epoch_table)

    def rows(self, positions: IntArray) -> IntArray:
        """Canonical row of each stream position, int64 of the same shape."""
        return (positions % self.num_samples) % self.num_canonical_nodes

    def sample_ids(self, positions: IntArray) -> IntArray:
        """Sample id at each stream position (non-negative, any order), int64 [n] for positions [n]."""
        epochs = positions // self.num_samples
        places = positions % self.num_samples
        if not self.shuffle:
            return places
        ids = np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs):
            chosen = np.flatnonzero(epochs == epoch)
            ids[chosen] = self._ids_in_epoch(int(epoch), places[chosen])
        return ids

    def identity(self, set_fingerprint: str) -> dict[str, str | int | bool | None]:
        """Everything that decides the order. A checkpoint keeps it; a resume with another is refused."""
        return {
            "algorithm": ALGORITHM,
            "set_fingerprint": set_fingerprint,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_canonical_nodes": self.num_canonical_nodes,
            "block_size": self.block_size,
        }

    def _cut_rows(self) -> tuple[IntArray, IntArray, IntArray]:
        """Order the shards by the seed and cut them at row borders: (first id, size, row) of each span."""
        shard_ends = np.cumsum(self.samples_per_shard)
        shard_starts = shard_ends - self.samples_per_shard
        shards = np.arange(len(shard_starts), dtype=np.uint64)
        shard_order = np.argsort(fold64(key64(self.seed, _SHARDS), shards), kind="stable")
        place_ends = np.cumsum(self.samples_per_shard[shard_order])
        place_begins = place_ends - self.samples_per_shard[shard_order]
        begins = np.unique(np.concatenate([place_begins, self._row_begins]))
        begins = begins[begins < self.num_samples]
        owner = np.searchsorted(place_ends, begins, side="right")
        starts = shard_starts[shard_order[owner]] + begins - place_begins[owner]
        sizes = np.diff(np.append(begins, self.num_samples))
        rows = np.searchsorted(self._row_begins + self._row_sizes, begins, side="right")
        return starts, sizes, rows

    def _build_epoch_table(self, epoch: int) -> _EpochTable:
        spans = np.arange(len(self._span_starts), dtype=np.uint64)
        order = np.lexsort((fold64(key64(self.seed, epoch, _SPANS), spans), self._span_rows))
        ends = np.cumsum(self._span_sizes[order])
        return _EpochTable(self._span_starts[order], ends - self._span_sizes[order], ends)

    def _ids_in_epoch(self, epoch: int, places: IntArray) -> IntArray:
        """Sample ids of places [n] in the epoch: row and entry, entry shuffled in its block, then the id."""
        rows = places % self.num_canonical_nodes
        entries = places // self.num_canonical_nodes
        row_keys = fold64(key64(self.seed, epoch, _FIRST_BLOCK), rows.astype(np.uint64))
        first_sizes = (row_keys % np.uint64(self.block_size)).astype(np.int64) + 1
        blocks = (entries - first_sizes + self.block_size) // self.block_size
        begins = np.maximum(first_sizes + (blocks - 1) * self.block_size, 0)
        ends = np.minimum(first_sizes + blocks * self.block_size, self._row_sizes[rows])
        block_keys = fold64(key64(self.seed, epoch, _BLOCKS), rows.astype(np.uint64))
        block_keys = fold64(block_keys, blocks.astype(np.uint64))
        shuffled = begins + permute(entries - begins, ends - begins, block_keys)
        table = self._epoch_table(epoch)
        row_places = self._row_begins[rows] + shuffled
        spans = np.searchsorted(table.ends, row_places, side="right")
        return table.starts[spans] + row_places - table.begins[spans]
