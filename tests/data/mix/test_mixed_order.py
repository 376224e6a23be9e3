from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from llmscale.data.mixture import MixedOrder, MixRecipe, MixStage, PlacedStage, place_stages
from llmscale.data.order.sample_order import SampleOrder

SIZES = (50, 700, 23)
STAGES = (PlacedStage(0, (5, 3, 2)), PlacedStage(400, (1, 1, 7)))


@pytest.fixture
def order() -> MixedOrder:
    return MixedOrder([SampleOrder([size], seed=3) for size in SIZES], STAGES)


def test_each_set_is_read_in_its_own_order_through_all_stages(order: MixedOrder) -> None:
    """Every sample of a set once per epoch of the set."""
    ids = order.sample_ids(np.arange(2000))
    owners = order.set_of(ids)
    assert owners.min() == 0
    for number, (own, first) in enumerate(zip(order.orders, order.first_ids, strict=True)):
        mine = ids[owners == number] - first
        assert mine.tolist() == own.sample_ids(np.arange(len(mine))).tolist()


def test_positions_may_be_asked_for_in_any_order_and_number(order: MixedOrder) -> None:
    everything = order.sample_ids(np.arange(1000))
    mixed_up = np.random.default_rng(0).permutation(1000)
    assert order.sample_ids(mixed_up).tolist() == everything[mixed_up].tolist()
    assert [int(order.sample_ids(np.array([position]))[0]) for position in (0, 399, 400, 999)] == [
        everything[position] for position in (0, 399, 400, 999)
    ]
    assert order.sample_ids(np.empty(0, np.int64)).tolist() == []


def test_proportions_change_where_a_stage_begins(order: MixedOrder) -> None:
    owners = order.set_of(order.sample_ids(np.arange(400 + 900)))
    assert np.bincount(owners[:400]).tolist() == [200, 120, 80]
    assert np.bincount(owners[400:]).tolist() == [100, 100, 700]
    assert order.drawn_before(1300).tolist() == [300, 220, 780]
    assert order.drawn_before(0).tolist() == [0, 0, 0]


def recipe(*stages: tuple[str, tuple[int, ...]]) -> MixRecipe:
    listed = tuple(MixStage(Fraction(until), shares) for until, shares in stages)
    return MixRecipe(Path("mix.yaml"), ("a", "b"), ("a", "b"), listed)


ANNEALED = recipe(("0.9", (7, 3)), ("1", (1, 9)))


def test_stages_are_cut_between_steps() -> None:
    assert place_stages(ANNEALED, 8 * 101, 8) == (PlacedStage(0, (7, 3)), PlacedStage(8 * 91, (1, 9)))


def test_a_run_that_goes_on_has_the_same_stages() -> None:
    first = place_stages(ANNEALED, 8000, 8)
    for seen in (8, 4000, 7200, 7208, 8000):
        assert place_stages(ANNEALED, 8000, 8, saved=first, seen=seen) == first


def test_what_was_seen_stays_and_what_is_to_come_is_as_the_file_says_now() -> None:
    first = place_stages(ANNEALED, 8000, 8)
    assert place_stages(ANNEALED, 16000, 8, saved=first, seen=4000)[1].begin == 14400, "a longer run"
    back = place_stages(ANNEALED, 16000, 8, saved=first, seen=7600)
    assert [stage.begin for stage in back] == [0, 7200, 7600, 14400], "the second stage had begun, and ends here"
    assert [stage.shares for stage in back] == [(7, 3), (1, 9), (7, 3), (1, 9)]
    other = place_stages(recipe(("1", (1, 1))), 8000, 8, saved=first, seen=4000)
    assert other == (PlacedStage(0, (7, 3)), PlacedStage(4000, (1, 1)))
    sooner = place_stages(recipe(("0.25", (7, 3)), ("1", (1, 9))), 8000, 8, saved=first, seen=4000)
    assert sooner == (PlacedStage(0, (7, 3)), PlacedStage(4000, (1, 9)))


def test_a_run_that_becomes_a_mix_is_one_from_its_beginning() -> None:
    assert [stage.begin for stage in place_stages(ANNEALED, 8000, 8, seen=800)] == [0, 7200]


def test_neighbours_of_equal_shares_are_one_stage_wherever_the_run_is_resumed() -> None:
    same = recipe(("0.5", (7, 3)), ("1", (7, 3)))
    first = place_stages(same, 816, 8)
    assert first == (PlacedStage(0, (7, 3)),)
    assert place_stages(same, 816, 8, saved=first, seen=408) == first


def test_a_stage_that_rounds_to_nothing_is_left_out() -> None:
    assert place_stages(recipe(("0.01", (1, 0)), ("1", (0, 1))), 80, 8) == (PlacedStage(0, (0, 1)),)


def test_stages_lie_behind_what_is_left_out() -> None:
    stages = place_stages(ANNEALED, 8000, 8, skipped=((800, 880), (7240, 7280)))
    assert [stage.begin for stage in stages] == [0, 7200 + 80 + 40]
