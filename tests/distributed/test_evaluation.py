"""Evaluation in training: the same results at every ZeRO stage and number of ranks, which training does not notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import read_losses, read_records, run_ranks, words
from tests.evaluate.made_up_items import write_items

STEPS = 4
FLAGS = words(
    f"--steps {STEPS} --lr 3e-3 --precision fp32 --save-every 0 --val-every 2 --val-samples 9 --micro-batch-size 2"
)
FORMATS = {"hellaswag": "hellaswag", "multiple_choice": "choice", "likelihood": "likelihood", "text": "text"}
Train = Callable[..., tuple[Path, str]]


@pytest.fixture
def train(train_command: Callable, tmp_path: Path) -> Train:
    """`train(stage, world_size, *flags)`: the run folder, and what its main rank printed."""

    def run(stage: int, world_size: int, *flags: str) -> tuple[Path, str]:
        folder = tmp_path / f"zero{stage}-{world_size}-{len(flags)}"
        command = train_command("--ds", f"zero{stage}", *FLAGS, "--run", str(folder), *flags)
        return folder, run_ranks(command, world_size, timeout_s=600)

    return run


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    """Flags. The dataset's model sees 32 bytes: few items are as short."""
    paths = write_items(tmp_path, count=7)
    specs = [f"{name}={paths[file]}" for name, file in FORMATS.items()]
    # One flag: the command's helper keeps the last of a flag that stands there twice.
    return ["--eval-every", "2", "--eval-tasks", ",".join(specs)]


def evaluations(run: Path) -> dict[tuple[int, str], dict[str, float]]:
    return {(record["step"], record["task"]): record["values"] for record in read_records(run, "evaluation")}


def check_same(runs: list[Path]) -> None:
    first, *others = [evaluations(run) for run in runs]
    assert {step for step, _ in first} == {2, 4}
    assert {task for _, task in first} == {"hellaswag", "choice", "likelihood", "text"}
    for other in others:
        assert other.keys() == first.keys()
        for key, values in first.items():
            assert other[key] == pytest.approx(values, rel=1e-5), key


def test_sharded_and_whole_weights_have_the_same_results_and_training_does_not_notice(
    train: Train, tasks: list[str]
) -> None:
    complete, output = train(0, 1, *tasks)
    sharded, _ = train(3, 2, *tasks, "--sequence-parallel-size", "2")
    check_same([complete, sharded])
    counts = {record["task"]: record["num_items"] for record in read_records(complete, "evaluation")}
    assert set(counts.values()) == {7}
    assert "| hellaswag | acc " in output
    assert "evaluation every 2 steps on hellaswag (7 items), " in output
    samples = read_records(sharded, "sample")
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [(2, "The "), (4, "The ")]
    assert all(sample["text"] for sample in samples)
    assert all(record["bits_per_byte"] > 0 for record in read_records(complete, "validation"))
    # As without evaluations, where stages and numbers of ranks agree so, too.
    assert read_losses(sharded) == pytest.approx(read_losses(complete), abs=1e-5)


@pytest.mark.slow
def test_results_are_the_same_at_every_stage_and_number_of_ranks(train: Train, tasks: list[str]) -> None:
    check_same([train(stage, world_size, *tasks)[0] for stage in range(4) for world_size in (1, 2, 4)])


@pytest.mark.slow
def test_results_are_the_same_compiled_or_not(
    train: Train, tasks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    check_same([train(stage, 2, *tasks, *more)[0] for stage in (2, 3) for more in ((), ("--compile", "on"))])
