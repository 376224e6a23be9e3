"""Master weights, gradients and moments in bf16: trained, checkpointed, and resumed with and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.checkpoint.tensor_files import load_index
from tests.conftest import read_losses, run_ranks

FLAGS = ("--save-every", "2", "--global-batch-size", "8", "--micro-batch-size", "2", "--schedule", "constant")
FROM_FP32 = "master weights and optimizer states change from fp32 to bf16: they are rounded once"
TO_FP32 = "master weights and optimizer states change from bf16 to fp32: they are taken over exactly"


@pytest.fixture
def train(train_command: Callable[..., list[str]], tmp_path: Path) -> Callable[..., str]:
    """`train(stage, world_size, steps, in_bf16=True)`: run or continue tmp_path/run; rank 0's output on one line."""

    def run(stage: int, world_size: int, steps: int, *, in_bf16: bool = True, run: str = "run") -> str:
        ds, states = tmp_path / "ds.json", ("bf16_master_weights_and_grads", "bf16_optimizer_states")
        bf16 = {"enabled": True, **dict.fromkeys(states, in_bf16)}
        ds.write_text(json.dumps({"zero_optimization": {"stage": stage}, "bf16": bf16}))
        flags = (*FLAGS, "--ds", str(ds), "--steps", str(steps), "--run", str(tmp_path / run))
        output = run_ranks(train_command(*flags), world_size)
        return " ".join(output.split())

    return run


def types_of_newest(run: Path) -> set[str]:
    return {entry["dtype"] for entry in load_index(list_checkpoints(run)[0]).values()}


def test_a_run_continues_at_any_stage_and_number_of_ranks_and_in_fp32_and_back(
    train: Callable[..., str], tmp_path: Path
) -> None:
    for stage, world_size, steps in ((1, 2, 2), (3, 1, 4), (2, 2, 6)):
        assert "optimizer states change" not in train(stage, world_size, steps)
        assert types_of_newest(tmp_path / "run") == {"bfloat16"}
    train(2, 1, 6, run="straight")
    losses, straight = read_losses(tmp_path / "run"), read_losses(tmp_path / "straight")
    assert losses.keys() == straight.keys()
    assert max(abs(losses[step] - straight[step]) for step in losses) < 0.01
    assert "master weights and moments are bf16" in (tmp_path / "run" / "start.txt").read_text()
    assert TO_FP32 in train(1, 1, 8, in_bf16=False)
    assert types_of_newest(tmp_path / "run") == {"float32"}
    assert FROM_FP32 in train(3, 2, 10)
    assert types_of_newest(tmp_path / "run") == {"bfloat16"}
