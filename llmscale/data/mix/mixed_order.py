"""The order of a mix: every position belongs to a set, and is the next sample in that set's own order. NumPy only.

A pure function of (seed, position), as the order of one set is: the same at any number of ranks, and a resume needs no
state but the position. Each set's samples come each once per epoch of that set, whatever stages the run goes through.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llmscale.data.mix.training_sets import MixRecipe
from llmscale.data.order.sample_order import Ranges, StreamOrder, stream_positions

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
    """Return the pattern of a period of sum(shares) samples, as even as possible.

    Sample j of a set with share n of a period K is placed in [floor(j K / n), ceil((j + 1) K / n)), earliest end first.
    One processor is shared fairly in that way (Baruah et al., "Proportionate progress", Algorithmica 1996, theorem 1):
    it always works out, and keeps every set within one sample of its share at every position. Nothing here is random:
    the samples come in the random order of their own set.
    """
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


@dataclass(frozen=True)
class PlacedStage:
    """A stage where it lies in the stream."""

    begin: int
    """Its first stream position."""
    shares: tuple[int, ...]
    """Of each set, in a period of the pattern."""


def place_stages(
    recipe: MixRecipe,
    total_samples: int,
    global_batch_size: int,
    *,
    saved: Sequence[PlacedStage] = (),
    seen: int = 0,
    skipped: Ranges = (),
) -> tuple[PlacedStage, ...]:
    """The stages of a run of `total_samples`, cut between steps, of which the first `seen` samples were drawn as the
    `saved` stages say: what was seen stays as it was, what is to come is as the file says now. `skipped` are ranges of
    the stream that the run leaves out. Neighbours of equal shares are one stage."""

    def place(samples: int) -> int:
        return int(stream_positions(np.array([samples]), skipped)[0])

    here = place(seen) if seen else 0
    stages = [stage for stage in saved if stage.begin < here]
    begin = 0
    for number, stage in enumerate(recipe.stages, 1):
        end = place(round(stage.until * total_samples / global_batch_size) * global_batch_size)
        is_last = number == len(recipe.stages)
        goes_on = bool(stages) and stages[-1].shares == stage.shares
        if (end > max(begin, here) or is_last) and not goes_on:
            # A run that had no mix before is read on as if it had been one from its beginning.
            stages.append(PlacedStage(max(begin, here) if stages else 0, stage.shares))
        begin = max(begin, end)
    return tuple(stages)


class MixedOrder:
    """The order of several sets. A sample's id is its id in its set, behind all samples of the sets before."""

    def __init__(self, orders: Sequence[StreamOrder], stages: Sequence[PlacedStage]) -> None:
        """`stages`: the first begins at 0, each later than the one before."""
        sizes = [order.num_samples for order in orders]
        self.first_ids = np.concatenate(([0], np.cumsum(sizes)))[:-1]
        """First sample id of each set, [sets]."""
        self.num_samples = sum(sizes)
        self.orders, self.stages = tuple(orders), tuple(stages)
        self._begins = np.array([stage.begin for stage in stages], np.int64)
        self._drawn_before = [np.zeros(len(orders), np.int64)]
        for stage, following in pairwise(stages):
            drawn = build_pattern(stage.shares).counts_before(following.begin - stage.begin)
            self._drawn_before.append(self._drawn_before[-1] + drawn)

    def rows(self, positions: IntArray) -> IntArray:
        """See StreamOrder: each set's own rows."""
        rows = np.empty(len(positions), np.int64)
        for owner, chosen, places in self._by_set(positions):
            rows[chosen] = self.orders[owner].rows(places)
        return rows

    def sample_ids(self, positions: IntArray) -> IntArray:
        """See StreamOrder."""
        ids = np.empty(len(positions), np.int64)
        for owner, chosen, places in self._by_set(positions):
            ids[chosen] = self.first_ids[owner] + self.orders[owner].sample_ids(places)
        return ids

    def drawn_before(self, position: int) -> IntArray:
        """Samples of each set before a stream position, [sets]."""
        stage = int(np.searchsorted(self._begins, position, side="right")) - 1
        offset = position - self.stages[stage].begin
        return self._drawn_before[stage] + build_pattern(self.stages[stage].shares).counts_before(offset)

    def set_of(self, sample_ids: IntArray) -> IntArray:
        """The set that each sample is of, [n]."""
        return np.searchsorted(self.first_ids, sample_ids, side="right") - 1

    def _by_set(self, positions: IntArray) -> list[tuple[int, IntArray, IntArray]]:
        """Each set met, the indices of its positions, and their positions in its own order."""
        owners, places = np.empty_like(positions), np.empty_like(positions)
        stages = np.searchsorted(self._begins, positions, side="right") - 1
        for number in np.unique(stages):
            stage, chosen = self.stages[number], np.flatnonzero(stages == number)
            found, before = build_pattern(stage.shares).owners_at(positions[chosen] - stage.begin)
            owners[chosen], places[chosen] = found, self._drawn_before[number][found] + before
        by_set = ((int(owner), np.flatnonzero(owners == owner)) for owner in np.unique(owners))
        return [(owner, chosen, places[chosen]) for owner, chosen in by_set]
