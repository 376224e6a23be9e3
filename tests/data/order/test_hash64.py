from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmscale.data.order.permutation import fold64, ids_checksum, key64, mix64


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
