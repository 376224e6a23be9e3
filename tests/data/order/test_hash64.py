from __future__ import annotations

import numpy as np

from llmscale.data.order.permutation import fold64, key64, mix64


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
