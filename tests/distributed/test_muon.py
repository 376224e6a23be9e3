"""Muon trains the same under every ZeRO stage as torch.optim.Muon and AdamW do in a plain loop, clipping included."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.conftest import forget_after, read_losses, run_cells, run_ranks, words

STEPS = 20
CPU = {"device": "cpu", "pin_memory": False}
LAYOUTS: dict[str, dict[str, object]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero1-offload": {"stage": 1, "offload_optimizer": CPU},
    "zero2-offload": {"stage": 2, "offload_optimizer": CPU},
    "zero3-offload": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
    "zero3-sub-groups": {"stage": 3, "sub_group_size": 3000},
    "zero2-round-robin": {"stage": 2, "round_robin_gradients": True},
    "zero2-aligned": {"stage": 2, "parameter_alignment": True},
}
PLAIN = {"plain": True, "steps": STEPS}


def cell(layout: str, accumulation: int, steps: int = STEPS, dtype: str = "float32", **top: object) -> dict:
    ds = {"zero_optimization": LAYOUTS[layout], **top}
    return {"ds": ds, "accumulation": accumulation, "steps": steps, "dtype": dtype}


def train(world_size: int, *cells: dict, model: Sequence[str] = ()) -> list[dict[str, list[float]]]:
    """Losses and norms of each."""
    return run_cells(Path(__file__).with_name("muon_job.py"), cells, world_size, *model)


def largest_difference(actual: dict[str, list[float]], reference: dict[str, list[float]], key: str) -> float:
    return max(abs(a - b) / b for a, b in zip(actual[key], reference[key], strict=True))


def check_equals_the_plain_loop(world_size: int, *cells: dict, model: Sequence[str] = ()) -> None:
    steps = cells[0]["steps"]
    reference, *actual = train(world_size, {**PLAIN, "steps": steps}, *cells, model=model)
    assert reference["loss"][-1] < reference["loss"][0] - 0.5, "nothing was learnt, so nothing is compared"
    assert sum(norm > 1 for norm in reference["norm"]) > steps // 2, "clipping is what DeepSpeed's own Muon gets wrong"
    for wanted, result in zip(cells, actual, strict=True):
        assert largest_difference(result, reference, "loss") <= 1e-5, wanted
        assert largest_difference(result, reference, "norm") <= 1e-6, wanted


def test_two_ranks_train_as_the_plain_loop_does() -> None:
    layouts = ("zero0", "zero1", "zero2-offload", "zero3", "zero3-sub-groups", "zero2-round-robin")
    check_equals_the_plain_loop(2, *(cell(name, accumulation=2, steps=12) for name in layouts))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_layout_trains_as_the_plain_loop_does(world_size: int) -> None:
    numbers = (1, 4) if world_size < 4 else (1, 2)
    check_equals_the_plain_loop(world_size, *(cell(name, number) for name in LAYOUTS for number in numbers))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_expert_is_a_matrix_of_its_own(world_size: int) -> None:
    layouts = ("zero0", "zero1", "zero2-offload", "zero3", "zero3-sub-groups", "zero2-round-robin")
    cells = [cell(name, accumulation=2, steps=12) for name in layouts]
    check_equals_the_plain_loop(world_size, *cells, model=["experts"])


@pytest.mark.slow
def test_16_bit_stays_close() -> None:
    """bf16, autocast, and Newton-Schulz alone in bf16, as on GPUs."""
    bf16, autocast = {"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}
    stages = ("zero0", "zero1", "zero2", "zero3")
    cells = [cell(name, 2, **section) for name in (*stages, "zero1-offload") for section in (bf16, autocast)]
    iterated = [cell(name, 1, dtype="bfloat16") for name in stages]
    reference, *actual = train(2, PLAIN, *cells, *iterated)
    for wanted, result in zip((*cells, *iterated), actual, strict=True):
        limit = 1e-3 if wanted in cells else 1e-5
        assert largest_difference(result, reference, "loss") <= limit, wanted


@pytest.mark.slow
def test_fp16_skips_steps_and_then_trains_as_fp32_does() -> None:
    """A skipped step leaves weights and momentum alone: after it, everything is as if it had not been."""
    fp16 = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 1000}
    stages = ("zero1", "zero2", "zero3", "zero3-offload")
    actual = train(2, *(cell(name, 2, fp16=fp16) for name in stages))
    assert actual[0]["skipped"][0] > 0
    for result in actual[1:]:
        assert result["skipped"] == actual[0]["skipped"]
        assert result["loss"] == pytest.approx(actual[0]["loss"], rel=1e-3)
    assert actual[0]["loss"][-1] < actual[0]["loss"][0] - 0.5


@pytest.fixture
def train_run(train_command: Callable, tmp_path: Path) -> Callable[..., dict[int, float]]:
    """`train_run(folder, ds_config, world_size)`: 12 steps of a run, or those that are left of it; all its losses."""

    def run(folder: str, ds_config: str, world_size: int) -> dict[int, float]:
        flags = "--optimizer muon --muon-lr-factor 2 --precision fp32 --lr 5e-3 --steps 12 --save-every 4 --keep-last 9"
        run_ranks(train_command("--ds", ds_config, *words(flags), "--run", str(tmp_path / folder)), world_size)
        return read_losses(tmp_path / folder)

    return run


@pytest.mark.slow
def test_a_run_goes_on_at_another_stage_and_world_size(train_run: Callable, tmp_path: Path) -> None:
    """The momentum of a matrix that ZeRO has cut goes where its weights go."""
    straight = train_run("straight", "zero2", 2)
    shutil.copytree(tmp_path / "straight", tmp_path / "broken")
    forget_after(tmp_path / "broken", 4)
    assert train_run("broken", "zero3", 1) == pytest.approx(straight, rel=1e-5)
    forget_after(tmp_path / "broken", 8)
    assert train_run("broken", "zero0", 2) == pytest.approx(straight, rel=1e-5)
