"""A mix on real ranks: the same samples whatever the ranks and restarts, and each set's loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from llmscale.cli.main import main
from llmscale.data.mixture import TrainingSets
from llmscale.training.sample_stream import find_step_samples
from scripts.bench.resume.samples import read_samples
from tests.conftest import read_records, run_ranks, words

STEPS, BATCH = 8, 8


@pytest.fixture
def mix(tiny_set: Path, digits: Path, tmp_path: Path) -> Path:
    """The tiny set, and one of other letters; the proportions change after step 4."""
    path = tmp_path / "mix.yaml"
    path.write_text(
        f"sets: {{words: {tiny_set}, digits: {digits}}}\n"
        "stages: [{until: 0.5, weights: {words: 3, digits: 1}}, {weights: {words: 1, digits: 3}}]\n"
    )
    return path


@pytest.fixture
def train(train_command: Callable, mix: Path) -> Callable[..., str]:
    def run(folder: Path, world_size: int, *flags: str) -> str:
        fixed = words(f"--steps {STEPS} --precision fp32 --check-every 1 --save-every 3 --val-every 8")
        return run_ranks(train_command("--data", str(mix), "--run", str(folder), *fixed, *flags), world_size)

    return run


def records(run: Path, kind: str) -> dict[int, dict]:
    return {record["step"]: record for record in read_records(run, kind)}


def offsets(sets: TrainingSets) -> dict[str, int]:
    """What is added to a set's own ids where all sets count together."""
    sizes = [location.manifest.splits["train"].num_samples for location in sets.locations]
    return dict(zip(sets.names, (0, *accumulate(sizes)), strict=False))


def test_the_same_samples_and_losses_at_any_ranks_and_through_a_restart(
    train: Callable, mix: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    train(one, 1)
    train(two, 2, "--steps", str(STEPS), "--keep-last", "9")
    # Back to step 3, in the first stage, and on through the change with sequences divided and another stage of ZeRO.
    elsewhere = ("--ds", "ds_configs/zero3.json", "--sequence-parallel-size", "2")
    again = train(two, 2, "--resume", str(two / "checkpoints" / "step-00000003"), *elsewhere)
    assert "continuing from" in again
    expected, got = read_samples(one), read_samples(two)
    assert list(expected) == list(got) == list(range(STEPS))
    assert all(np.array_equal(expected[step], got[step]) for step in expected)
    for step, record in records(one, "train").items():
        other = records(two, "train")[step]
        assert record["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert record["loss_by_set"] == pytest.approx(other["loss_by_set"], abs=1e-4)
        share = 0.75 if step <= 4 else 0.25
        by_set = record["loss_by_set"]
        assert share * by_set["words"] + (1 - share) * by_set["digits"] == pytest.approx(record["loss"], abs=1e-5)
    losses = [records(run, "validation")[STEPS] for run in (one, two)]
    # Of one process, with each set's part of the run.
    result = tmp_path / "result.json"
    assert main(["eval", str(two), "--val-samples", "256", "--json", str(result)]) == 0
    evaluated = json.loads(result.read_text())["validation"]
    assert evaluated["num_samples"] == losses[1]["num_samples"]
    assert evaluated["loss"] == pytest.approx(losses[1]["loss"], abs=1e-4)
    mix.unlink()
    for step in (1, 5, STEPS):
        actual = find_step_samples(two, step)
        ids = sorted(sample.sample_id + offsets(actual.sets)[sample.set_name] for sample in actual.samples)
        assert ids == expected[step - 1].tolist()
    assert losses[0]["loss_by_set"] == pytest.approx(losses[1]["loss_by_set"], abs=1e-4)
    assert set(losses[0]["loss_by_set"]) == {"words", "digits"}


def test_steps_that_are_left_out_stay_left_out(train: Callable, tiny_set: Path, tmp_path: Path) -> None:
    complete, cut = tmp_path / "whole", tmp_path / "cut"
    train(complete, 1, "--data", str(tiny_set))
    train(cut, 2, "--data", str(tiny_set), "--steps", "4", "--skip-steps", "3:5")
    output = train(cut, 1, "--data", str(tiny_set), "--steps", "6")
    assert "left out: steps 3:5" in output, "the run keeps it"
    seen, remaining = read_samples(complete), read_samples(cut)
    assert sorted(sample.sample_id for sample in find_step_samples(cut, 3).samples) == remaining[2].tolist()
    assert [remaining[step].tolist() for step in range(6)] == [seen[step].tolist() for step in (0, 1, 4, 5, 6, 7)]
