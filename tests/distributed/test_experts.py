"""Models with experts have the same losses at every stage and world size, their routers' biases included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmscale.checkpoint.inventory import list_checkpoints
from tests.checkpoint.written import load_full_weights
from tests.conftest import build_train_command, read_losses, read_records, run_ranks, words
from tests.distributed.test_loss import PRECISIONS, cell, check
from tests.distributed.test_sequence_parallel import ON_HOST
from tests.engine import test_loss_scaling
from tests.runs_in_turn import train_in_turn

STEPS = 12
FP32 = ("--precision", "fp32")
EXPERTS = words(
    "--num-experts 4 --expert-width 40 --shared-expert-width 24 --n-layer 3 --dense-layers 1 --router-z-loss 1e-3"
)
#: DeepSeek V3's router.
BIASED = (*EXPERTS, *words("--router-bias --router-score sigmoid --router-bias-speed 0.001 --balance-loss 1e-3"))


def train(data: Path, folder: Path, world_size: int, *cells: tuple[str, ...]) -> list[list[float]]:
    """Return the losses of runs with a ds_config and flags each."""
    folders = [folder / f"{world_size}-{number}" for number in range(len(cells))]
    fixed = ("--steps", str(STEPS), "--lr", "3e-3", "--save-every", "0")
    train_in_turn(
        [
            build_train_command(data, run, "--ds", ds_config, *fixed, *flags)
            for run, (ds_config, *flags) in zip(folders, cells, strict=True)
        ],
        world_size,
    )
    return [[losses[step] for step in sorted(losses)] for losses in map(read_losses, folders)]


def biases_of(run: Path) -> torch.Tensor:
    weights = load_full_weights(list_checkpoints(run)[0])
    return torch.stack([weights[f"blocks.{block}.mlp.router.bias"] for block in (1, 2)])


def test_gradients_are_those_of_one_rank_without_deepspeed() -> None:
    cells = [
        cell(1, "experts", accumulation=2),
        cell(3, "experts", checkpointing="full"),
        cell(2, "experts", precision="fp16"),
        cell(2, "experts-4-heads", split=2, checkpointing="selective"),
    ]
    check(cells)


@pytest.mark.slow
def test_the_grid_of_gradients() -> None:
    cells = [
        cell(stage, "experts", precision=precision, checkpointing=mode, accumulation=accumulation)
        for stage in (0, 1, 2, 3)
        for precision in PRECISIONS
        for mode, accumulation in (("none", 2), ("selective", 1), ("full", 2))
    ]
    cells += [cell(2, "experts", zero=dict(list(ON_HOST.items())[:1])), cell(3, "experts", zero=ON_HOST)]
    cells += [cell(stage, "experts-4-heads", split=2, checkpointing="full") for stage in (0, 3)]
    check(cells)


@pytest.mark.slow
def test_every_stage_offload_optimizer_and_precision(tiny_set: Path, tmp_path: Path) -> None:
    reference, balanced, muon = train(
        tiny_set, tmp_path, 1, ("zero0", *BIASED, *FP32), ("zero0", *EXPERTS, *FP32),
        ("zero0", *EXPERTS, *FP32, "--optimizer", "muon"),
    )  # fmt: skip
    biases = biases_of(tmp_path / "1-0")
    assert biases.abs().max() > 0.001 and reference[-1] < reference[0] - 1
    exact = [
        *((ds_config, *BIASED, *FP32) for ds_config in ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")),
        ("zero2", *BIASED, *FP32, "--micro-batch-size", "1", "--activation-checkpointing", "selective"),
        ("zero3", *BIASED, *FP32, "--sequence-parallel-size", "2", "--activation-checkpointing", "full"),
    ]
    near = [
        (ds_config, *BIASED, "--precision", precision)
        for ds_config, precision in (("zero1", "bf16"), ("zero3", "bf16"), ("zero3", "autocast"))
    ]
    orthogonalised = [(ds_config, *EXPERTS, *FP32, "--optimizer", "muon") for ds_config in ("zero2", "zero3")]
    for world_size in (2, 4):
        actual = train(tiny_set, tmp_path, world_size, *exact, *near, ("zero3", *EXPERTS, *FP32), *orthogonalised)
        for number, (name, losses) in enumerate(zip(exact, actual, strict=False)):
            assert losses == pytest.approx(reference, rel=1e-5), (world_size, name)
            assert torch.equal(biases_of(tmp_path / f"{world_size}-{number}"), biases), (world_size, name)
        for name, losses in zip(near, actual[len(exact) :], strict=False):
            assert losses == pytest.approx(reference, rel=0.02), (world_size, name)
        assert actual[-3] == pytest.approx(balanced, rel=1e-5)
        for losses in actual[-2:]:
            assert losses == pytest.approx(muon, rel=1e-4), world_size


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "size"), [(1, 1), (3, 1), (2, 2), (3, 2)])
def test_a_step_that_fp16_skips_leaves_the_biases(stage: int, size: int, tiny_set: Path, tmp_path: Path) -> None:
    """`size` ranks divide the experts. The first steps overflow; a bias then changed once in each of the others."""
    script = str(Path(test_loss_scaling.__file__))
    flags = (*BIASED, "--ds", test_loss_scaling.fp16_config(tmp_path, stage, initial_scale_power=24), "--lr", "3e-3")
    flags = (*flags, "--expert-parallel-size", str(size))
    run_ranks([script, *build_train_command(tiny_set, tmp_path / "run", *flags, "--steps", "20")[1:]], 2)
    steps = read_records(tmp_path / "run", "train")
    applied = 20 - steps[-1]["skipped_steps"]
    assert 0 < applied < 20 and steps[-1]["loss"] < steps[0]["loss"] - 0.2
    changes = biases_of(tmp_path / "run") / 0.001
    assert changes.abs().max() <= applied + 1e-3
    # An expert is above the mean load, below it or, seldom, at it.
    assert ((changes.round() - applied) % 2 == 0).float().mean() > 0.5
