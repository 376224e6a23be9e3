"""Exact duplicates: documents of the same text but for whitespace. The first one stays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from llmscale.data.clean.findings import ExactKey, Removed
from llmscale.data.clean.sorted_index import SortedIndex
from llmscale.data.clean.text import Text

#: 64 bits of hash and 32 of a document's number. Among 100 M documents two that differ are taken for equal with a
#: probability of 0.03 %: n^2 / 2^65.
BYTES_PER_DOCUMENT = 12
#: Documents that wait to be sorted.
_MOST_RECENT = 1 << 14


def find_exact_key(text: Text) -> ExactKey:
    """Equal for texts that differ in runs of whitespace at most."""
    return ExactKey(xxhash.xxh3_64_intdigest(" ".join(text.content.split())))


class ExactIndex:
    """Keys of all documents that were kept."""

    def __init__(self) -> None:
        self._index = SortedIndex()
        self._recent: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def begin_batch(self, keys: Sequence[int]) -> None:
        """Look up the keys that will be asked about next."""
        if len(self._recent) >= _MOST_RECENT:
            entries = len(self._recent)
            self._index.add(
                np.fromiter(self._recent, np.uint64, entries), np.fromiter(self._recent.values(), np.uint32, entries)
            )
            self._recent = {}
        places, numbers = self._index.find(np.array(keys, np.uint64))
        self._older = {keys[place]: number for place, number in zip(places.tolist(), numbers.tolist(), strict=True)}

    def decide(self, number: int, key: int) -> Removed | None:
        """Whether document `number` is a copy of an earlier one; else it is remembered."""
        first = self._older[key] if key in self._older else self._recent.setdefault(key, number)
        return None if first == number else Removed({"rule": "exact_duplicate", "duplicate_of": first})
