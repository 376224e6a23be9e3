"""Gradients of many micro-batches are summed in fp32 at every stage, and in 16 bit only where the file asks for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, build_train_command, read_losses, run_cells, run_ranks
from tests.runs_in_turn import train_in_turn

CPU = {"device": "cpu"}
#: Takes a CPU to have fp16's arithmetic.
FAULT_JOB = REPOSITORY / "tests" / "training" / "fault_job.py"
LAYOUTS = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero1-offload": {"stage": 1, "offload_optimizer": CPU},
    "zero2": {"stage": 2},
    "zero2-offload": {"stage": 2, "offload_optimizer": CPU},
    "zero3": {"stage": 3},
    "zero3-offload": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}
#: Relative errors against the exact sum. Ranks exchange gradients in 16 bit, which rounds once more.
LEFT = {"bf16": 0.003, "fp16": 0.0004}
SUMMED_IN_16_BIT = {"bf16": 0.008, "fp16": 0.001}


def ds_of(layout: str, precision: str, **top: object) -> dict[str, object]:
    section = {"enabled": True} | ({"loss_scale": 1024} if precision == "fp16" else {})
    return {"zero_optimization": LAYOUTS[layout], precision: section, **top}


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_64_micro_batches_are_summed_in_fp32_at_every_stage(precision: str) -> None:
    refused = ("zero0", "fp16")  # DeepSpeed cannot scale
    layouts = [name for name in LAYOUTS if (name, precision) != refused]
    exchanged = ["zero1", "zero2", "zero3"]
    if precision == "bf16":  # the default suite: each sum of DeepSpeed's once
        layouts.remove("zero1-offload")
        exchanged = ["zero2"]
    cells = [ds_of(name, precision) for name in layouts]
    cells.append(ds_of("zero1", precision, data_types={"grad_accum_dtype": precision}))
    cells += [ds_of(name, precision, communication_data_type="fp32") for name in exchanged]
    script = Path(__file__).with_name("gradient_sum_job.py")
    errors = [answer["error"] for answer in run_cells(script, [[cell, precision] for cell in cells], 2)]
    for name, error in zip(layouts, errors, strict=False):
        assert error < LEFT[precision], name
    assert errors[len(layouts)] > SUMMED_IN_16_BIT[precision], "the file's word holds; what is compared is no constant"
    assert max(errors[len(layouts) + 1 :]) < 1e-6, "reduced in fp32 too, nothing is lost"


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_one_micro_step_with_offload_has_the_same_losses_without_sums_in_fp32(
    tiny_set: Path, tmp_path: Path, precision: str
) -> None:
    """The default keeps no fp32 gradients on the GPU; a filler of an odd batch changes nothing."""
    commands = []
    for name, types in (("default", {}), ("fp32", {"data_types": {"grad_accum_dtype": "fp32"}})):
        (tmp_path / f"{name}.json").write_text(json.dumps(ds_of("zero2-offload", precision, **types)))
        for batch in ("4", "3"):
            flags = ("--ds", str(tmp_path / f"{name}.json"), "--steps", "8", "--lr", "3e-3", "--save-every", "0")
            sizes = ("--global-batch-size", batch, "--micro-batch-size", "2" if batch == "4" else "3")
            commands.append(build_train_command(tiny_set, tmp_path / f"{name}-{batch}", *flags, *sizes))
    if precision == "bf16":
        train_in_turn(commands, 2)
    else:
        for command in commands:
            run_ranks([str(FAULT_JOB), "fp16", *command[1:]], 2)
    for batch in ("4", "3"):
        folders = [tmp_path / f"{name}-{batch}" for name in ("default", "fp32")]
        types = [json.loads((folder / "ds_config.json").read_text())["data_types"] for folder in folders]
        assert [of["grad_accum_dtype"] for of in types] == [precision, "fp32"]
        losses = [read_losses(folder) for folder in folders]
        assert losses[0] == losses[1] and len(losses[0]) == 8
