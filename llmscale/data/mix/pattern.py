"""Which set each sample of a mix is from: a pattern without chance, as even as there can be. NumPy only.

Sample j of a set with share n of a period K is placed in [floor(j K / n), ceil((j + 1) K / n)), earliest end first.
That is how one processor is shared fairly (Baruah et al., "Proportionate progress", Algorithmica 1996, theorem 1): it
always works out, and keeps every set within one sample of its share at every position. A set's samples need no chance
here: they come in the random order of their own set.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Pattern:
    """One period, which repeats."""

    shares: IntArray
    """Samples of each set in a period, [sets]."""
    owners: IntArray
    """The set of each place, [period]."""
    ranks: IntArray
    """How many places before it are the same set's, [period]."""

    def owners_at(self, offsets: IntArray) -> tuple[IntArray, IntArray]:
        """Of positions counted from the pattern's begin [n]: their sets, and how many samples of the set come before
        each."""
        rounds, places = np.divmod(offsets, len(self.owners))
        owners = self.owners[places]
        return owners, rounds * self.shares[owners] + self.ranks[places]

    def counts_before(self, offset: int) -> IntArray:
        """Samples of each set, [sets], among the first `offset`."""
        rounds, places = divmod(offset, len(self.owners))
        return rounds * self.shares + np.bincount(self.owners[:places], minlength=len(self.shares))


@lru_cache(maxsize=16)
def build_pattern(shares: tuple[int, ...]) -> Pattern:
    """The pattern of a period of sum(shares) samples."""
    period = sum(shares)
    ranks, owners = np.empty(period, np.int64), np.empty(period, np.int64)
    waiting = [(0, owner) for owner, share in enumerate(shares) if share]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    placed = [0] * len(shares)
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, owner = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(placed[owner] + 1) * period // shares[owner]), owner))
        _, owner = heapq.heappop(ready)
        owners[place], ranks[place] = owner, placed[owner]
        placed[owner] += 1
        heapq.heappush(waiting, (placed[owner] * period // shares[owner], owner))
    return Pattern(np.array(shares, np.int64), owners, ranks)
