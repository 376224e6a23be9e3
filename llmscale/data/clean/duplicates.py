"""Exact and near duplicates: decide for each document, in input order, whether it copies one that was kept.

Exact duplicates have the same text apart from whitespace. Near duplicates are found by MinHash with locality-sensitive
hashing (Broder 1997; Indyk & Motwani 1998). A document is removed only if it is near one that was kept: chains do not
count. So each removed document has a near duplicate among those kept, and the record of its removal names it.
"""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmscale.data.clean.filters import HASH_MULTIPLIER, ExactKey, Hashes, Removed, Text, hash_ngrams
from llmscale.errors import DataError

MAX_PERMUTATIONS = 1024
#: 64 bits of hash and 32 of a document's number. Among 100 M documents, the probability that two different ones have
#: the same hash is 0.03 %: n^2 / 2^65.
_EXACT_BYTES = 12
#: Sketches to collect before they are sorted into an index. One takes about 6 KB until then.
_MOST_RECENT = 1 << 11
#: Candidates to compare a document with, the earliest ones: bounds the time where thousands share a template.
_MOST_COMPARED = 1 << 10
_BLOCK_DOCUMENTS = 1 << 12

Keys = NDArray[np.unsignedinteger]
Numbers = NDArray[np.uint32]
_NO_DOCUMENT = np.iinfo(np.uint32).max


@dataclass(frozen=True)
class NearSettings:
    """Settings that decide which documents are near duplicates.

    Two documents are compared if they share one of b bands of r minima. With a Jaccard similarity s of their shingles,
    the probability of that is 1 - (1 - s^r)^b (Leskovec, Rajaraman & Ullman, Mining of Massive Datasets, 3.4.2).
    Example: if 5 % of a text's words are replaced, 0.95^3 of its shingles of three words remain. Then s = 0.75, and the
    copy is found with a probability of 99.9 %.
    """

    permutations: int = 128
    bands: int = 25
    threshold: float = 0.6
    """Lowest estimated similarity at which a document is removed."""
    shingle_words: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.bands <= self.permutations <= MAX_PERMUTATIONS:
            raise DataError(
                f"--bands {self.bands} of --permutations {self.permutations}: give 1 to {self.permutations:,} bands, "
                f"and at most {MAX_PERMUTATIONS:,} permutations."
            )

    @property
    def rows_per_band(self) -> int:
        """Minima per band; the rest of the permutations only take part in comparisons."""
        return self.permutations // self.bands


def index_bytes_per_document(steps: Iterable[str], settings: NearSettings) -> int:
    """Return the bytes of memory that the steps need for each document kept.

    A near duplicate's index holds a 32-bit hash and number per band, a byte per minimum, and the document's number.
    """
    steps = set(steps)
    near_bytes = 8 * settings.bands + settings.permutations + 4
    return ("exact" in steps) * _EXACT_BYTES + ("near" in steps) * near_bytes


@dataclass(frozen=True, slots=True)
class Sketches:
    """MinHash sketches of documents."""

    band_keys: NDArray[np.uint32]
    """A hash of the minima of each band, [documents, bands]."""
    minima: NDArray[np.uint8]
    """Low byte of each minimum, [documents, permutations] (Li & König 2010, b-bit minwise hashing)."""

    def __len__(self) -> int:
        return len(self.minima)


def sketch(word_hashes: Sequence[Hashes], settings: NearSettings) -> Sketches:
    """Sketch the shingles of each document, which must have a word."""
    if not word_hashes:
        return Sketches(np.zeros((0, settings.bands), np.uint32), np.zeros((0, settings.permutations), np.uint8))
    from rensa import RMinHash

    # A document shorter than a shingle is one shingle.
    shingles = [hash_ngrams(hashes, min(settings.shingle_words, len(hashes))) for hashes in word_hashes]
    offsets = np.cumsum([0, *map(len, shingles)]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        np.concatenate(shingles), offsets, settings.permutations, settings.seed
    )
    minima = np.array(matrix.to_rows(), np.uint32)
    return Sketches(_band_keys(minima, settings), minima.astype(np.uint8))


def _band_keys(minima: NDArray[np.uint32], settings: NearSettings) -> NDArray[np.uint32]:
    rows = settings.rows_per_band
    bands = minima[:, : rows * settings.bands].reshape(len(minima), settings.bands, rows).astype(np.uint64)
    keys = np.zeros(bands.shape[:2], np.uint64)
    for row in range(rows):
        keys = (keys ^ bands[:, :, row]) * HASH_MULTIPLIER
        keys ^= keys >> np.uint64(32)
    return keys.astype(np.uint32)


def find_exact_key(text: Text) -> ExactKey:
    """Return a key that is equal for texts that differ only in runs of whitespace."""
    return ExactKey(xxhash.xxh3_64_intdigest(" ".join(text.content.split()).encode()))


