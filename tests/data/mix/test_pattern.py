from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmscale.data.mixture import build_pattern


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(sum))
def test_every_set_is_within_one_sample_of_its_share_at_every_position(shares: list[int]) -> None:
    pattern = build_pattern(tuple(shares))
    period = sum(shares)
    counts = np.cumsum(np.eye(len(shares), dtype=int)[pattern.owners], axis=0)
    due = np.arange(1, period + 1)[:, None] * np.array(shares) / period
    assert np.abs(counts - due).max() < 1
    assert counts[-1].tolist() == shares


@pytest.mark.parametrize("shares", [(60, 22, 8, 8, 3), (1,), (0, 5, 1), (1000, 1)])
def test_any_position_on_its_own_is_as_in_one_walk(shares: tuple[int, ...]) -> None:
    pattern = build_pattern(shares)
    offsets = np.arange(3 * sum(shares) + 2)
    owners, before = pattern.owners_at(offsets)
    seen = np.zeros(len(shares), int)
    for offset, owner, count in zip(offsets.tolist(), owners.tolist(), before.tolist(), strict=True):
        assert seen[owner] == count
        assert pattern.counts_before(offset).tolist() == seen.tolist()
        seen[owner] += 1


def test_a_window_of_whole_periods_is_exact_wherever_it_begins() -> None:
    pattern = build_pattern((60, 22, 8, 8, 3))
    for begin in (0, 1, 57, 4711):
        inside = pattern.counts_before(begin + 1010) - pattern.counts_before(begin)
        assert inside.tolist() == [600, 220, 80, 80, 30]
