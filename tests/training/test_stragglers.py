from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.training.log_steps import READINGS, StragglerDetector
from tests.conftest import read_events, run_ranks


def test_a_rank_is_named_once_when_most_readings_say_so() -> None:
    slow = StragglerDetector()
    readings = [slow.observe("arithmetic", [0.10, 0.15, 0.10]) for _ in range(READINGS)]
    assert readings == [{}] * (READINGS - 1) + [{1: pytest.approx(1.5)}]
    assert slow.observe("arithmetic", [0.10, 0.15, 0.10]) == {}
    for _ in range(READINGS):
        assert slow.observe("arithmetic", [0.10, 0.10, 0.10]) == {}
    later = [slow.observe("arithmetic", [0.10, 0.10, 0.15]) for _ in range(READINGS)]
    assert [list(stragglers) for stragglers in later if stragglers] == [[2]], "another one, later"


def test_waiting_for_data_counts_by_the_step() -> None:
    """Twice as long, and yet nothing beside a step of a second; half of a step is much."""
    slow = StragglerDetector()
    assert not any(slow.observe("data wait", [0.001, 0.002], 1.0) for _ in range(READINGS))
    readings = [slow.observe("data wait", [0.0, 0.5], 1.0) for _ in range(2 * READINGS)]
    assert [list(stragglers) for stragglers in readings if stragglers] == [[1]]


def test_of_two_ranks_one_can_be_slow_and_of_one_none() -> None:
    two, one = StragglerDetector(), StragglerDetector()
    readings = [two.observe("arithmetic", [0.2, 0.1]) for _ in range(READINGS)]
    assert [list(stragglers) for stragglers in readings if stragglers] == [[0]]
    assert not any(one.observe("arithmetic", [0.2]) for _ in range(READINGS))


JOB = str(Path(__file__).with_name("fault_job.py"))


@pytest.mark.parametrize(
    ("fault", "stage", "phase"),
    [
        pytest.param("slow-forward", 0, "arithmetic", marks=pytest.mark.slow),
        ("slow-data", 2, "data wait"),
        pytest.param("slow-head", 3, "arithmetic", marks=pytest.mark.slow),
    ],
)
def test_a_slow_rank_is_named_with_its_host_and_phase(
    fault: str, stage: int, phase: str, train_command: Callable, tmp_path: Path
) -> None:
    flags = (
        "--ds",
        f"ds_configs/zero{stage}.json",
        "--steps",
        "24",
        "--log-every",
        "2",
        "--precision",
        "fp32",
        "--global-batch-size",
        "6",
    )
    output = run_ranks([JOB, f"{fault}:1", *train_command(*flags)[1:]], 3)
    slow_ranks = [event for event in read_events(tmp_path / "run", "slow_rank") if event["phase"] == phase]
    assert [record["rank"] for record in slow_ranks] == [1], output
    assert slow_ranks[0]["host"] == os.uname().nodename
    assert slow_ranks[0]["ratio"] > 1.25
    assert f"rank 1 on host {os.uname().nodename} " in output
