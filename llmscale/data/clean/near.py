"""Near duplicates: MinHash with locality-sensitive hashing (Broder 1997; Indyk & Motwani 1998). The first one stays.

A document goes when it is near to one that was kept. Chains do not count: what is near only to a document that went
stays, so everything removed has a near duplicate among what is left, which the file of removed documents names.
"""

from __future__ import annotations

from array import array
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from llmscale.data.clean.findings import Removed
from llmscale.data.clean.sketches import NearSettings, Sketches
from llmscale.data.clean.sorted_index import SortedIndex

#: Documents that wait to be sorted into the index, about 6 KB each.
_MOST_RECENT = 1 << 11
#: Candidates that one document is compared with, the earliest: bounds the time where thousands share a template.
_MOST_COMPARED = 1 << 10
_BLOCK_DOCUMENTS = 1 << 12


def index_bytes_per_document(settings: NearSettings) -> int:
    """Of a document that is kept: 32 bits of hash and 32 of its number in every band, a byte of every minimum to
    compare by, and its number in the input."""
    return 8 * settings.bands + settings.permutations + 4


class NearIndex:
    """Every document that was kept. Its numbers within are those of kept documents."""

    def __init__(self, settings: NearSettings) -> None:
        self._settings = settings
        self._bands = [SortedIndex() for _ in range(settings.bands)]
        self._recent: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(settings.bands)]
        self._first_recent = 0
        self._numbers = array("I")
        self._blocks: list[NDArray[np.uint8]] = []
        self._keys: list[list[int]] = []
        self._bytes = np.zeros((0, settings.permutations), np.uint8)
        self._older: dict[int, list[int]] = {}

    def begin_batch(self, sketches: Sketches) -> None:
        """Look up the documents that will be asked about next."""
        if len(self._numbers) - self._first_recent >= _MOST_RECENT:
            self._sort_recent()
        keys = sketches.band_keys
        self._keys, self._bytes = keys.tolist(), sketches.minima
        older: dict[int, set[int]] = defaultdict(set)
        for band, index in enumerate(self._bands):
            for row, found in zip(*(found.tolist() for found in index.find(keys[:, band])), strict=True):
                older[row].add(found)
        self._older = {row: sorted(found) for row, found in older.items()}

    def decide(self, number: int, row: int) -> Removed | None:
        """Whether document `number`, in `row` of the batch, is near to an earlier one; else it is remembered."""
        recent = {kept for band, key in enumerate(self._keys[row]) for kept in self._recent[band].get(key, ())}
        candidates = [*self._older.get(row, ()), *sorted(recent)][:_MOST_COMPARED]
        if candidates:
            similarities = self._compare(row, candidates)
            [near] = np.nonzero(similarities >= self._settings.threshold)
            if len(near):
                first = self._numbers[candidates[near[0]]]
                similarity = round(float(similarities[near[0]]), 3)
                return Removed({"rule": "near_duplicate", "duplicate_of": first, "similarity": similarity})
        self._add(number, row)
        return None

    def _compare(self, row: int, candidates: list[int]) -> NDArray[np.float64]:
        """Estimated similarities, [candidates]: minima that agree in a byte, less those that do so by chance."""
        others = np.stack([self._blocks[kept // _BLOCK_DOCUMENTS][kept % _BLOCK_DOCUMENTS] for kept in candidates])
        return ((others == self._bytes[row]).mean(axis=1) - 1 / 256) / (1 - 1 / 256)

    def _add(self, number: int, row: int) -> None:
        kept = len(self._numbers)
        if kept % _BLOCK_DOCUMENTS == 0:
            self._blocks.append(np.empty((_BLOCK_DOCUMENTS, self._settings.permutations), np.uint8))
        self._blocks[-1][kept % _BLOCK_DOCUMENTS] = self._bytes[row]
        self._numbers.append(number)
        for band, key in enumerate(self._keys[row]):
            self._recent[band][key].append(kept)

    def _sort_recent(self) -> None:
        for band, recent in enumerate(self._recent):
            lengths = [len(found) for found in recent.values()]
            keys = np.repeat(np.fromiter(recent, np.uint32, len(recent)), lengths)
            numbers = np.fromiter((kept for found in recent.values() for kept in found), np.uint32, sum(lengths))
            self._bands[band].add(keys, numbers)
            recent.clear()
        self._first_recent = len(self._numbers)
