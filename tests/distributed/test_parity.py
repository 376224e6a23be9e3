"""ZeRO is an implementation detail: every stage, offload, world size and checkpointing mode gives the same losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import read_losses

STEPS = 20
#: What Llama, Qwen and Mistral have and GPT-2 has not.
LLAMA = (
    *("--norm", "rmsnorm", "--no-bias", "--positions", "rotary", "--activation", "silu", "--gated-mlp"),
    *("--n-head", "4", "--n-kv-head", "2", "--qk-norm", "head", "--mlp-width", "85", "--no-tied"),
    *("--sliding-window", "12", "--precision", "fp32"),
)


@pytest.fixture(scope="module")
def known_curves() -> dict[tuple[str, ...], list[float]]:
    """Runs that an earlier test of this file has made already."""
    return {}


@pytest.fixture
def curve(ranks: Callable, train_command: Callable, tmp_path: Path, known_curves: dict) -> Callable[..., list[float]]:
    """`curve(ds_config, world_size, *flags)`: the losses of a run."""

    def run(ds_config: str, world_size: int, *flags: str) -> list[float]:
        key = (ds_config, str(world_size), *flags)
        if key not in known_curves:
            known_curves[key] = train(ds_config, world_size, *flags)
        return known_curves[key]

    def train(ds_config: str, world_size: int, *flags: str) -> list[float]:
        folder = tmp_path / f"{ds_config}-{world_size}{''.join(flags)}"
        command = train_command("--ds", f"ds_configs/{ds_config}.json", "--steps", str(STEPS), "--lr", "3e-3")
        job = ranks([*command, "--save-every", "0", "--run", str(folder), *flags], world_size)
        output = job.wait()[0]
        assert job.exit_codes == [0] * world_size, output
        losses = read_losses(folder)
        assert len(losses) == STEPS
        return [losses[step] for step in sorted(losses)]

    return run


def largest_difference(losses: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))


def test_every_stage_gives_the_same_losses_in_fp32(curve: Callable) -> None:
    reference = curve("zero0", 2, "--precision", "fp32")
    assert reference[-1] < reference[0] - 1, "nothing was learnt, so nothing is compared"
    for ds_config in ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"):
        losses = curve(ds_config, 2, "--precision", "fp32")
        assert largest_difference(losses, reference) <= 1e-5, ds_config


def test_world_size_and_checkpointing_change_nothing(curve: Callable) -> None:
    reference = curve("zero2", 2, "--precision", "fp32")
    for world_size in (1, 4):
        assert largest_difference(curve("zero2", world_size, "--precision", "fp32"), reference) <= 1e-5
    for mode in ("selective", "full"):
        assert curve("zero2", 2, "--precision", "fp32", "--activation-checkpointing", mode) == reference


@pytest.mark.slow
def test_16_bit_stays_close_to_fp32(curve: Callable) -> None:
    reference = curve("zero2", 2, "--precision", "fp32")
    cells = (("zero0", "bf16"), ("zero1", "bf16"), ("zero3", "bf16"), ("zero2", "autocast"), ("zero3", "autocast"))
    for ds_config, precision in cells:
        losses = curve(ds_config, 2, "--precision", precision)
        assert largest_difference(losses, reference) <= 0.01, (ds_config, precision)


@pytest.mark.slow
def test_todays_blocks_have_the_same_losses_at_every_stage(curve: Callable) -> None:
    reference = curve("zero0", 1, *LLAMA)
    assert reference[-1] < reference[0] - 1, "nothing was learnt, so nothing is compared"
    for ds_config, world_size in (("zero2", 2), ("zero3", 2)):
        assert largest_difference(curve(ds_config, world_size, *LLAMA), reference) <= 1e-5, ds_config


@pytest.mark.slow
def test_todays_blocks_offloaded_recomputed_and_in_16_bit(curve: Callable) -> None:
    reference = curve("zero0", 1, *LLAMA)
    for ds_config, world_size in (("zero1", 2), ("zero2_offload", 2), ("zero3_offload", 2), ("zero3", 4)):
        assert largest_difference(curve(ds_config, world_size, *LLAMA), reference) <= 1e-5, ds_config
    for ds_config in ("zero2", "zero3"):
        kept = curve(ds_config, 2, *LLAMA)
        for mode in ("selective", "full"):
            assert curve(ds_config, 2, *LLAMA, "--activation-checkpointing", mode) == kept, (ds_config, mode)
    for ds_config, precision in (("zero1", "bf16"), ("zero3", "bf16"), ("zero2", "autocast"), ("zero3", "autocast")):
        losses = curve(ds_config, 2, *LLAMA[:-2], "--precision", precision)
        assert largest_difference(losses, reference) <= 0.01, (ds_config, precision)
