"""A run computes the same at any number of ranks, those that do not divide its batch included: fillers count nothing.

Every step also checks that the ranks have exactly the global batch (--check-every 1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.conftest import build_train_command, read_losses, read_records, words
from tests.runs_in_turn import train_in_turn

#: Values of a logged step that no number of ranks may change.
COMPARED = words(
    "tokens_seen loss z_loss grad_norm skipped_steps router_loss router_entropy tokens_moved "
    "expert_load_max expert_load_mean expert_load_min"
)
#: Largest relative difference: sums in another order, in fp32.
TOLERANCE = 2e-6
EXPERTS = words("--num-experts 4 --expert-width 40 --precision fp32 --router-z-loss 1e-3")
#: Runs by name: a ds_config and flags. The batch has 8 sequences, if the flags do not say otherwise.
CASES: dict[str, tuple[str, ...]] = {
    "mixture": ("zero2", "--data", "MIX", "--z-loss", "1e-2"),
    "stage 0": ("zero0",),
    "stage 1": ("zero1", "--z-loss", "1e-2", "--activation-checkpointing", "full"),
    "stage 3": ("zero3", "--micro-batch-size", "2", "--z-loss", "1e-2"),
    "one micro-step": ("zero2_offload", "--micro-batch-size", "4"),
    "offloaded parameters": ("zero3_offload", "--micro-batch-size", "1"),
    # Eight steps of 2 sequences, then as many more at a time: fewer than the ranks.
    "ramp": ("zero2", "--batch-ramp-from", "2", "--batch-ramp-tokens", "512", "--steps", "16"),
    "ramp at stage 1": ("zero1", "--batch-ramp-from", "1", "--batch-ramp-tokens", "256", "--steps", "16"),
    "growing sequences": ("zero1", "--seq-len-ramp-from", "8", "--seq-len-ramp-tokens", "512", "--z-loss", "1e-2"),
    "muon": ("zero1", "--optimizer", "muon"),
    "experts": ("zero2", *EXPERTS, "--balance-loss", "0.02"),
    "router bias": ("zero3", *EXPERTS, "--router-bias", "--router-bias-speed", "0.01"),
    "offloaded experts": ("zero2_offload", *EXPERTS, "--micro-batch-size", "4", "--balance-loss", "0.02"),
}
#: Runs of 6 ranks, by name; their other halves are of 1 rank, without the flag.
DIVIDED = {
    "divided sequences": ("zero2", "--z-loss", "1e-2", "--sequence-parallel-size", "2"),
    "divided sequences at stage 3": ("zero3", "--z-loss", "1e-2", "--sequence-parallel-size", "2"),
    "divided experts": ("zero2", *EXPERTS, "--balance-loss", "0.02", "--expert-parallel-size", "2"),
    "divided experts at stage 3": ("zero3", *EXPERTS, "--num-experts", "6", "--expert-parallel-size", "3"),
    "both": ("zero1", *EXPERTS, "--sequence-parallel-size", "2", "--expert-parallel-size", "2"),
}


@pytest.fixture(scope="module")
def mix(tiny_set: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mix") / "mix.yaml"
    path.write_text(f"sets: {{words: {tiny_set}, digits: {digits}}}\nstages: [{{weights: {{words: 2, digits: 1}}}}]\n")
    return path


def build_command(data: Path, mix: Path, folder: Path, case: Sequence[str]) -> list[str]:
    ds_config, *flags = case
    fixed = words("--steps 6 --lr 1e-3 --save-every 0 --precision fp32 --val-every 3 --check-every 1 --n-head 2")
    flags = [str(mix) if word == "MIX" else word for word in flags]
    return build_train_command(data, folder, "--ds", ds_config, *fixed, *flags)


def train(cases: Mapping[str, Sequence[str]], world_size: int, folder: Path, data: Path, mix: Path) -> dict[str, Path]:
    """Train every case on as many ranks; return their run folders."""
    runs = {name: folder / f"{name.replace(' ', '-')}-on-{world_size}" for name in cases}
    train_in_turn([build_command(data, mix, runs[name], case) for name, case in cases.items()], world_size)
    return runs


def values_of(run: Path) -> dict[tuple[str, int, str], float]:
    """Return every number that is compared, by kind of record, step and name; of a step logged twice, the later one."""
    values: dict[tuple[str, int, str], float] = {}
    for record in read_records(run, "train", "validation"):
        kind, known = record["kind"], {"loss": record["loss"], "bits": record.get("bits_per_byte")}
        if kind == "train":
            known = {name: record.get(name) for name in COMPARED}
        known |= record.get("loss_by_set") or {}
        values |= {(kind, record["step"], name): value for name, value in known.items() if value is not None}
    return values


def check_equal(run: Path, reference: Path) -> None:
    values, expected = values_of(run), values_of(reference)
    assert values.keys() == expected.keys()
    pairs = {key: (values[key], expected[key]) for key in expected}
    differ = {key: pair for key, pair in pairs.items() if pair[0] != pytest.approx(pair[1], TOLERANCE)}
    assert not differ, f"{run.name}: {differ}"


def test_three_ranks_train_as_one(tiny_set: Path, mix: Path, tmp_path: Path) -> None:
    cases = {name: CASES[name] for name in ("mixture", "router bias")}
    references = train(cases, 1, tmp_path, tiny_set, mix)
    for name, run in train(cases, 3, tmp_path, tiny_set, mix).items():
        check_equal(run, references[name])
    values = values_of(references["mixture"])
    assert {("train", 6, "z_loss"), ("train", 6, "digits"), ("validation", 3, "digits")} <= values.keys()
    assert ("train", 6, "tokens_moved") in values_of(references["router bias"])
    config = json.loads((tmp_path / "mixture-on-3" / "ds_config.json").read_text())
    assert config["train_batch_size"] == 9, "as DeepSpeed counts, with a filler"


@pytest.mark.slow
def test_every_setting_on_one_to_five_ranks(tiny_set: Path, mix: Path, tmp_path: Path) -> None:
    references = train(CASES, 1, tmp_path, tiny_set, mix)
    for world_size in (2, 3, 4, 5):
        for name, run in train(CASES, world_size, tmp_path, tiny_set, mix).items():
            check_equal(run, references[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [(("--overfit-batch", "4"), TOLERANCE), (("--precision", "bf16"), 2e-4), (("--precision", "autocast"), 2e-4)],
)
def test_an_overfit_check_and_bf16_on_three_ranks(
    tiny_set: Path, tmp_path: Path, flags: tuple[str, ...], tolerance: float
) -> None:
    fixed = words("--steps 20 --lr 1e-3 --precision fp32 --n-head 2 --check-every 1")
    losses = []
    for world_size in (1, 3):
        command = build_train_command(tiny_set, tmp_path / str(world_size), *fixed, *flags)
        for flag in ("--global-batch-size", "--val-every") if "--overfit-batch" in flags else ():
            place = command.index(flag)
            del command[place : place + 2]  # it has no effect there, and is refused
        train_in_turn([command], world_size)
        losses.append(read_losses(tmp_path / str(world_size)))
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)


@pytest.mark.slow
def test_three_groups_of_ranks_train_as_one_rank(tiny_set: Path, mix: Path, tmp_path: Path) -> None:
    """Neighbours divide sequences or experts, and 8 samples are not divided over 3 groups, or 6 ranks."""
    divides = ("--sequence-parallel-size", "--expert-parallel-size")
    complete = {
        name: [word for before, word in zip(("", *case), case, strict=False) if not {before, word} & {*divides}]
        for name, case in DIVIDED.items()
    }
    references = train(complete, 1, tmp_path, tiny_set, mix)
    for name, run in train(DIVIDED, 6, tmp_path, tiny_set, mix).items():
        check_equal(run, references[name])


@pytest.mark.slow
@pytest.mark.parametrize("ds_config", ["zero1", "zero2", "zero3_offload"])
@pytest.mark.parametrize("worlds", [(2, 3, 2), (3, 5, 1), (5, 2, 4)])
def test_a_run_moves_between_numbers_of_ranks(
    tiny_set: Path, mix: Path, tmp_path: Path, ds_config: str, worlds: tuple[int, ...]
) -> None:
    flags = (ds_config, "--schedule", "constant", "--warmup-steps", "1", "--micro-batch-size", "1", "--data", "MIX")
    (reference,) = train({"straight": (*flags, "--steps", "9")}, 1, tmp_path, tiny_set, mix).values()
    moved = tmp_path / "moved"
    for until, world_size in zip(("3", "6", "9"), worlds, strict=True):
        case = (*flags, "--steps", until, "--save-every", "3")
        train_in_turn([build_command(tiny_set, mix, moved, case)], world_size)
    check_equal(moved, reference)
