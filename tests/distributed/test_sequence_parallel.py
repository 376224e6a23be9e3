"""Ranks that divide sequences compute the losses and gradients of one rank, in double precision without DeepSpeed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import build_train_command, read_losses
from tests.distributed.test_loss import ERRORS
from tests.runs_in_turn import train_in_turn

ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def cell(stage: int, shape: str, **settings: object) -> dict[str, object]:
    usual = {"precision": "fp32", "checkpointing": "none", "accumulation": 1, "chunks": "small", "z_loss": 0.1}
    return {"stage": stage, "shape": shape, "split": 2, **usual, **settings}


def check(ranks: Callable, world_size: int, cells: list[dict[str, object]]) -> None:
    job = ranks([str(Path(__file__).with_name("loss_job.py")), json.dumps(cells)], world_size)
    outputs = job.wait()
    assert job.exit_codes == [0] * world_size, outputs
    found = [json.loads(line) for line in outputs[0].splitlines() if line.startswith('{"loss"')]
    for wanted, errors in zip(cells, found, strict=True):
        loss, gradient = ERRORS[str(wanted["precision"])]
        assert errors["loss"] < loss, wanted
        assert errors["gradient"] < gradient, wanted


def test_losses_and_gradients_are_those_of_complete_sequences(ranks: Callable) -> None:
    cells = [
        cell(0, "llama-4-heads"),
        cell(1, "gpt2-documents-4-heads", accumulation=2),
        cell(2, "llama", checkpointing="full", zero=dict(list(ON_HOST.items())[:1])),
        cell(3, "gpt2", checkpointing="selective", zero=ON_HOST),
        cell(3, "llama-of-7"),
        cell(2, "gpt2", precision="bf16"),
    ]
    check(ranks, 2, cells)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_whole_grid(ranks: Callable, stage: int) -> None:
    shapes = ("gpt2-4-heads", "gpt2-documents-4-heads", "llama-4-heads", "llama-of-7", "llama-of-5")
    grid = itertools.product(shapes, (2, 4), ERRORS, ("none", "selective", "full"), (1, 2))
    cells = [
        cell(stage, shape, split=split, precision=precision, checkpointing=mode, accumulation=accumulation)
        for shape, split, precision, mode, accumulation in grid
    ]
    if stage == 3:
        cells += [cell(3, shape, split=2, zero={"zero_hpz_partition_size": 2}) for shape in shapes]
    check(ranks, 4, cells)


@pytest.mark.slow
def test_runs_have_the_losses_of_complete_sequences(tiny_set: Path, tmp_path: Path) -> None:
    """With Muon, hpZ, offload and 16 bit."""
    fixed = ("--steps", "12", "--lr", "3e-3", "--n-head", "4", "--n-kv-head", "2", "--save-every", "0")
    rotary = ("--positions", "rotary", "--norm", "rmsnorm", "--precision", "fp32")
    hpz = tmp_path / "hpz.json"
    hpz.write_text(json.dumps({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}))
    settings = {
        ("zero2", "--optimizer", "muon", "--precision", "fp32"): 1e-5,
        ("zero3_offload", *rotary, "--document-mask"): 1e-5,
        (str(hpz), *rotary, "--sliding-window", "9"): 1e-5,
        ("zero1", "--precision", "bf16"): 0.01,
        ("zero2", "--precision", "fp16"): 0.01,
    }
    folders = {
        (cell, size): tmp_path / f"{number}-{size}" for number, cell in enumerate(settings) for size in (1, 2, 4)
    }
    commands = [
        build_train_command(tiny_set, folder, "--ds", cell[0], *fixed, *cell[1:], "--sequence-parallel-size", str(size))
        for (cell, size), folder in folders.items()
    ]
    train_in_turn(commands, 4)
    for (cell, _), folder in folders.items():
        expected = read_losses(folders[cell, 1])
        assert expected[12] < expected[1] - 0.5
        assert read_losses(folder) == pytest.approx(expected, rel=settings[cell])
