"""MinHash sketches of documents, by rensa."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmscale.data.clean.text import Hashes, hash_ngrams
from llmscale.errors import DataError

MAX_PERMUTATIONS = 1024
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class NearSettings:
    """When two documents are near duplicates.

    Documents whose shingles have the Jaccard similarity s share one of b bands of r minima, and so are compared, with
    the probability 1 - (1 - s^r)^b (Leskovec, Rajaraman & Ullman, Mining of Massive Datasets, 3.4.2). Where 5 % of the
    words of a text are replaced, 0.95^3 of its shingles of three words stay, so s = 0.75, which is found with 99.9 %.
    """

    permutations: int = 128
    bands: int = 25
    threshold: float = 0.6
    """Estimated similarity from which on a document goes."""
    shingle_words: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.bands <= self.permutations <= MAX_PERMUTATIONS:
            raise DataError(
                f"--bands {self.bands} of --permutations {self.permutations}: at least 1 and at most as many as "
                f"permutations, of which there may be {MAX_PERMUTATIONS:,}."
            )

    @property
    def rows_per_band(self) -> int:
        """Minima of a band; permutations that fill none only take part in comparing."""
        return self.permutations // self.bands


@dataclass(frozen=True, slots=True)
class Sketches:
    """What documents are compared by."""

    band_keys: NDArray[np.uint32]
    """A hash of the minima of each band, [documents, bands]."""
    minima: NDArray[np.uint8]
    """The low byte of each, [documents, permutations] (Li & König 2010, b-bit minwise hashing)."""

    def __len__(self) -> int:
        return len(self.minima)


def sketch(word_hashes: Sequence[Hashes], settings: NearSettings) -> Sketches:
    """Of each document, by its shingles. Each must have a word."""
    if not word_hashes:
        return Sketches(np.zeros((0, settings.bands), np.uint32), np.zeros((0, settings.permutations), np.uint8))
    from rensa import RMinHash

    # A document shorter than a shingle is one.
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
        keys = (keys ^ bands[:, :, row]) * _MULTIPLIER
        keys ^= keys >> np.uint64(32)
    return keys.astype(np.uint32)
