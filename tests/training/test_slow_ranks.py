from __future__ import annotations

from llmscale.training.slow_ranks import READINGS, SlowRanks


def test_a_rank_is_named_once_when_most_readings_say_so() -> None:
    slow = SlowRanks(3)
    for number in range(READINGS):
        found = slow.add("arithmetic", [0.10, 0.15, 0.10])
        assert (found == []) == (number < READINGS - 1)
    (one,) = found
    assert (one.rank, one.phase) == (1, "arithmetic")
    assert abs(one.ratio - 1.5) < 1e-9
    assert slow.add("arithmetic", [0.10, 0.15, 0.10]) == []
    for _ in range(READINGS):
        assert slow.add("arithmetic", [0.10, 0.10, 0.10]) == []
    later = [slow.add("arithmetic", [0.10, 0.10, 0.15]) for _ in range(READINGS)]
    assert [entry.rank for found in later for entry in found] == [2], "another one, later"


def test_a_hiccup_is_nothing() -> None:
    slow = SlowRanks(2)
    times = [[0.1, 5.0] if number % 3 == 0 else [0.1, 0.1] for number in range(5 * READINGS)]
    assert not [found for reading in times for found in slow.add("arithmetic", reading)]


def test_waiting_for_data_counts_by_the_step() -> None:
    """Twice as long, and yet nothing beside a step of a second; half of a step is much."""
    slow = SlowRanks(2)
    assert not [found for _ in range(READINGS) for found in slow.add("data wait", [0.001, 0.002], 1.0)]
    found = [found for _ in range(2 * READINGS) for found in slow.add("data wait", [0.0, 0.5], 1.0)]
    assert [(one.rank, one.phase) for one in found] == [(1, "data wait")]


def test_of_two_ranks_one_can_be_slow_and_of_one_none() -> None:
    two, one = SlowRanks(2), SlowRanks(1)
    found = [found for _ in range(READINGS) for found in two.add("arithmetic", [0.2, 0.1])]
    assert [entry.rank for entry in found] == [0]
    assert not [found for _ in range(READINGS) for found in one.add("arithmetic", [0.2])]


def test_what_was_not_timed_is_nothing() -> None:
    slow = SlowRanks(2)
    assert not [found for _ in range(READINGS) for found in slow.add("arithmetic", [0.0, 0.0])]
    assert not [found for _ in range(READINGS) for found in slow.add("data wait", [0.0, 1.0], 0.0)]
