"""What a feed needs of an order of samples, whatever it is made of. NumPy only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
#: Far beyond any run; positions are int64, and are added to.
MOST_POSITIONS = 1 << 56
#: [begin, end) of stream positions, ascending and apart.
Ranges = tuple[tuple[int, int], ...]


class StreamOrder(Protocol):
    """A pure function from stream positions to samples: position g is the (g + 1)-th sample that a run sees."""

    num_samples: int
    """Samples there are; ids are below it."""

    def rows(self, positions: IntArray) -> IntArray:
        """Canonical row of each position [n], which decides the node that takes it (rank_sharding.py)."""

    def sample_ids(self, positions: IntArray) -> IntArray:
        """Sample at each position [n]."""


class SkippingOrder:
    """An order that leaves ranges of the stream out, as if they had never been in it."""

    def __init__(self, order: StreamOrder, skipped: Ranges) -> None:
        self.num_samples = order.num_samples
        self.order, self._skipped = order, skipped

    def rows(self, positions: IntArray) -> IntArray:
        """See StreamOrder."""
        return self.order.rows(stream_positions(positions, self._skipped))

    def sample_ids(self, positions: IntArray) -> IntArray:
        """See StreamOrder."""
        return self.order.sample_ids(stream_positions(positions, self._skipped))


def stream_positions(seen: IntArray, skipped: Ranges) -> IntArray:
    """Where in the stream the samples lie before which so many were seen: int64 of the same shape."""
    moved = seen.copy()
    for begin, end in skipped:
        moved[moved >= begin] += end - begin
    return moved


def join_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """[begin, end) ranges, ascending, those that touch made one."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return tuple(joined)
