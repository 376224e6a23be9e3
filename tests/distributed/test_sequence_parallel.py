"""Ranks that divide sequences compute the losses and gradients of one rank, in double precision without DeepSpeed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.conftest import build_train_command, read_losses, words
from tests.distributed.test_loss import ERRORS, cell, check
from tests.runs_in_turn import train_in_turn

ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def split_cell(stage: int, shape: str, **settings: object) -> dict[str, object]:
    return cell(stage, shape, **{"split": 2, "z_loss": 0.1, **settings})


def test_losses_and_gradients_are_those_of_complete_sequences() -> None:
    cells = [
        split_cell(0, "llama-4-heads", tile=5),
        split_cell(1, "gpt2-documents-4-heads", accumulation=2),
        split_cell(2, "llama", checkpointing="full", zero=dict(list(ON_HOST.items())[:1])),
        split_cell(3, "gpt2", checkpointing="selective", zero=ON_HOST),
        split_cell(3, "gpt2-4-heads", checkpointing="full", tile=5, accumulation=2),
        split_cell(3, "llama-of-7"),
        split_cell(2, "gpt2", precision="bf16"),
        split_cell(3, "llama-4-heads", precision="fp16"),
    ]
    check(cells)


@pytest.mark.slow
@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_whole_grid(stage: int, split: int) -> None:
    shapes = ("gpt2-4-heads", "gpt2-documents-4-heads", "llama-4-heads", "llama-of-7", "llama-of-5")
    grid = itertools.product(shapes, ERRORS, ("none", "selective", "full"), (1, 2), (0, 5))
    cells = [
        split_cell(stage, shape, split=split, precision=precision, checkpointing=mode, accumulation=number, tile=tile)
        for shape, precision, mode, number, tile in grid
        if (not tile or mode == "full") and (stage or precision != "fp16")
    ]
    if stage == 3 and split == 2:
        # DeepSpeed makes a process's groups for hpZ once.
        cells.append(split_cell(3, "llama-4-heads", split=2, zero={"zero_hpz_partition_size": 2}))
    check(cells, 4, timeout_s=840)


ROTARY = "--positions rotary --norm rmsnorm --precision fp32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ds", "flags", "tolerance"),
    [
        ("zero2", "--optimizer muon --precision fp32", 1e-5),
        ("zero3_offload", f"{ROTARY} --document-mask", 1e-5),
        ("hpz", f"{ROTARY} --sliding-window 9", 1e-5),
        ("zero1", "--precision bf16", 0.01),
    ],
    ids=["muon", "offload", "hpz", "bf16"],
)
def test_runs_have_the_losses_of_complete_sequences(
    ds: str, flags: str, tolerance: float, tiny_set: Path, tmp_path: Path
) -> None:
    fixed = words(f"--steps 12 --lr 3e-3 --n-head 4 --n-kv-head 2 --save-every 0 {flags}")
    (tmp_path / "hpz.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}))
    config = str(tmp_path / "hpz.json") if ds == "hpz" else ds
    sizes = (1, 2, 4)
    commands = [
        build_train_command(
            tiny_set, tmp_path / str(size), "--ds", config, *fixed, "--sequence-parallel-size", str(size)
        )
        for size in sizes
    ]
    # DeepSpeed makes a process's groups for hpZ once.
    for together in [[command] for command in commands] if ds == "hpz" else [commands]:
        train_in_turn(together, 4)
    expected = read_losses(tmp_path / "1")
    assert expected[12] < expected[1] - 0.5
    for size in sizes[1:]:
        assert read_losses(tmp_path / str(size)) == pytest.approx(expected, rel=tolerance)
