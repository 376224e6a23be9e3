"""--profile on real ranks: a trace, and a table whose parts add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmscale.errors import LlmscaleError
from llmscale.training.actions import profile_steps
from llmscale.training.actions.profile_steps import ProfileSteps
from llmscale.training.spikes import SpikeRequests
from llmscale.training.throughput import StepMeter


@pytest.mark.parametrize(
    ("stage", "world_size"), [*(pytest.param(*of, marks=pytest.mark.slow) for of in ((0, 1), (1, 2))), (2, 1), (3, 2)]
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
def live(tmp_path: Path) -> Any:
    """What a profile needs of a run of nine steps; what it says is in `said`."""
    said: list[str] = []
    device = torch.device("cpu")
    return SimpleNamespace(
        world=SimpleNamespace(is_main=True, device=device),
        run=SimpleNamespace(config=SimpleNamespace(run=tmp_path), resolved=SimpleNamespace(total_steps=9)),
        meter=StepMeter(device),
        spikes=SpikeRequests(),
        report=said.append,
        said=said,
    )


def finish_step(profiling: ProfileSteps, step: int) -> None:
    done: Any = SimpleNamespace(step=step)
    if profiling.due(step):
        profiling.act(done)


def test_a_trace_that_cannot_be_read_back_ends_no_training(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the main rank alone."""

    def fail(path: Path) -> None:
        raise LlmscaleError(f"{path} is no JSON")

    monkeypatch.setattr(profile_steps, "read_shares", fail)
    profiling = ProfileSteps(live, "1:3")
    profiling.begin(0)
    for step in (1, 2):
        finish_step(profiling, step)
    assert len(live.said) == 1 and "is no JSON" in live.said[0], live.said
    assert list((live.run.config.run / "profile").iterdir()) == []


def test_a_profile_that_is_begun_again_goes_on_and_one_that_is_cut_short_says_so(live: Any) -> None:
    """Actions begin again where the run folder had to be made again."""
    profiling = ProfileSteps(live, "2:5")
    profiling.begin(0)
    finish_step(profiling, 1)
    for step in (1, 2):
        profiling.begin(step)
    assert live.said == []
    profiling.close()
    assert len(live.said) == 1 and live.said[0].startswith("WARNING: --profile 2:5"), live.said


def test_going_back_to_behind_the_profiled_steps_says_nothing(live: Any) -> None:
    live.spikes.times_gone_back = 1
    ProfileSteps(live, "2:5").begin(6)
    assert live.said == []
