"""A map from hashes to numbers that takes just the bytes of both, however many there are.

Sorted runs, each at least twice as long as the next: a look-up searches as many runs as the number of entries has
binary digits at most.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.unsignedinteger]
Numbers = NDArray[np.uint32]


class SortedIndex:
    """Of keys that may stand several times."""

    def __init__(self) -> None:
        self._runs: list[tuple[Keys, Numbers]] = []

    def __len__(self) -> int:
        return sum(len(keys) for keys, _ in self._runs)

    def add(self, keys: Keys, numbers: Numbers) -> None:
        """Two arrays of equal length. While the longest runs are merged, they are there twice."""
        if not len(keys):
            return
        self._runs.append(_sorted(keys, numbers))
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            second, first = self._runs.pop(), self._runs.pop()
            self._runs.append(_sorted(np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])))

    def find(self, keys: Keys) -> tuple[NDArray[np.int64], Numbers]:
        """Every entry that has one of these keys: places in `keys`, [n], and the entries' numbers, [n]."""
        places: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        numbers: list[Numbers] = [np.zeros(0, np.uint32)]
        for run_keys, run_numbers in self._runs:
            begins = np.searchsorted(run_keys, keys)
            # Most keys are in no run.
            hits = np.flatnonzero(run_keys[np.minimum(begins, len(run_keys) - 1)] == keys)
            ends = np.searchsorted(run_keys, keys[hits], "right")
            for place, end in zip(hits, ends, strict=True):
                begin = begins[place]
                places.append(np.full(end - begin, place))
                numbers.append(run_numbers[begin:end])
        return np.concatenate(places), np.concatenate(numbers)


def _sorted(keys: Keys, numbers: Numbers) -> tuple[Keys, Numbers]:
    # Stable, which for keys in two sorted parts is a merge.
    order = np.argsort(keys, kind="stable")
    return keys[order], numbers[order]
