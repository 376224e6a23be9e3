"""--profile on real ranks: a trace, and a table whose parts add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_a_profile_at_every_stage(
    stage: int, world_size: int, ranks: Callable, train_command: Callable, tmp_path: Path
) -> None:
    flags = ("--ds", f"ds_configs/zero{stage}.json", "--precision", "fp32", "--steps", "8", "--profile", "4:7")
    job = ranks(train_command(*flags), world_size)
    outputs = job.wait()
    assert job.exit_codes == [0] * world_size, outputs
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (event,) = [record for record in records if record.get("event") == "profile"]
    assert (event["step"], event["num_steps"], event["predicted_s"]) == (6, 3, {}), "no prediction for a CPU"
    assert sum(event["seconds"].values()) == pytest.approx(event["wall_s"])
    seconds = event["seconds"]
    assert min(seconds[part] for part in ("matrix products", "attention", "norms", "loss", "optimizer", "idle")) > 0
    assert [path.name for path in (tmp_path / "run/profile").iterdir()] == ["steps-4-to-6.trace.json"]
    assert "traceEvents" in json.loads(Path(event["trace"]).read_text())
    table = outputs[0].partition("profile of steps 4 to 6")[2].splitlines()
    assert next(line for line in table if line.startswith("  a step")).split()[2] == "100.0%"


def test_steps_that_are_done_or_never_come_are_said(ranks: Callable, train_command: Callable, tmp_path: Path) -> None:
    job = ranks(train_command("--precision", "fp32", "--steps", "3", "--profile", "5:8"), 1)
    output = job.wait()[0]
    assert job.exit_codes == [0], output
    assert "WARNING: --profile 5:8: this start goes from step 1 to 3, so nothing is profiled" in output
    assert not (tmp_path / "run/profile").exists()
