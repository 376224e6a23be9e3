"""Which rank holds up the others for long. No torch.

Ranks wait for each other in every step, so the time of a step says nothing of who is slow. Two things a rank does alone
do: waiting for its own data, and arithmetic before the first exchange (training/arithmetic_probe.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

SlowPhase = Literal["data wait", "arithmetic"]
#: Readings of which the median counts: a rank is slow when it is so for most of that time.
READINGS = 8
#: How many times as long from which a rank is slow.
LEAST_RATIO = 1.25


@dataclass(frozen=True)
class SlowRank:
    """One that is slower than the median of the others."""

    rank: int
    phase: SlowPhase
    ratio: float
    """Times as long: its arithmetic; or a step, because of its data."""


class SlowRanks:
    """Remembers readings of all ranks, and whom it has named."""

    def __init__(self, world_size: int) -> None:
        self._ratios: dict[tuple[SlowPhase, int], deque[float]] = {
            (phase, rank): deque(maxlen=READINGS)
            for phase in ("data wait", "arithmetic")
            for rank in range(world_size if world_size > 1 else 0)
        }
        self._named: set[tuple[SlowPhase, int]] = set()

    def add(self, phase: SlowPhase, seconds: Sequence[float], of_s: float | None = None) -> list[SlowRank]:
        """Readings by rank; those that are news. Without `of_s` the ratio is to the others' median; with it, a part of
        something that takes so long, it is how much longer that takes."""
        found = []
        for rank, own in enumerate(seconds):
            others = [*seconds[:rank], *seconds[rank + 1 :]]
            ratios = self._ratios.get((phase, rank))
            usual = median(others) if others else 0.0
            base = of_s if of_s is not None else usual
            if ratios is None or base <= 0.0:
                continue
            ratios.append(1 + (own - usual) / base)
            if len(ratios) < READINGS:
                continue
            is_slow = median(ratios) >= LEAST_RATIO
            if is_slow and (phase, rank) not in self._named:
                found.append(SlowRank(rank, phase, median(ratios)))
            (self._named.add if is_slow else self._named.discard)((phase, rank))
        return found
