"""Runs that go back, as a user would have them: what is saved stays, and the next start goes on from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import find_checkpoints, list_checkpoints
from llmscale.checkpoint.manifest import step_of
from llmscale.cli.main import main
from llmscale.report.history import load_history
from tests.conftest import Ranks, flip_a_bit, read_losses, run_ranks, words

Train = Callable[..., str]


@pytest.fixture
def train(train_command: Callable[..., list[str]]) -> Train:
    """`train(*flags, world_size=1, expect=0)`: saves every fifth step and keeps one checkpoint; rank 0's output."""

    def run(*flags: str, world_size: int = 1, expect: int = 0) -> str:
        fixed = words("--precision fp32 --save-every 5 --keep-last 1 --warmup-steps 0 --schedule constant --lr 3e-3")
        return run_ranks(train_command(*fixed, *flags), world_size, expect=expect)

    return run


def saved(run: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(run)]


def abandoned(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in find_checkpoints(run).abandoned]


def test_what_a_run_saves_after_it_went_back_is_what_comes_next(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = run / "checkpoints"
    train("--steps", "20", "--keep-last", "9")
    first = read_losses(run)
    output = train("--steps", "13", "--resume", str(folder / "step-00000005"), "--lr", "1e-3")
    assert output.count("Abandoned: step-00000010 to step-00000020 (3, ") == 1
    assert f"saved {folder / 'step-00000013'} in" in output
    assert (saved(run), abandoned(run)) == ([13], [20, 15, 10])
    assert f"continuing from {folder / 'step-00000013'}" in train("--steps", "14", "--lr", "1e-3")
    assert saved(run) == [14]

    # A newest checkpoint that is damaged must not be the only one that is kept.
    flip_a_bit(folder / "step-00000014" / "__0_0.distcp")
    train("--steps", "14", expect=2)
    assert saved(run) == [14], "nothing is deleted by a start that fails"
    output = train("--steps", "16", "--resume", str(folder / "step-00000015"))
    # Step 10 of the first history counts again, and has expired.
    assert (saved(run), abandoned(run)) == ([16], [20, 14]), output

    # What is drawn is the line that leads to the last step: 1 to 15 of the first history, 16 of the third.
    losses = load_history(run).train
    assert losses == {step: loss for step, loss in first.items() if step <= 15} | {16: losses[16]}


def test_the_best_by_validation_loss_is_kept_and_a_run_goes_back_to_it(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    # A learning rate at which the loss rises from step 10 on.
    flags = ("--val-every", "5", "--val-samples", "8")
    train(*flags, "--steps", "10")
    train(*flags, "--steps", "20", "--lr", "0.3")
    assert saved(run) == [20, 10]
    assert (run / "checkpoints" / "best").read_text() == "step-00000010\n"
    losses = read_losses(run, "validation")
    assert min(losses, key=lambda step: losses[step]) == 10
    assert main(["checkpoint", "list", str(run)]) == 0
    newest, best = capsys.readouterr().out.splitlines()[1:]
    assert newest.endswith("<- latest") and best.endswith(f"<- best (loss {losses[10]:.4f})")
    assert main(["eval", str(run / "checkpoints" / "best"), "--val-samples", "8"]) == 0
    assert f"{losses[10]:.3f}" in capsys.readouterr().out
    output = train(*flags, "--steps", "12", "--resume", "best")
    assert f"continuing from {run / 'checkpoints' / 'step-00000010'}: step 10" in output
    assert (saved(run)[0], abandoned(run)) == (12, [20])


@pytest.mark.slow
@pytest.mark.parametrize("killed_before_a_save", [False, True])
def test_the_advice_after_a_nan_leads_to_a_finished_run(
    train: Train,
    ranks: Callable[..., Ranks],
    train_command: Callable[..., list[str]],
    tmp_path: Path,
    killed_before_a_save: bool,
) -> None:
    run = tmp_path / "run"
    train("--steps", "20", "--keep-last", "9")
    good = read_losses(run)
    output = train("--steps", "60", "--lr", "1e30", "--ds", "ds_configs/zero0.json", expect=2)
    advice = output.splitlines()[-1]
    assert f"--resume {run}/checkpoints/step-..." in advice
    back = ("--resume", str(run / "checkpoints" / "step-00000010"))
    if killed_before_a_save:
        job = ranks(train_command("--precision", "fp32", "--steps", "100000", "--save-every", "0", *back), 1)
        assert any("| loss" in line for line in job.processes[0].stdout or ())
        job.kill()
        back = ()
    output = train("--steps", "23", *back)
    assert f"continuing from {run}/checkpoints/step-00000010" in output
    assert (saved(run), abandoned(run)) == ([23], [20, 15])
    assert "finished at step 23 of 23" in train("--steps", "23")
    losses = load_history(run).train
    assert list(losses) == list(range(1, 24))
    assert {step: losses[step] for step in range(1, 11)} == {step: good[step] for step in range(1, 11)}
