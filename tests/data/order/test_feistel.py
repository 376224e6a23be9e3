from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmscale.data.order.permutation import permute


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_it_is_a_permutation(size: int, key: int) -> None:
    images = permute(np.arange(size), np.full(size, size), np.full(size, key, np.uint64))
    assert np.array_equal(np.sort(images), np.arange(size))


def test_elements_have_their_own_size_and_key() -> None:
    size = np.array([1, 5, 1000, 1 << 33])
    index = np.array([0, 4, 999, (1 << 33) - 1])
    key = np.array([1, 2, 3, 4], np.uint64)
    together = permute(index, size, key)
    alone = [int(permute(index[i : i + 1], size[i : i + 1], key[i : i + 1])[0]) for i in range(4)]
    assert together.tolist() == alone
    assert (together < size).all()


@pytest.mark.parametrize("size", [2, 3, 5, 6, 10, 33])
def test_images_and_pairs_are_uniform(size: int) -> None:
    """Chi-square over keys: where 0 goes, and where 0 and 1 go together."""
    trials = 2000 * size
    keys = np.arange(trials, dtype=np.uint64) * np.uint64(0x2545F4914F6CDD1D)
    first = permute(np.zeros(trials, np.int64), np.full(trials, size), keys)
    second = permute(np.ones(trials, np.int64), np.full(trials, size), keys)
    counts = np.bincount(first, minlength=size)
    assert _chi_square(counts) < _limit(size - 1)
    pairs = np.bincount(first * size + second, minlength=size * size).reshape(size, size)
    assert (np.diagonal(pairs) == 0).all()
    assert _chi_square(pairs[~np.eye(size, dtype=bool)]) < _limit(size * (size - 1) - 1)


def _chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def _limit(degrees: int) -> float:
    """About the 99.99th percentile (Wilson-Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
