from __future__ import annotations

import pytest

from llmscale.cluster.launch.attempt_log import Attempt
from llmscale.cluster.launch.retry import RetryPolicy, decide


def attempts(*last_steps: int | None, end: str = "failed") -> list[Attempt]:
    return [
        Attempt(
            number=number,
            began="",
            hosts={"a": 1},
            world_size=1,
            master="",
            left_out={},
            starter="deepspeed",
            logs="",
            last_step=step,
            end=end,
            reason="rank 0 said no",
        )
        for number, step in enumerate(last_steps, start=1)
    ]


def test_an_attempt_that_got_on_is_followed_at_once_by_the_next() -> None:
    assert decide(attempts(10), RetryPolicy()).wait_s == 1.0
    assert decide(attempts(10, 15, 20), RetryPolicy()).wait_s == 1.0


def test_fruitless_attempts_wait_longer_and_longer_up_to_a_bound() -> None:
    policy = RetryPolicy(same_step_limit=99)
    waits = [decide(attempts(10, *[9 - n for n in range(count)]), policy).wait_s for count in range(8)]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


@pytest.mark.parametrize(("step", "words"), [(7, "after step 7"), (None, "before its first step")])
def test_the_same_step_again_and_again_is_the_runs_own_fault(step: int | None, words: str) -> None:
    policy = RetryPolicy(same_step_limit=3)
    assert decide(attempts(4, step, step), policy).give_up is None
    given_up = decide(attempts(4, step, step, step), policy).give_up
    assert given_up is not None
    assert f"3 attempts in a row ended {words} (failed: rank 0 said no)" in given_up


def test_another_kind_of_end_at_the_same_step_is_another_fault() -> None:
    mixed = attempts(7, 7) + attempts(7, end="host lost")
    assert decide(mixed, RetryPolicy(same_step_limit=3)).give_up is None


def test_restarts_are_bounded() -> None:
    policy = RetryPolicy(max_restarts=2)
    assert decide(attempts(1, 2), policy).give_up is None
    assert "2 restarts were not enough" in str(decide(attempts(1, 2, 3), policy).give_up)
    assert decide(attempts(1), RetryPolicy(max_restarts=0)).give_up is not None
