"""The loss in chunks is the whole one at every stage, and its gradients are."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.conftest import HANG_S, run_cells

#: Of the loss in nats, of the norm of all gradients. 16-bit products round as they do without chunks.
ERRORS = {"fp32": (1e-6, 1e-6), "bf16": (0.01, 0.02), "autocast": (0.01, 0.02), "fp16": (0.001, 0.002)}
#: At every stage: DeepSpeed cannot scale fp16 at stage 0.
PRECISIONS = ("fp32", "bf16", "autocast")


def cell(stage: int, shape: str = "gpt2", **settings: object) -> dict[str, object]:
    usual = {"precision": "fp32", "checkpointing": "none", "accumulation": 1, "chunks": "small", "z_loss": 0.0}
    return {"stage": stage, "shape": shape, **usual, **settings}


JOB = Path(__file__).with_name("loss_job.py")


def check(cells: list[dict[str, object]], world_size: int = 2, timeout_s: float = HANG_S) -> None:
    for wanted, errors in zip(cells, run_cells(JOB, cells, world_size, timeout_s=timeout_s), strict=True):
        loss, gradient = ERRORS[str(wanted["precision"])]
        assert errors["loss"] < loss, wanted
        assert errors["gradient"] < gradient, wanted


def test_every_stage_has_the_whole_loss_and_its_gradients() -> None:
    cells = [
        cell(0, accumulation=4),
        cell(1, "llama", z_loss=0.1),
        cell(2, "gpt2-documents", checkpointing="full", accumulation=4),
        cell(3, "gpt2", checkpointing="selective", accumulation=4, z_loss=0.1),
        cell(3, "llama", accumulation=4),
        cell(3, "llama", chunks="whole"),
        cell(0, precision="bf16"),
        cell(2, precision="autocast"),
        cell(3, "gpt2", precision="autocast"),
    ]
    check(cells)


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 3))])
def test_gradients_exchanged_in_16_bit_are_hardly_further_from_exact_than_autocast_makes_them(stage: int) -> None:
    cells = [cell(stage, precision="autocast", accumulation=4, exchange=exchange) for exchange in ("bf16", "fp32")]
    in_bf16, in_fp32 = (errors["gradient"] for errors in run_cells(JOB, cells, 2))
    assert in_bf16 != in_fp32, "the file's word holds"
    assert in_bf16 < 1.3 * in_fp32


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_whole_grid(stage: int) -> None:
    grid = itertools.product(
        ("gpt2", "gpt2-documents", "llama"), PRECISIONS, ("none", "selective", "full"), (1, 4), ("small", "whole")
    )
    cells = [
        cell(stage, shape, precision=precision, checkpointing=mode, accumulation=accumulation, chunks=chunks)
        for shape, precision, mode, accumulation, chunks in grid
    ]
    check(cells)