class SortedIndex:
    """A multimap from hashes to numbers that takes only the bytes of both.

    It holds sorted runs, each at least twice as long as the next, so a look-up searches log2(entries) runs at most.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Keys, Numbers]] = []

    def __len__(self) -> int:
        return sum(len(keys) for keys, _ in self._runs)

    def add(self, keys: Keys, numbers: Numbers) -> None:
        """Add two arrays of equal length. While the longest runs are merged, both copies are in memory."""
        if not len(keys):
            return
        self._runs.append(_sorted(keys, numbers))
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            second, first = self._runs.pop(), self._runs.pop()
            self._runs.append(_sorted(np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])))

    def find(self, keys: Keys) -> tuple[NDArray[np.int64], Numbers]:
        """Return every entry with one of these keys: positions in `keys`, [n], and the entries' numbers, [n]."""
        positions: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        numbers: list[Numbers] = [np.zeros(0, np.uint32)]
        for run_keys, run_numbers in self._runs:
            begins = np.searchsorted(run_keys, keys)
            # Most keys are in no run.
            hits = np.flatnonzero(run_keys[np.minimum(begins, len(run_keys) - 1)] == keys)
            ends = np.searchsorted(run_keys, keys[hits], "right")
            for position, end in zip(hits, ends, strict=True):
                begin = begins[position]
                positions.append(np.full(end - begin, position))
                numbers.append(run_numbers[begin:end])
        return np.concatenate(positions), np.concatenate(numbers)


def _sorted(keys: Keys, numbers: Numbers) -> tuple[Keys, Numbers]:
    # A stable sort of two sorted runs is a merge.
    order = np.argsort(keys, kind="stable")
    return keys[order], numbers[order]


class ExactIndex:
    """First document of each key that several documents have."""

    def __init__(self, keys: Hashes) -> None:
        """Take the keys of all documents."""
        values, counts = np.unique(keys, return_counts=True)
        self._keys = values[counts > 1]
        self._first = np.full(len(self._keys), _NO_DOCUMENT, np.uint32)

    def decide(self, number: int, key: int) -> Removed | None:
        """Remove document `number` if it copies an earlier one; otherwise remember it."""
        place = np.searchsorted(self._keys, np.uint64(key))
        if place == len(self._keys) or self._keys[place] != key:
            return None
        if self._first[place] == _NO_DOCUMENT:
            self._first[place] = number
            return None
        return Removed({"rule": "exact_duplicate", "duplicate_of": int(self._first[place])})


def find_repeated(keys: NDArray[np.unsignedinteger]) -> NDArray[np.bool_]:
    """Return which of the keys occur more than once, [keys]."""
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    repeated = np.zeros(len(keys), np.bool_)
    repeated[order[1:][same]] = True
    repeated[order[:-1][same]] = True
    return repeated


class NearIndex:
    """Sketches of all documents that were kept, numbered consecutively here."""

    def __init__(self, settings: NearSettings) -> None:
        self._settings = settings
        self._bands = [SortedIndex() for _ in range(settings.bands)]
        self._recent: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(settings.bands)]
        """Kept documents by band and key that are not in the indexes yet."""
        self._first_recent = 0
        self._numbers = array("I")
        """Number in the input of each kept document."""
        self._blocks: list[NDArray[np.uint8]] = []
        self._keys: list[list[int]] = []
        self._minima = np.zeros((0, settings.permutations), np.uint8)
        self._older: dict[int, list[int]] = {}
        """Candidates from the indexes, by row of this batch."""

    def begin_batch(self, sketches: Sketches) -> None:
        """Look up the documents that `decide` will get next."""
        if len(self._numbers) - self._first_recent >= _MOST_RECENT:
            self._sort_recent()
        keys = sketches.band_keys
        self._keys, self._minima = keys.tolist(), sketches.minima
        older: dict[int, set[int]] = defaultdict(set)
        for band, index in enumerate(self._bands):
            rows, documents = index.find(keys[:, band])
            for row, document in zip(rows.tolist(), documents.tolist(), strict=True):
                older[row].add(document)
        self._older = {row: sorted(documents) for row, documents in older.items()}

    def decide(self, number: int, row: int) -> Removed | None:
        """Remove document `number`, in `row` of the batch, if it is near an earlier one; otherwise remember it."""
        recent = {document for band, key in enumerate(self._keys[row]) for document in self._recent[band].get(key, ())}
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
        """Estimate similarities, [candidates], by minima that agree in a byte, minus those that agree by chance."""
        places = [divmod(document, _BLOCK_DOCUMENTS) for document in candidates]
        others = np.stack([self._blocks[block][place] for block, place in places])
        return ((others == self._minima[row]).mean(axis=1) - 1 / 256) / (1 - 1 / 256)

    def _add(self, number: int, row: int) -> None:
        document = len(self._numbers)
        if document % _BLOCK_DOCUMENTS == 0:
            self._blocks.append(np.empty((_BLOCK_DOCUMENTS, self._settings.permutations), np.uint8))
        self._blocks[-1][document % _BLOCK_DOCUMENTS] = self._minima[row]
        self._numbers.append(number)
        for band, key in enumerate(self._keys[row]):
            self._recent[band][key].append(document)

    def _sort_recent(self) -> None:
        for band, recent in enumerate(self._recent):
            lengths = [len(documents) for documents in recent.values()]
            keys = np.repeat(np.fromiter(recent, np.uint32, len(recent)), lengths)
            numbers = np.fromiter(itertools.chain.from_iterable(recent.values()), np.uint32, sum(lengths))
            self._bands[band].add(keys, numbers)
            recent.clear()
        self._first_recent = len(self._numbers)
