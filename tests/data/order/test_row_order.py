from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmscale.data.order.permutation import key64
from llmscale.data.order.sample_order import prime_powers, scramble


def _rounds(num_rows: int, num_rounds: int) -> np.ndarray:
    """Rows visited, [num_rounds, num_rows]."""
    keys = np.repeat(np.concatenate([key64(5, number) for number in range(num_rounds)]), num_rows)
    turns = np.tile(np.arange(num_rows, dtype=np.int64), num_rounds)
    return scramble(turns, num_rows, keys).reshape(num_rounds, num_rows)


@given(st.integers(1, 400))
def test_every_aligned_run_of_turns_is_fair_to_the_nodes(num_rows: int) -> None:
    """For every number of nodes that divides the rows; for all of them it means that a round visits each row once."""
    rounds = _rounds(num_rows, 3)
    for nodes in range(1, num_rows + 1):
        if num_rows % nodes == 0:
            visits = np.sort(rounds.reshape(-1, nodes) % nodes, axis=1)
            assert (visits == np.arange(nodes)).all()


@pytest.mark.parametrize("num_rows", [2, 3, 7, 12, 48, 50])
def test_every_row_is_equally_likely_at_every_turn(num_rows: int) -> None:
    num_rounds = 200 * num_rows
    rounds = _rounds(num_rows, num_rounds)
    for turn in range(num_rows):
        counts = np.bincount(rounds[:, turn], minlength=num_rows)
        assert ((counts - 200) ** 2 / 200).sum() < num_rows - 1 + 4.5 * np.sqrt(2 * num_rows)  # chi-square


def test_rounds_differ() -> None:
    rounds = _rounds(48, 2000)
    assert len(np.unique(rounds, axis=0)) > 1990
    assert abs(np.corrcoef(rounds[:-1].reshape(-1), rounds[1:].reshape(-1))[0, 1]) < 0.02


def test_prime_powers() -> None:
    assert [list(prime_powers(number)) for number in (1, 2, 48, 97, 360)] == [
        [],
        [(2, 1)],
        [(2, 4), (3, 1)],
        [(97, 1)],
        [(2, 3), (3, 2), (5, 1)],
    ]
