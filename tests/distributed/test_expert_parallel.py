"""Ranks that divide experts compute what ranks with all experts do, and continue each other's runs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.checkpoint.written import load_full_weights
from tests.conftest import build_train_command, read_records, words
from tests.distributed.test_loss import PRECISIONS, cell, check
from tests.distributed.test_sequence_parallel import ON_HOST
from tests.runs_in_turn import train_in_turn

FIXED = words("--steps 4 --lr 3e-3 --precision fp32 --save-every 2 --keep-last 9")
EXPERTS = words("--num-experts 4 --expert-width 40 --shared-expert-width 24 --router-z-loss 1e-3")
BIASED = (*EXPERTS, *words("--router-bias --router-bias-speed 0.02 --freeze blocks.1.mlp.experts.up"))
#: The last micro-batch of a validation has sequences for one rank alone.
VALIDATED = words("--val-every 2 --val-samples 9 --micro-batch-size 2")


def test_gradients_are_those_of_one_rank_without_deepspeed() -> None:
    """Also where a rank gets no tokens at all."""
    cells = [
        cell(1, "4-experts", experts=2, accumulation=2),
        cell(2, "4-experts", experts=2, checkpointing="selective", zero=dict(list(ON_HOST.items())[:1])),
        cell(3, "4-experts", experts=2, checkpointing="full", zero=ON_HOST),
        cell(2, "1-of-4-experts", experts=2),
        cell(3, "4-experts", experts=2, precision="fp16"),
        cell(3, "1-of-4-experts", experts=2, accumulation=2),
    ]
    check(cells)


def numbers_of(run: Path) -> dict[tuple[str, int], list[float]]:
    """Losses and gradient norms of a run by kind of record and step."""
    keys = ("loss", "grad_norm")
    records = read_records(run, "train", "validation")
    return {(one["kind"], one["step"]): [one[key] for key in keys if key in one] for one in records}


def judged(run: Path) -> dict[tuple[str, int], object]:
    """Return the generated texts and the scores of a task by kind of record and step."""
    records = read_records(run, "sample", "evaluation")
    return {(one["kind"], one["step"]): one.get("text", one.get("values")) for one in records}


def check_runs(runs: list[Path], first_steps: list[int]) -> None:
    """Runs that begin after `first_steps` agree with the first one, and so do their last weights."""
    expected = numbers_of(runs[0])
    assert len(expected) >= 4
    weights = load_full_weights(runs[0] / "checkpoints" / "step-00000004")
    for run, first in zip(runs[1:], first_steps, strict=True):
        actual = numbers_of(run)
        assert actual.keys() == {key for key in expected if key[1] > first}, run
        for key, numbers in actual.items():
            assert numbers == pytest.approx(expected[key], rel=1e-6), (run, key)
        for name, weight in load_full_weights(run / "checkpoints" / "step-00000004").items():
            # Adam divides gradients near 0 by their own size.
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-4, msg=f"{run} {name}")


def test_runs_are_equal_and_continue_with_other_divisions(tiny_set: Path, tmp_path: Path) -> None:
    half = {run: ("--resume", str(tmp_path / run / "checkpoints" / "step-00000002")) for run in ("whole", "divided")}
    runs = {
        "whole": ("zero1", "1"),
        "divided": ("zero3", "2", "--activation-checkpointing", "full"),
        "whole-divided": ("zero2", "2", *half["whole"]),
        "divided-whole": ("zero1", "1", *half["divided"]),
    }
    # One item, so that a rank has nothing to score.
    task = tmp_path / "items.jsonl"
    task.write_text('{"ctx": "the quick", "endings": ["brown fox", "lazy dog"], "label": 0}\n')
    judging = ("--sample-every", "2", "--eval-every", "2", "--eval-tasks", f"hellaswag={task}")
    flags = (*FIXED, *BIASED, *VALIDATED, *judging)
    commands = [
        build_train_command(tiny_set, tmp_path / run, *flags, "--ds", ds, "--expert-parallel-size", size, *more)
        for run, (ds, size, *more) in runs.items()
    ]
    output = train_in_turn(commands, 2)
    assert "2 ranks divide the experts of a block: 2 of 4 each, held by 1 rank" in output[1]
    assert "changed since the checkpoint: zero_stage 1 -> 2; expert_parallel_size 1 -> 2" in output[2]
    check_runs([tmp_path / run for run in runs], [0, 2, 2])
    complete, divided = (judged(tmp_path / run) for run in ("whole", "divided"))
    assert len(complete) == 4 and divided == complete


@pytest.mark.slow
def test_the_grid_of_gradients() -> None:
    cells = [
        cell(stage, "4-experts", experts=experts, precision=precision, checkpointing=mode, accumulation=accumulation)
        for (mode, accumulation), stage, experts, precision in itertools.product(
            (("none", 2), ("selective", 1), ("full", 2)), (1, 2, 3), (2, 4), PRECISIONS
        )
    ]
    cells += [cell(stage, "1-of-4-experts", experts=4) for stage in (1, 2, 3)]
    keys = ({"round_robin_gradients": True}, {"use_multi_rank_bucket_allreduce": False}, {"overlap_comm": True})
    cells += [cell(2, "4-experts", experts=2, zero=zero) for zero in keys]
    zero = ({"reduce_scatter": False}, {"contiguous_gradients": False}, {"stage3_param_persistence_threshold": 0})
    cells += [cell(3, "4-experts", experts=2, zero=one) for one in zero]
    check(cells, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        BIASED,
        (*EXPERTS, "--optimizer", "muon", "--param-group", "*.down:lr=0.5x:decay=0"),
        (*EXPERTS, "--n-head", "4", "--n-layer", "3", "--dense-layers", "1"),
        (*EXPERTS, "--freeze", "*.mlp.experts.*"),
    ],
)
def test_every_stage_and_size_and_resumes_between_them(flags: tuple[str, ...], tiny_set: Path, tmp_path: Path) -> None:
    def command(run: str, ds_config: str, size: int, *more: str) -> list[str]:
        cell = ("--ds", ds_config, "--expert-parallel-size", str(size), *more)
        return build_train_command(tiny_set, tmp_path / run, *FIXED, *flags, *VALIDATED, *cell)

    at_half = ("--resume", str(tmp_path / "zero2-2" / "checkpoints" / "step-00000002"))
    train_in_turn([command("whole", "zero1", 1), command("zero2-2", "zero2", 2)], 2)
    cells = list(itertools.product(("zero1", "zero2_offload", "zero3", "zero3_offload"), (2, 4)))
    straight = [f"{ds_config}-{size}-of-4" for ds_config, size in cells]
    split = ("--sequence-parallel-size", "2")
    train_in_turn(
        [
            *(command(run, *of_run) for run, of_run in zip(straight, cells, strict=True)),
            *(command(f"resumed-{run}", *of_run, *at_half) for run, of_run in zip(straight, cells, strict=True)),
            *(command(f"split-{size}", "zero2", size, *split) for size in (2, 4)),
        ],
        4,
    )
    divided = str(tmp_path / straight[-1] / "checkpoints" / "step-00000002")
    train_in_turn([command("back", "zero1", 1, "--resume", divided)], 1)
    runs = [*straight, "zero2-2", "split-2", "split-4"]
    resumed = [*(f"resumed-{run}" for run in straight), "back"]
    starts = [0] * len(runs) + [2] * len(resumed)
    check_runs([tmp_path / run for run in ("whole", *runs, *resumed)], starts)


@pytest.mark.slow
def test_norms_in_16_bit_are_those_of_undivided_experts(tiny_set: Path, tmp_path: Path) -> None:
    """The norm, by which every step is clipped here, counts the experts of all ranks once."""
    cells = [(stage, size) for stage in ("zero1", "zero2", "zero3") for size in ("1", "2")]
    flags = (*FIXED, *EXPERTS, "--precision", "bf16", "--micro-batch-size", "2", "--gradient-clipping", "0.5")
    runs = [tmp_path / "-".join(cell) for cell in cells]
    commands = [
        build_train_command(tiny_set, run, *flags, "--ds", stage, "--expert-parallel-size", size)
        for run, (stage, size) in zip(runs, cells, strict=True)
    ]
    train_in_turn(commands, 2)
    expected = numbers_of(runs[0])
    assert all(norm > 0.5 for _, norm in expected.values())
    for run in runs[1:]:
        for key, numbers in numbers_of(run).items():
            assert numbers == pytest.approx(expected[key], rel=0.02), (run, key)
