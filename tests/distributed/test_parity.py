"""ZeRO is an implementation detail: every stage, offload, world size and checkpointing mode gives the same losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import build_train_command, read_losses, words
from tests.runs_in_turn import train_in_turn

STEPS = 12
FP32 = words("--precision fp32")
#: What Llama, Qwen and Mistral have and GPT-2 has not.
LLAMA = words(
    "--norm rmsnorm --no-bias --positions rotary --activation silu --gated-mlp --n-head 4 --n-kv-head 2 --qk-norm head "
    "--mlp-width 85 --no-tied --sliding-window 12 --precision fp32"
)
Cell = tuple[str, ...]
"""A ds_config and the flags of a run."""


@pytest.fixture
def curves(tiny_set: Path, tmp_path: Path) -> Callable[..., list[list[float]]]:
    """`curves(world_size, *cells)`: the losses of each run."""

    def run(world_size: int, *cells: Cell) -> list[list[float]]:
        folders = [tmp_path / f"{world_size}-{'-'.join(cell)}" for cell in cells]
        train_in_turn([command(cell, folder) for cell, folder in zip(cells, folders, strict=True)], world_size)
        losses = [read_losses(folder) for folder in folders]
        assert all(list(of_run) == list(range(1, STEPS + 1)) for of_run in losses)
        return [list(of_run.values()) for of_run in losses]

    def command(cell: Cell, folder: Path) -> list[str]:
        ds_config, *flags = cell
        fixed = words(f"--ds {ds_config} --steps {STEPS} --lr 3e-3 --save-every 0")
        return build_train_command(tiny_set, folder, *fixed, *flags)

    return run


def largest_difference(losses: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))


def check_learning(losses: list[float], nats: float = 1.0) -> None:
    assert losses[-1] < losses[0] - nats, "nothing was learnt, so nothing is compared"


def test_every_stage_and_checkpointing_mode_gives_the_same_losses_in_fp32(curves: Callable) -> None:
    stages = ("zero1", "zero3", "zero2_offload", "zero3_offload")
    modes = ("selective", "full")
    reference, remaining, *others = curves(
        2,
        ("zero0", *FP32),
        ("zero2", *FP32),
        *[(ds_config, *FP32) for ds_config in stages],
        *[("zero2", *FP32, "--activation-checkpointing", mode) for mode in modes],
    )
    check_learning(reference)
    for name, losses in zip(("zero2", *stages, *modes), (remaining, *others), strict=True):
        assert largest_difference(losses, reference) <= 1e-5, name
    assert others[-len(modes) :] == [remaining] * len(modes)


@pytest.mark.slow
def test_16_bit_stays_close_to_fp32(curves: Callable) -> None:
    cells = [("zero0", "bf16"), ("zero1", "bf16"), ("zero3", "bf16"), ("zero2", "autocast"), ("zero3", "autocast")]
    reference, *others = curves(2, ("zero2", *FP32), *[(ds, "--precision", precision) for ds, precision in cells])
    for cell, losses in zip(cells, others, strict=True):
        assert largest_difference(losses, reference) <= 0.01, cell


@pytest.mark.slow
def test_todays_blocks_at_every_stage_offloaded_recomputed_and_in_16_bit(curves: Callable) -> None:
    (reference,) = curves(1, ("zero0", *LLAMA))
    check_learning(reference, 0.5)
    stages = ("zero1", "zero2_offload", "zero3_offload", "zero2", "zero3")
    *others, zero2, zero3 = curves(2, *[(ds, *LLAMA) for ds in stages])
    for losses in (*others, zero2, zero3, *curves(4, ("zero3", *LLAMA))):
        assert largest_difference(losses, reference) <= 1e-5
    for ds, remaining in (("zero2", zero2), ("zero3", zero3)):
        recomputed = [(ds, *LLAMA, "--activation-checkpointing", mode) for mode in ("selective", "full")]
        assert curves(2, *recomputed) == [remaining] * len(recomputed), ds
    cells = [("zero1", "bf16"), ("zero3", "bf16"), ("zero2", "autocast"), ("zero3", "autocast")]
    for losses in curves(2, *[(ds, *LLAMA[:-2], "--precision", precision) for ds, precision in cells]):
        assert largest_difference(losses, reference) <= 0.01
