"""Which samples of a global batch each rank takes. NumPy only.

The global batch is what counts; how it is divided only decides which node must hold which shards. Every layout
is an exact partition; where the layout divides the canonical rows, each node meets only its own rows (but for
a batch that straddles an epoch's end).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmscale.errors import ConfigError

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class RankLayout:
    """Where this rank stands among the data-parallel ones. Raises ConfigError when the numbers contradict."""

    data_parallel_rank: int
    """Ranks are numbered node by node, as DeepSpeed's launcher does."""
    ranks_per_node: tuple[int, ...]
    """Data-parallel ranks on each node, in the order of their ranks."""

    def __post_init__(self) -> None:
        if not self.ranks_per_node or min(self.ranks_per_node) < 1:
            raise ConfigError(f"Every node needs at least one rank, not {list(self.ranks_per_node)}.")
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise ConfigError(f"rank must be in 0..{self.data_parallel_size - 1}, not {self.data_parallel_rank}.")

    @property
    def data_parallel_size(self) -> int:
        return sum(self.ranks_per_node)


def shard_batch(positions: IntArray, rows: IntArray, layout: RankLayout) -> IntArray:
    """This rank's share of a global batch: `positions` [G] with their canonical rows [G] -> [G / D].

    A stable sort by preferred node, cut into D = data_parallel_size equal parts. Raises ConfigError when D does
    not divide G.
    """
    if len(positions) % layout.data_parallel_size:
        raise ConfigError(
            f"A global batch of {len(positions)} samples cannot be dealt to {layout.data_parallel_size} ranks equally: "
            "the world size must divide it."
        )
    share = len(positions) // layout.data_parallel_size
    begin = layout.data_parallel_rank * share
    if len(layout.ranks_per_node) == 1:  # every row prefers it, so that sorting would change nothing
        return positions[begin : begin + share]
    order = np.argsort(preferred_nodes(rows, layout.ranks_per_node), kind="stable")
    return positions[order[begin : begin + share]]


def preferred_nodes(rows: IntArray, ranks_per_node: Sequence[int]) -> IntArray:
    """The node that should hold each row: rows go round the nodes, as often as a node has ranks.

    Equal nodes take row % num_nodes. Consecutive rows fill every node's share exactly.
    """
    turns = math.gcd(*ranks_per_node)
    counts = np.array(ranks_per_node, np.int64) // turns
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)[rows % counts.sum()]
