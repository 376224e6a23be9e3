"""Attempts of a launch: their record, the decision to try again, and the arguments of a restart."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from llmscale.cluster.launch.supervisor import (
    Attempt,
    RetryPolicy,
    attempt_logs,
    decide,
    next_number,
    read_attempts,
    restart_arguments,
    write_attempt,
)
from llmscale.config.run_config import parse_run_config
from llmscale.training.run_folder import ATTEMPTS_NAME

FIRST = Attempt(1, "2026-01-01T00:00:00+00:00", {"a": 2}, 2, "10.0.0.1:1234", {"b": "no route"}, "deepspeed", "logs")


def test_an_attempt_is_what_was_written_of_it_last(tmp_path: Path) -> None:
    assert read_attempts(tmp_path) == []
    done = replace(FIRST, seconds=3.5, first_step=1, last_step=9, end="failed", reason="rank 0 vanished")
    for attempt in (FIRST, done, replace(FIRST, number=2)):
        assert write_attempt(tmp_path, attempt) is None
    assert read_attempts(tmp_path) == [done, replace(FIRST, number=2)]


def test_fields_of_a_later_version_are_left_aside(tmp_path: Path) -> None:
    write_attempt(tmp_path, FIRST)
    path = tmp_path / ATTEMPTS_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_the_future": 1}) + "\n")
    assert read_attempts(tmp_path) == [FIRST]


def test_a_folder_that_cannot_be_written_is_said_and_not_raised(tmp_path: Path) -> None:
    problem = write_attempt(tmp_path / "missing", FIRST)
    assert problem is not None
    assert "No such file" in problem


def test_whatever_stands_in_the_file_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / ATTEMPTS_NAME
    write_attempt(tmp_path, FIRST)
    with path.open("ab") as file:
        file.write(
            b'\xff\xfe\x00\n[1, 2]\n"text"\nnull\n{"number": "7"}\n' + b"[" * 5000 + b"\n" + b"x" * (2 << 20) + b"\n"
        )
        for key in ("number", "began", "last_step", "end"):
            file.write(json.dumps({**asdict(replace(FIRST, number=2)), key: []}).encode() + b"\n")
        file.write(b'{"number": 2, "beg')
    write_attempt(tmp_path, replace(FIRST, number=3))
    assert [attempt.number for attempt in read_attempts(tmp_path)] == [1, 3]
    assert next_number(tmp_path) == 4
    attempt_logs(tmp_path, 12).mkdir(parents=True)
    (tmp_path / "logs" / "attempt-old").mkdir()
    assert next_number(tmp_path) == 13, "no logs are written over"
    path.unlink()
    path.mkdir()
    assert read_attempts(tmp_path) == []
    assert next_number(tmp_path) == 13


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


DATA = ["--data", "set", "--steps", "3"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        (["--resume", "auto"], ["--resume", "auto"]),
        (["--resume", "none"], ["--resume", "auto"]),
        (["--resume=runs/x/checkpoints/step-3"], ["--resume", "auto"]),
        (["--init-from", "other"], ["--resume", "auto", "--init-from", "null"]),
        (["--skip-steps", "3:4", "--skip-steps=5:6"], ["--resume", "auto", "--skip-steps", "[]"]),
        (["--init_from=other", "--seed", "4"], ["--seed", "4", "--resume", "auto", "--init-from", "null"]),
    ],
)
def test_a_restart_goes_on_and_does_not_begin_again(given: list[str], expected: list[str]) -> None:
    arguments = [*DATA, *given]
    restarted = restart_arguments(arguments, parse_run_config(arguments))
    assert restarted == [*DATA, *expected]
    config = parse_run_config(restarted)
    assert config.init_from is None
    assert config.skip_steps == []
    assert config.resume == "auto"


def test_a_run_file_that_begins_from_weights_is_overruled(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("init_from: other\nsteps: 3\n")
    arguments = ["--config", str(file)]
    restarted = restart_arguments(arguments, parse_run_config(arguments))
    assert parse_run_config(restarted).init_from is None
