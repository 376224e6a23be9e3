"""Exact and near duplicates: decide for each document, in input order, whether it copies one that was kept.

Exact duplicates have the same text apart from whitespace. Near duplicates are found by MinHash with locality-sensitive
hashing (Broder 1997; Indyk & Motwani 1998). A document is removed only if it is near one that was kept: chains do not
count. So each removed document has a near duplicate among those kept, and the record of its removal names it.
"""

from __future__ import annotations

from array import array
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
#: Candidates to compare a document with, the earliest ones: bounds the time where thousands share a template.
_MOST_COMPARED = 1 << 10
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


def index_bytes_per_document(steps: Iterable[str], settings: NearSettings) -> int:
    """Return the bytes of memory that the steps need for each document that resembles another.

    For each band that a document shares, a near duplicate's index holds where its group begins and at most one and a
    half places in it; a byte per minimum; and for the document a number and an offset.
    """
    steps = set(steps)
    near_bytes = (8 + 6) * settings.bands + settings.permutations + 12
    return ("exact" in steps) * _EXACT_BYTES + ("near" in steps) * near_bytes


@dataclass(frozen=True, slots=True)
class Sketches:
    """MinHash sketches of documents."""

    band_keys: NDArray[np.uint32]
    """A hash of the minima of each band, [documents, bands]."""
    minima: NDArray[np.uint8]
    """Low byte of each minimum, [documents, permutations] (Li & König 2010, b-bit minwise hashing)."""


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
    rows = settings.permutations // settings.bands  # the rest only take part in comparisons
    bands = minima[:, : rows * settings.bands].reshape(len(minima), settings.bands, rows).astype(np.uint64)
    keys = np.zeros(bands.shape[:2], np.uint64)
    for row in range(rows):
        keys = (keys ^ bands[:, :, row]) * HASH_MULTIPLIER
        keys ^= keys >> np.uint64(32)
    return keys.astype(np.uint32)


def find_exact_key(text: Text) -> ExactKey:
    """Return a key that is equal for texts that differ only in runs of whitespace."""
    return ExactKey(xxhash.xxh3_64_intdigest(" ".join(text.content.split()).encode()))


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


class NearIndex:
    """Documents that were kept and share a band with another, by the bands that they share."""

    def __init__(self, settings: NearSettings, bands: Iterable[NDArray[np.uint32]]) -> None:
        """Take the keys of each band, [sketches]."""
        self._threshold = settings.threshold
        self._offsets, self._begins, num_slots = _group(bands)
        self._slots = np.zeros(num_slots, np.uint32)
        """For each group of sketches with one key: how many were kept, then their places in `_numbers`."""
        num_sharing = int((np.diff(self._offsets) > 0).sum())
        self._minima = np.empty((num_sharing, settings.permutations), np.uint8)
        self._numbers = array("I")
        """Number in the input of each kept document."""

    def decide(self, number: int, sketch: int, minima: NDArray[np.uint8]) -> Removed | None:
        """Remove document `number`, which has this sketch, if it is near an earlier one; otherwise remember it.

        `sketch` is the place of its keys; places ascend from call to call.
        """
        groups = self._begins[self._offsets[sketch] : self._offsets[sketch + 1]].tolist()
        if not groups:
            return None
        counts = [int(self._slots[begin]) for begin in groups]
        near = {
            place
            for begin, count in zip(groups, counts, strict=True)
            for place in self._slots[begin + 1 : begin + 1 + min(count, _MOST_COMPARED)].tolist()
        }
        if near:
            candidates = sorted(near)[:_MOST_COMPARED]
            # Of minima that agree in a byte, 1 in 256 does by chance.
            similarities = ((self._minima[candidates] == minima).mean(axis=1) - 1 / 256) / (1 - 1 / 256)
            [hits] = np.nonzero(similarities >= self._threshold)
            if len(hits):
                first = self._numbers[candidates[hits[0]]]
                similarity = round(float(similarities[hits[0]]), 3)
                return Removed({"rule": "near_duplicate", "duplicate_of": first, "similarity": similarity})
        for begin, count in zip(groups, counts, strict=True):
            self._slots[begin] = count + 1
            self._slots[begin + 1 + count] = len(self._numbers)
        self._minima[len(self._numbers)] = minima
        self._numbers.append(number)
        return None


def _group(bands: Iterable[NDArray[np.uint32]]) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Group the sketches that share a band's key.

    Returns the offset of each sketch in the next array, [sketches + 1]; where each of its groups begins among all
    slots; and the number of slots, one for each sketch of a group and one for the group.
    """
    of_bands: list[tuple[NDArray[np.uint32], NDArray[np.int64]]] = []
    num_sketches = num_slots = 0
    for keys in bands:
        _, groups, counts = np.unique(keys, return_inverse=True, return_counts=True)
        slots = np.where(counts > 1, counts + 1, 0)
        sharing = np.flatnonzero(counts[groups] > 1)
        of_bands.append((sharing.astype(np.uint32), (num_slots + np.cumsum(slots) - slots)[groups[sharing]]))
        num_sketches = len(keys)
        num_slots = num_slots + int(slots.sum())
    offsets = np.zeros(num_sketches + 1, np.int64)
    for sketches, _ in of_bands:
        offsets[sketches + 1] += 1
    np.cumsum(offsets, out=offsets)
    places = offsets[:-1].copy()
    begins = np.empty(offsets[-1], np.int64)
    while of_bands:  # frees each band's arrays
        sketches, begins_of_band = of_bands.pop()
        begins[places[sketches]] = begins_of_band
        places[sketches] += 1
    return offsets, begins, num_slots
