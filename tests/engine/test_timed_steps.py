"""Steps that are timed before a run leave no trace: its losses are those of a run that was given the number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.checkpoint.run_state import load_run_state
from tests.conftest import build_train_command, read_losses


def planned_steps(run: Path) -> int:
    return json.loads((run / "config.json").read_text())["resolved"]["total_steps"]


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, "--ds ds_configs/zero2.json --dropout 0.1 --schedule wsd"),
        pytest.param(2, "--ds ds_configs/zero3.json --num-experts 2 --router-bias", marks=pytest.mark.slow),
        pytest.param(1, "--ds ds_configs/zero0.json --optimizer muon", marks=pytest.mark.slow),
    ],
)
def test_minutes_train_what_their_steps_train_and_resume_with_the_same_schedule(
    ranks: Callable, train_command: Callable, tiny_set: Path, tmp_path: Path, world_size: int, flags: str
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    # The budget is over before a slow machine has started: then it is one step.
    timed = train_command("--minutes", "0.1", "--save-every", "2", *flags.split())
    assert "timed and undone" in ranks(timed, world_size).wait()[0]
    steps, losses = planned_steps(run), read_losses(run)
    assert [*losses] == [*range(1, steps + 1)]
    ranks(build_train_command(tiny_set, other, "--steps", str(steps), *flags.split()), world_size).wait()
    assert read_losses(other) == losses
    newest = list_checkpoints(run)[0]
    assert load_run_state(newest).hyperparameters["steps"] == steps
    if len(list_checkpoints(run)) > 1:
        shutil.rmtree(newest)
        output = ranks(timed, world_size).wait()[0]
        assert "timed and undone" not in output and f"/{steps} |" in output
        assert read_losses(run) == losses
