from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmscale.data.order.permutation import fold64, ids_checksum, key64, mix64, permute


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


def test_it_is_splitmix64() -> None:
    """The first outputs of splitmix64 with seed 1234567, as published with Vigna's reference code."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = np.array([1234567], np.uint64) + golden * np.arange(1, 4, dtype=np.uint64)
    assert mix64(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_keys_depend_on_every_part_and_its_place() -> None:
    keys = {int(key64(*parts)[0]) for parts in [(0,), (1,), (-1,), (0, 0), (0, 1), (1, 0), (2**63, 0)]}
    assert len(keys) == 7


def test_fold_broadcasts() -> None:
    folded = fold64(key64(3), np.arange(4, dtype=np.uint64))
    assert folded.tolist() == [int(fold64(key64(3), np.array([i], np.uint64))[0]) for i in range(4)]


IDS = st.lists(st.integers(0, 2**31), max_size=30)


@given(IDS, IDS)
def test_checksums_add_up_over_ranks_in_any_order(first: list[int], second: list[int]) -> None:
    together = ids_checksum(np.array([*second, *first[::-1]], np.int64))
    total = ids_checksum(np.array(first, np.int64)) + ids_checksum(np.array(second, np.int64))
    assert (total - together) % 2**64 == 0
    assert -(2**63) <= together < 2**63


def test_checksum_notices_one_other_missing_or_repeated_id() -> None:
    ids = np.arange(100)
    checksum = ids_checksum(ids)
    for wrong in (np.r_[ids[1:], 100], ids[1:], np.r_[ids, 5], np.r_[ids[:-1], 98], np.r_[ids[2:], 0, 2]):
        assert ids_checksum(wrong) != checksum
