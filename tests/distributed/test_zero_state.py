"""Buffers, frozen parameters, decay groups and every moment survive any change of stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import list_checkpoints, read_state
from tests.conftest import build_train_command, run_ranks, words
from tests.runs_in_turn import train_in_turn


@pytest.mark.parametrize(
    ("world_size", "loads"),
    [(3, "sample"), pytest.param(3, "all", marks=pytest.mark.slow), pytest.param(2, "all", marks=pytest.mark.slow)],
)
def test_every_tensor_survives_a_change_of_stage(tmp_path: Path, world_size: int, loads: str) -> None:
    output = run_ranks([str(Path(__file__).parent / "zero_state_job.py"), str(tmp_path), loads], world_size)
    assert output.count("ok ") == 11


def test_adam_counts_only_the_steps_of_the_run(tiny_set: Path, tmp_path: Path) -> None:
    """DeepSpeed's own first step, in 16 bit at stage 0, would change the bias correction of all steps."""
    cells = [("zero0", "bf16"), ("zero2", "bf16"), ("zero3", "fp32")]
    runs = [tmp_path / "-".join(cell) for cell in cells]
    commands = [
        build_train_command(tiny_set, run, *words(f"--ds {ds_config} --precision {precision} --steps 2 --save-every 2"))
        for run, (ds_config, precision) in zip(runs, cells, strict=True)
    ]
    train_in_turn(commands, 1)
    for run in runs:
        scalars = read_state(list_checkpoints(run)[0])["optimizer_scalars"]
        assert isinstance(scalars, dict)
        assert {values["step"] for values in scalars.values()} == {2.0}, run.name
