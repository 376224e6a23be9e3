"""Ranks that divide sequences compute the losses and gradients of one rank, in double precision without DeepSpeed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import HANG_S, build_train_command, read_losses
from tests.distributed.test_loss import ERRORS
from tests.runs_in_turn import train_in_turn

SPLIT_ERRORS = {**ERRORS, "fp16": (0.001, 0.002)}
ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def cell(stage: int, shape: str, **settings: object) -> dict[str, object]:
    usual = {"precision": "fp32", "checkpointing": "none", "accumulation": 1, "chunks": "small", "z_loss": 0.1}
    return {"stage": stage, "shape": shape, "split": 2, **usual, **settings}


def check(ranks: Callable, world_size: int, cells: list[dict[str, object]], timeout_s: float = HANG_S) -> None:
    job = ranks([str(Path(__file__).with_name("loss_job.py")), json.dumps(cells)], world_size)
    outputs = job.wait(timeout_s)
    assert job.exit_codes == [0] * world_size, outputs
    actual = [json.loads(line) for line in outputs[0].splitlines() if line.startswith('{"loss"')]
    for wanted, errors in zip(cells, actual, strict=True):
        loss, gradient = SPLIT_ERRORS[str(wanted["precision"])]
        assert errors["loss"] < loss, wanted
        assert errors["gradient"] < gradient, wanted


def test_losses_and_gradients_are_those_of_complete_sequences(ranks: Callable) -> None:
    cells = [
        cell(0, "llama-4-heads", tile=5),
        cell(1, "gpt2-documents-4-heads", accumulation=2),
        cell(2, "llama", checkpointing="full", zero=dict(list(ON_HOST.items())[:1])),
        cell(3, "gpt2", checkpointing="selective", zero=ON_HOST),
        cell(3, "gpt2-4-heads", checkpointing="full", tile=5, accumulation=2),
        cell(3, "llama-of-7"),
        cell(2, "gpt2", precision="bf16"),
        cell(3, "llama-4-heads", precision="fp16"),
    ]
    check(ranks, 2, cells)


def test_four_ranks_of_a_sequence_have_its_losses_and_gradients(ranks: Callable) -> None:
    check(ranks, 4, [cell(3, "llama-4-heads", split=4, checkpointing="full", tile=5, accumulation=2)])


@pytest.mark.slow
@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_whole_grid(ranks: Callable, stage: int, split: int) -> None:
    shapes = ("gpt2-4-heads", "gpt2-documents-4-heads", "llama-4-heads", "llama-of-7", "llama-of-5")
    grid = itertools.product(shapes, SPLIT_ERRORS, ("none", "selective", "full"), (1, 2), (0, 5))
    cells = [
        cell(stage, shape, split=split, precision=precision, checkpointing=mode, accumulation=accumulation, tile=tile)
        for shape, precision, mode, accumulation, tile in grid
        if (not tile or mode == "full") and (stage or precision != "fp16")
    ]
    if stage == 3 and split == 2:
        # DeepSpeed makes a process's groups for hpZ once.
        cells.append(cell(3, "llama-4-heads", split=2, zero={"zero_hpz_partition_size": 2}))
    check(ranks, 4, cells, timeout_s=840)


ROTARY = ("--positions", "rotary", "--norm", "rmsnorm", "--precision", "fp32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ds", "flags", "tolerance"),
    [
        ("zero2", ("--optimizer", "muon", "--precision", "fp32"), 1e-5),
        ("zero3_offload", (*ROTARY, "--document-mask"), 1e-5),
        ("hpz", (*ROTARY, "--sliding-window", "9"), 1e-5),
        ("zero1", ("--precision", "bf16"), 0.01),
    ],
    ids=["muon", "offload", "hpz", "bf16"],
)
def test_runs_have_the_losses_of_complete_sequences(
    ds: str, flags: tuple[str, ...], tolerance: float, tiny_set: Path, tmp_path: Path
) -> None:
    fixed = ("--steps", "12", "--lr", "3e-3", "--n-head", "4", "--n-kv-head", "2", "--save-every", "0")
    (tmp_path / "hpz.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}))
    config = str(tmp_path / "hpz.json") if ds == "hpz" else ds
    sizes = (1, 2, 4)
    commands = [
        build_train_command(
            tiny_set, tmp_path / str(size), "--ds", config, *fixed, *flags, "--sequence-parallel-size", str(size)
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
