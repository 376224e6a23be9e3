"""--profile on real ranks: a trace, and a table whose parts add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmscale.engine.train_step import PhaseTimer
from llmscale.errors import LlmscaleError
from llmscale.training import profiler
from llmscale.training.live_run import StepResult
from llmscale.training.profiler import PARTS, ProfileSteps, TraceShares, table_lines
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


@pytest.fixture
def profiling(tmp_path: Path) -> Callable[..., tuple[ProfileSteps, list[str]]]:
    """`profiling(steps)`: the profile of a run of nine steps, and the lines that it reports."""

    def build(steps: str, *, is_rollback: bool = False) -> tuple[ProfileSteps, list[str]]:
        reported: list[str] = []
        device = torch.device("cpu")
        run: Any = SimpleNamespace(
            world=SimpleNamespace(is_main=True, device=device),
            config=SimpleNamespace(run=tmp_path),
            resolved=SimpleNamespace(total_steps=9),
        )
        engine: Any = SimpleNamespace(meter=StepMeter(PhaseTimer(device)))
        io: Any = SimpleNamespace(report=reported.append)
        return ProfileSteps(run, engine, io, steps, is_rollback=is_rollback), reported

    return build


def finish_step(action: ProfileSteps, step: int) -> None:
    if action.due(step):
        action.run(StepResult(step, [], torch.zeros(()), was_skipped=False))


def test_a_trace_that_cannot_be_read_back_ends_no_training(
    profiling: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would end rank 0 alone."""

    def fail(path: Path) -> None:
        raise LlmscaleError(f"{path} is not JSON")

    monkeypatch.setattr(profiler, "read_shares", fail)
    action, reported = profiling("1:3")
    action.begin(0)
    for step in (1, 2):
        finish_step(action, step)
    assert len(reported) == 1 and "is not JSON" in reported[0], reported
    assert list((tmp_path / "profile").iterdir()) == []


def test_a_profile_that_begins_again_continues_and_one_that_is_cut_short_is_reported(profiling: Callable) -> None:
    """Actions begin again in a run folder that had to be created again."""
    action, reported = profiling("2:5")
    action.begin(0)
    finish_step(action, 1)
    for step in (1, 2):
        action.begin(step)
    assert reported == []
    action.close()
    assert len(reported) == 1 and reported[0].startswith("WARNING: --profile 2:5"), reported


def test_a_rollback_to_after_the_profiled_steps_reports_nothing(profiling: Callable) -> None:
    action, reported = profiling("2:5", is_rollback=True)
    action.begin(6)
    assert reported == []


SHARES = TraceShares(2.0, {**dict.fromkeys(PARTS, 0.0), "matrix products": 1.5, "norms": 0.1, "idle": 0.4})


def test_every_part_has_a_line_and_unknown_predictions_a_dash() -> None:
    lines = list(table_lines(SHARES, 4, {}))
    assert [line.split("  ")[0] for line in lines[1:-1]] == list(PARTS)
    assert lines[1].split()[2:] == ["75.0%", "375.00", "-"]
    assert lines[-1].split() == ["a", "step", "100.0%", "500.00", "-"]


def test_predictions_stand_beside_their_part() -> None:
    lines = list(table_lines(SHARES, 4, {"matrix products": 0.3, "norms and other operations": 0.05}))
    by_name = {line[:18].strip(): line.split()[-1] for line in lines[1:-1]}
    assert by_name["matrix products"] == "300.00"
    assert (by_name["norms"], by_name["other operations"]) == ("-", "50.00")
    assert by_name["a step"] == "350.00"
