from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmscale.config.schedule import Schedule
from llmscale.errors import ConfigError


def schedule(name: str, *, warmup: int = 10, total: int = 110, decay: int = 110, floor: float = 0.1) -> Schedule:
    return Schedule(name, 1e-3, warmup, total, decay, floor)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_is_a_straight_line_to_the_peak(name: str) -> None:
    s = schedule(name, decay=110 if name != "wsd" else 20)
    assert [s.learning_rate(step) for step in range(10)] == pytest.approx([1e-4 * (i + 1) for i in range(10)])
    assert s.learning_rate(10) == pytest.approx(1e-3)


def test_cosine() -> None:
    s = schedule("cosine")
    assert s.learning_rate(60) == pytest.approx(0.55e-3), "half-way between the peak and 10 %"
    # A quarter of the way: 0.5 (1 + cos 45 deg) = 0.853553 of the height.
    assert s.learning_rate(35) == pytest.approx(1e-3 * (0.1 + 0.9 * 0.8535533906))
    assert s.learning_rate(110) == pytest.approx(1e-4)
    assert s.learning_rate(10_000) == pytest.approx(1e-4), "the floor holds behind the end"


def test_linear() -> None:
    s = schedule("linear", floor=0.0)
    assert [s.learning_rate(step) for step in (10, 35, 60, 85, 110, 200)] == pytest.approx(
        [1e-3, 0.75e-3, 0.5e-3, 0.25e-3, 0, 0]
    )


def test_constant_never_decays() -> None:
    s = schedule("constant")
    assert {s.learning_rate(step) for step in range(10, 300)} == {1e-3}


def test_wsd_stays_at_the_peak_until_the_last_decay_steps() -> None:
    s = schedule("wsd", decay=20, floor=0.0)
    assert {s.learning_rate(step) for step in range(10, 91)} == {1e-3}
    assert s.learning_rate(100) == pytest.approx(0.5e-3)
    assert s.learning_rate(109) == pytest.approx(0.05e-3), "the last step of the run still moves"
    assert s.learning_rate(110) == 0


@given(
    st.sampled_from(["cosine", "linear", "constant", "wsd"]), st.integers(0, 50), st.integers(1, 60), st.floats(0, 1)
)
def test_never_above_the_peak_never_below_the_floor_and_never_rising_after_warm_up(
    name: str, warmup: int, decay: int, floor: float
) -> None:
    total = warmup + decay + 5
    s = schedule(name, warmup=warmup, total=total, decay=decay if name == "wsd" else total, floor=floor)
    rates = [s.learning_rate(step) for step in range(warmup, total + 10)]
    assert all(earlier >= later for earlier, later in itertools.pairwise(rates))
    assert max(rates) <= 1e-3 * (1 + 1e-12)
    assert min(rates) >= 1e-3 * floor * (1 - 1e-12)
    assert all(0 < s.learning_rate(step) <= 1e-3 for step in range(warmup))


@pytest.mark.parametrize(
    ("name", "warmup", "decay", "message"),
    [
        ("wsd", 100, 20, "warmup_steps 100 + decay_steps 20 is more than the 110 steps of the run"),
        ("cosine", 110, 110, "warmup_steps 110 must be less than the 110 steps over which the cosine schedule decays"),
        ("linear", 50, 40, "warmup_steps 50 must be less than the 40 steps over which the linear schedule decays"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(name: str, warmup: int, decay: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")):
        schedule(name, warmup=warmup, decay=decay)
