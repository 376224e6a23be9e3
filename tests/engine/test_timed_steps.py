"""Steps that are timed before a run leave no trace: its losses are those of a run that was given the number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.checkpoint.run_state import load_run_state
from tests.conftest import build_train_command, read_losses, run_ranks

#: train.py with little time for timing, and steps that seem to take a sixth of --minutes 10.
JOB = """
import sys
from llmscale.train import main
from llmscale.training import open_session
time_steps, open_session._MOST_TIMED_S = open_session._time_steps, 0.1
open_session._time_steps = lambda *values: (100.0, time_steps(*values)[1])
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, "--ds ds_configs/zero2.json --dropout 0.1 --schedule wsd"),
        pytest.param(2, "--ds ds_configs/zero3.json --num-experts 2 --router-bias", marks=pytest.mark.slow),
        pytest.param(1, "--ds ds_configs/zero0.json --optimizer muon", marks=pytest.mark.slow),
    ],
)
def test_minutes_train_what_their_steps_train_and_resume_with_the_same_schedule(
    train_command: Callable, tiny_set: Path, tmp_path: Path, world_size: int, flags: str
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    timed = ["-c", JOB, *train_command("--minutes", "10", "--save-every", "2", "--keep-last", "9", *flags.split())[1:]]
    assert "timed and undone" in run_ranks(timed, world_size)
    losses = read_losses(run)
    steps = len(losses)
    assert steps > 2 and json.loads((run / "config.json").read_text())["resolved"]["total_steps"] == steps
    run_ranks(build_train_command(tiny_set, other, "--steps", str(steps), *flags.split()), world_size)
    assert read_losses(other) == losses
    newest = list_checkpoints(run)[0]
    assert load_run_state(newest).hyperparameters["steps"] == steps
    shutil.rmtree(newest)
    output = run_ranks(timed, world_size)
    assert "timed and undone" not in output and f"/{steps} |" in output
    assert read_losses(run) == losses
