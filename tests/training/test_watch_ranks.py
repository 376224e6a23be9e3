"""A rank that sleeps is named, with what it sleeps in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

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
    fault: str, stage: int, phase: str, ranks: Callable, train_command: Callable, tmp_path: Path
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
    job = ranks([JOB, f"{fault}:1", *train_command(*flags)[1:]], 3)
    outputs = job.wait()
    assert job.exit_codes == [0, 0, 0], outputs
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = [record for record in records if record.get("event") == "slow_rank" and record["phase"] == phase]
    assert [record["rank"] for record in found] == [1], outputs[0]
    assert found[0]["host"] == os.uname().nodename
    assert found[0]["ratio"] > 1.25
    assert f"rank 1 on host {os.uname().nodename} is slow" in outputs[0]
