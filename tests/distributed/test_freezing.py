"""`--freeze` and `--param-group`: frozen weights keep every bit, and the others train alike at every stage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from llmscale.checkpoint.inventory import find_checkpoint, list_checkpoints
from tests.checkpoint.written import load_full_weights
from tests.conftest import build_train_command, forget_after, read_losses, refusal_of, run_ranks, words

FLAGS = words("--precision fp32 --steps 8 --save-every 2 --keep-last 9 --lr 1e-2")
#: Nothing before the second block needs gradients.
FROZEN = words("--freeze w[tp]e*,blocks.0.* --param-group *.bias:lr=0.5x,*.mlp.*:decay=0")


def train(data: Path, run: Path, stage: str, world_size: int, *flags: str) -> None:
    run_ranks(build_train_command(data, run, "--ds", stage, *FLAGS, *flags), world_size)


def frozen_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    weights = load_full_weights(checkpoint)
    return {name: weight for name, weight in weights.items() if name.startswith(("wte", "wpe", "blocks.0."))}


def test_frozen_weights_keep_every_bit_from_stage_to_stage(tiny_set: Path, tmp_path: Path) -> None:
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    train(tiny_set, straight, "zero0", 1, *FROZEN)
    shutil.copytree(straight, moved)
    for step, stage, mode in ((2, "zero3", "none"), (4, "zero2", "full"), (6, "zero1", "none")):
        forget_after(moved, step)
        train(tiny_set, moved, stage, 2, *FROZEN, "--activation-checkpointing", mode)
        assert read_losses(moved) == pytest.approx(read_losses(straight), rel=1e-5), stage
    begun, ended = frozen_weights(list_checkpoints(straight)[-1]), frozen_weights(find_checkpoint(moved))
    assert begun and all(torch.equal(begun[name], ended[name]) for name in begun)
    reason = refusal_of(build_train_command(tiny_set, moved, *FLAGS, "--freeze", "w[tp]e*", "--steps", "9"))
    assert "blocks.0.attn.proj.bias and others thawed" in reason and "--init-from" in reason
    # A new run may train what was frozen, and freeze what was trained.
    flags = ("--freeze", "blocks.1.*", "--init-from", str(moved), "--precision", "bf16")
    train(tiny_set, tmp_path / "new", "zero3", 2, *flags)
    assert read_losses(tmp_path / "new")[1] < read_losses(straight)[1]
