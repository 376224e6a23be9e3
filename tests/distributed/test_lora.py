"""`--lora-rank`: adapters train alike at every stage, beside weights that their checkpoints name and do not hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from llmscale.architecture.layers import is_adapter
from llmscale.checkpoint.inventory import find_checkpoint
from llmscale.checkpoint.manifest import load_manifest
from llmscale.evaluate.model_source import open_model
from tests.checkpoint.written import load_full_weights
from tests.conftest import build_train_command, forget_after, read_losses, run_ranks, words

FLAGS = words("--precision fp32 --steps 6 --save-every 2 --keep-last 9 --lr 1e-2")
LORA = ("--lora-rank", "2")


def train(data: Path, run: Path, stage: str, world_size: int, *flags: str, expect: int = 0) -> str:
    return run_ranks(build_train_command(data, run, "--ds", stage, *FLAGS, *flags), world_size, expect=expect)


def assert_same_adapters(run: Path, other: Path) -> None:
    own, others = (load_full_weights(find_checkpoint(folder)) for folder in (run, other))
    assert own.keys() == others.keys()
    assert all(map(is_adapter, own)), "adapters alone"
    assert all(weight.any() for weight in own.values()), "none is empty"
    for name, weight in own.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-5, atol=5e-6)  # updates are of 1e-2


@pytest.mark.slow
def test_adapters_continue_at_every_stage_and_number_of_ranks(tiny_set: Path, tmp_path: Path) -> None:
    base, straight, moved = tmp_path / "base", tmp_path / "straight", tmp_path / "moved"
    train(tiny_set, base, "zero1", 1)
    begin = (*LORA, "--init-from", str(base))
    train(tiny_set, straight, "zero2", 1, *begin)
    assert read_losses(straight)[1] < read_losses(base)[2], "it begins with the base"
    shutil.copytree(straight, moved)
    for step, stage, world_size in ((4, "zero3", 2), (2, "zero0", 1), (2, "zero3_offload", 3)):
        forget_after(moved, step)
        # The same command again continues.
        train(tiny_set, moved, stage, world_size, *begin)
        assert read_losses(moved) == pytest.approx(read_losses(straight), rel=1e-5), stage
        assert_same_adapters(moved, straight)
    sizes = [load_manifest(find_checkpoint(run)).num_bytes for run in (base, straight)]
    assert sizes[1] < sizes[0] / 3


@pytest.mark.slow
def test_the_base_is_named_checked_and_may_move(tiny_set: Path, tmp_path: Path) -> None:
    base, run, place = tmp_path / "base", tmp_path / "run", tmp_path / "place"
    train(tiny_set, base, "zero1", 1, "--steps", "2")
    assert "--init-from" in train(tiny_set, run, "zero1", 1, *LORA, expect=2)
    train(tiny_set, run, "zero3", 2, *LORA, "--init-from", str(base), "--steps", "2", "--precision", "bf16")
    checkpoint = find_checkpoint(run)
    assert open_model(checkpoint).load_model().shape.lora_rank == 2
    named = json.loads((checkpoint / "state.json").read_text())["base"]
    assert named["place"] == str(find_checkpoint(base).resolve())
    base.rename(place)
    assert named["place"] in train(tiny_set, run, "zero1", 1, *LORA, expect=2)
    train(tiny_set, base, "zero1", 1, "--steps", "2", "--seed", "2")
    output = train(tiny_set, run, "zero1", 1, *LORA, expect=2)
    assert named["checksum"] in output and "--init-from" in output
    train(tiny_set, run, "zero1", 1, *LORA, "--init-from", str(place), "--steps", "4")
    # Adapters alone begin no other run.
    assert "export" in train(tiny_set, tmp_path / "new", "zero1", 1, "--init-from", str(run), expect=2)
