"""Ranks that divide sequences compute the losses and gradients of one rank, in double precision without DeepSpeed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.test_loss import ERRORS

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
