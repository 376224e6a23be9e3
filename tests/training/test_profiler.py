"""--profile on real ranks: a trace, and a table of its operations beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmscale.engine.train_step import PhaseTimer
from llmscale.training.live_run import StepResult
from llmscale.training.reports import ProfileSteps
from llmscale.training.step_metrics import StepMeter


@pytest.mark.parametrize(
    ("stage", "world_size"), [*(pytest.param(*of, marks=pytest.mark.slow) for of in ((0, 1), (1, 2), (2, 1))), (3, 2)]
)
def test_a_profile_at_every_stage(
    stage: int, world_size: int, ranks: Callable, train_command: Callable, tmp_path: Path
) -> None:
    flags = ("--ds", f"ds_configs/zero{stage}.json", "--precision", "fp32", "--steps", "8", "--profile", "4:7")
    job = ranks(train_command(*flags), world_size)
    outputs = job.wait()
    assert job.exit_codes == [0] * world_size, outputs
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (event,) = [record for record in records if record.get("event") == "profile"]
    assert (event["step"], event["num_steps"]) == (6, 3)
    assert {path.name for path in (tmp_path / "run/profile").iterdir()} == {
        "steps-4-to-6.trace.json",
        "steps-4-to-6.table.txt",
    }
    assert "traceEvents" in json.loads(Path(event["trace"]).read_text())
    table = Path(event["table"]).read_text()
    assert "Self CPU %" in table and "aten::mm" in table and "phase: forward_backward" in table
    assert f"profile of steps 4 to 6 on rank 0, which the profiler itself slows down: {event['trace']}" in outputs[0]


def test_steps_that_are_done_or_never_come_are_said(ranks: Callable, train_command: Callable, tmp_path: Path) -> None:
    job = ranks(train_command("--precision", "fp32", "--steps", "3", "--profile", "5:8"), 1)
    output = job.wait()[0]
    assert job.exit_codes == [0], output
    assert "WARNING: --profile 5:8: this start goes from step 1 to 3, so nothing is profiled" in output
    assert not (tmp_path / "run/profile").exists()


@pytest.fixture
def profiling(tmp_path: Path) -> Callable[..., tuple[ProfileSteps, list[str]]]:
    """`profiling(steps)`: the profile of a run of nine steps, and the lines that it reports."""

    def build(steps: str) -> tuple[ProfileSteps, list[str]]:
        reported: list[str] = []
        device = torch.device("cpu")
        run: Any = SimpleNamespace(
            world=SimpleNamespace(is_main=True, device=device),
            config=SimpleNamespace(run=tmp_path, profile=steps),
            resolved=SimpleNamespace(total_steps=9),
        )
        engine: Any = SimpleNamespace(meter=StepMeter(PhaseTimer(device)))
        io: Any = SimpleNamespace(report=reported.append)
        return ProfileSteps(run, engine, io), reported

    return build


def finish_step(action: ProfileSteps, step: int) -> None:
    if action.due(step):
        action.run(StepResult(step, [], torch.zeros(()), was_skipped=False))


def test_a_folder_that_cannot_be_written_ends_no_training(profiling: Callable, tmp_path: Path) -> None:
    """It would end rank 0 alone."""
    action, reported = profiling("1:3")
    action.begin(0)
    (tmp_path / "profile").write_text("")
    for step in (1, 2):
        finish_step(action, step)
    assert len(reported) == 1 and "nothing is written: " in reported[0], reported


def test_a_profile_that_is_cut_short_is_reported(profiling: Callable) -> None:
    action, reported = profiling("2:5")
    action.begin(0)
    finish_step(action, 1)
    assert reported == []
    action.close()
    assert len(reported) == 1 and reported[0].startswith("WARNING: --profile 2:5"), reported
