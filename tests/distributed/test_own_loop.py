"""A module and loop of one's own: whatever the stage, ranks and precision, training goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run_cells

JOB = Path(__file__).parent / "own_loop_job.py"
#: Losses are about 15.
EXACT = 3e-6
ROUNDED = 0.1
ENGINES = [
    *({"stage": stage, "precision": precision} for stage in range(4) for precision in ("fp32", "bf16")),
    *({"stage": stage, "precision": "fp32", "offload": True} for stage in (2, 3)),
]


def folder_of(engine: dict[str, Any], root: Path) -> str:
    return str(root / "-".join(f"{key}={value}" for key, value in engine.items()))


def write(engines: list[dict[str, Any]], ranks: int, root: Path, samples: int = 6) -> dict[str, list[float]]:
    """Train each engine on `ranks`; return the losses after its save, by folder."""
    cells = [
        {"do": "write", "folder": folder_of(engine, root), "engine": engine, "samples": samples} for engine in engines
    ]
    answers = run_cells(JOB, cells, ranks)
    return {cell["folder"]: answer["after"] for cell, answer in zip(cells, answers, strict=True)}


def check_continued(
    written: dict[str, list[float]],
    engines: list[dict[str, Any]],
    ranks: int,
    *,
    samples: int = 6,
    is_sample: bool = False,
) -> None:
    """Continue every folder by every engine of the same optimizer, or each folder by one in turn."""
    pairs = [
        (folder, engine)
        for number, folder in enumerate(written)
        for turn, engine in enumerate(engines)
        if (f"optimizer={engine['optimizer']}" if "optimizer" in engine else "stage") in folder
        if not is_sample or turn % len(written) == number
    ]
    cells = [{"do": "read", "folder": folder, "engine": engine, "samples": samples} for folder, engine in pairs]
    answers = run_cells(JOB, cells, ranks)
    for (folder, engine), answer in zip(pairs, answers, strict=True):
        is_exact = engine.get("precision", "fp32") == "fp32" and "bf16" not in folder
        worst = max(abs(a - b) for a, b in zip(answer["after"], written[folder], strict=True))
        assert worst < (EXACT if is_exact else ROUNDED), (folder, engine, ranks, worst)
        assert (answer["step"], answer["at"]) == (2, [1, 2])


def test_an_engine_continues_at_another_stage_on_other_ranks(tmp_path: Path) -> None:
    written = write([{"stage": 2}, {"stage": 3, "precision": "bf16"}], 2, tmp_path)
    check_continued(written, [{"stage": 3}, {"stage": 0, "precision": "bf16"}], 1, is_sample=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_engine_continues_every_other(tmp_path: Path, ranks: int) -> None:
    samples = 30 if ranks == 5 else 6
    written = write(ENGINES, ranks, tmp_path, samples)
    for others in (1, 2, 3, 5) if ranks == 5 else (1, 2, 3):
        check_continued(written, ENGINES, others, samples=samples, is_sample=ranks == 5)


@pytest.mark.slow
def test_any_optimizer_of_elements_continues(tmp_path: Path) -> None:
    engines = [
        {"stage": stage, "optimizer": name}
        for name in ("sgd", "nesterov", "rmsprop", "nadam")
        for stage in ((0, 1, 3) if name == "sgd" else (0, 2, 3))
    ]
    check_continued(write(engines, 2, tmp_path), engines, 1)


@pytest.mark.slow
def test_fp16_continues_with_its_loss_scale(tmp_path: Path) -> None:
    engines = [{"stage": stage, "precision": "fp16"} for stage in (1, 2, 3)]
    check_continued(write(engines, 2, tmp_path), engines, 3)


def test_what_does_not_fit_is_refused_before_a_weight_changes(tmp_path: Path) -> None:
    (outcomes,) = run_cells(JOB, [{"do": "edges", "folder": str(tmp_path / "run")}], 1)
    assert outcomes["empty"] == "None"
    assert outcomes["within a step"].startswith("CheckpointError: 1 of 6 micro-batches")
    assert outcomes["load within a step"].startswith("CheckpointError: 1 of 6 micro-batches")
    assert outcomes["tensor"].startswith("CheckpointError: extra['t'] is a Tensor")
    assert outcomes["kept"] == ["step-00000002", "step-00000003"]
    assert "Call load() before the first step" in outcomes["other engine, not loaded"]
    assert outcomes["back"] == 2
    assert outcomes["newest"] == {"again": True}
    assert outcomes["damaged"] == 2
    assert "does not match its hash" in outcomes["weights of a damaged one"]
    assert "holds 'down.bias', for which this model has no place" in outcomes["other model"]
    assert outcomes["other shape"].startswith("CheckpointError: 'frozen.weight' is [33, 33]")
    for name in ("other optimizer", "no states"):
        assert "optimizer" in outcomes[name], outcomes[name]
    assert "joined groups" in outcomes
    assert 'load with settings="script"' in outcomes["joined groups"]


def test_names_of_groups_and_of_compiled_modules_do_not_matter(tmp_path: Path) -> None:
    (outcomes,) = run_cells(JOB, [{"do": "turned", "folder": str(tmp_path)}], 1)
    assert outcomes == {"order": 0.0, "compiled": 0.0}


@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_weights_are_read_without_an_engine_and_bit_equal(tmp_path: Path, stage: int) -> None:
    (outcomes,) = run_cells(JOB, [{"do": "weights", "folder": str(tmp_path), "stage": stage}], 1)
    assert outcomes == {"differ": [], "names": [], "shared": True}


def test_stage_0_in_16_bit_begins_with_the_first_weights(tmp_path: Path) -> None:
    outcomes, refused, fused = run_cells(
        JOB,
        [
            {"do": "first_step", "precision": "bf16"},
            {"do": "refused", "folder": str(tmp_path)},
            {"do": "fused", "folder": str(tmp_path)},
        ],
        1,
    )
    assert outcomes["scalars"] == {}, "DeepSpeed takes a step of the optimizer while it builds the engine"
    assert outcomes["off"] == 0.0
    assert refused["fp16"].startswith("ConfigError: fp16 at ZeRO stage 0")
    assert "a loop's checkpoints need a folder" in refused["store"]
    assert "is in use by another process" in refused["held"]
    assert fused["after"] == fused["again"]
    assert max(abs(a - b) for a, b in zip(fused["after"], fused["divided"], strict=True)) < ROUNDED


def test_buffers_are_those_of_rank_0(tmp_path: Path) -> None:
    (outcomes,) = run_cells(JOB, [{"do": "buffers", "folder": str(tmp_path)}], 2)
    assert outcomes["is_of_rank_0"]
    assert outcomes["lines"][0].startswith("WARNING: 1 of 3 buffers differ between ranks")


def test_nodes_need_no_shared_disk(tmp_path: Path) -> None:
    (outcomes,) = run_cells(JOB, [{"do": "disks", "folder": str(tmp_path)}], 2)
    assert outcomes["files"] == ["__0_0.distcp"], "a disk has its own ranks' tensors"
    assert outcomes["off"] < EXACT
