"""The first order, `feistel-blocks-1`: not one id may change for the runs that began with it.

Position p of an epoch belongs to canonical row p % NCN and is that row's entry p // NCN. A row is a fixed span of the
shards in an order that the seed decides. Each epoch, each row shuffles its shards, then its samples within blocks of
`block_size` neighbours, the first block being cut at a random length. Rows that are few shards long, and short blocks,
show: batches that are no multiple of NCN come from a part of the set, and period NCN / batch is seen in the losses.
"""

from __future__ import annotations

import numpy as np

from llmscale.data.order.permutation import fold64, key64, permute
from llmscale.data.order.sample_order import DEFAULT_BLOCK_SIZE, IntArray, SampleOrder

# Domains of the keys, with SampleOrder's of the spans.
_SHARDS, _FIRST_BLOCK, _BLOCKS = 0, 2, 3


class FeistelBlocksOrder(SampleOrder):
    """Sample ids by stream position."""

    algorithm = "feistel-blocks-1"

    def rows(self, positions: IntArray) -> IntArray:
        """Canonical row of each stream position, int64 of the same shape."""
        return (positions % self.num_samples) % self.num_canonical_nodes

    def _order_shards(self, shard_starts: IntArray) -> IntArray:
        shards = np.arange(len(shard_starts), dtype=np.uint64)
        return np.argsort(fold64(key64(self.seed, _SHARDS), shards), kind="stable")

    def _shuffled_entries(self, epoch: int, places: IntArray) -> tuple[IntArray, IntArray]:
        size = self.block_size or DEFAULT_BLOCK_SIZE
        rows = places % self.num_canonical_nodes
        entries = places // self.num_canonical_nodes
        row_keys = fold64(key64(self.seed, epoch, _FIRST_BLOCK), rows.astype(np.uint64))
        first_sizes = (row_keys % np.uint64(size)).astype(np.int64) + 1
        blocks = (entries - first_sizes + size) // size
        begins = np.maximum(first_sizes + (blocks - 1) * size, 0)
        ends = np.minimum(first_sizes + blocks * size, self._row_sizes[rows])
        block_keys = fold64(key64(self.seed, epoch, _BLOCKS), rows.astype(np.uint64))
        block_keys = fold64(block_keys, blocks.astype(np.uint64))
        return rows, begins + permute(entries - begins, ends - begins, block_keys)
