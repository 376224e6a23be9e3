"""A continued run says what it does differently, a finished one how to go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from llmscale.checkpoint.run_state import RunState
from llmscale.training.changes import change_lines, finished_lines, hyperparameters
from llmscale.training.run_inputs import PreparedRun, as_plain
from tests.runs_in_turn import train_in_turn
from tests.training.test_run_inputs import prepare

Start = Callable[..., PreparedRun]


@pytest.fixture
def start(tiny_set: Path, tmp_path: Path) -> Start:
    """`start(*flags)`: a run of 60 steps unless the flags say otherwise."""

    def run(*flags: str, steps: int = 60) -> PreparedRun:
        return prepare(tiny_set, tmp_path, f"--steps={steps}", *flags)

    return run


def saved(run: PreparedRun, step: int) -> RunState:
    values, precision = hyperparameters(run), run.resolved.precision
    return RunState(step, 0, 0, 0, {}, precision, {}, {}, config=as_plain(run.config), hyperparameters=values)


def lines(state: RunState, run: PreparedRun) -> list[str]:
    return list(change_lines(state, run, hyperparameters(run)))


def test_old_autocast_states_exchanged_gradients_in_fp32(start: Start) -> None:
    run = start("--precision=autocast")
    state = saved(run, 20)
    assert lines(state, run) == []
    del state.hyperparameters["communication_data_type"]
    assert lines(state, run) == ["changed since the checkpoint: communication_data_type fp32 -> bf16"]


def test_nothing_is_said_when_nothing_changed(start: Start) -> None:
    assert lines(saved(start("--lr=1e-3"), 20), start("--lr=1e-3")) == []
    assert lines(saved(start(), 20), start("--save-every=7", "--log-every=3", "--keep-last=5")) == []


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--lr=6e-4", "lr 0.001 -> 0.0006"),
        ("--weight-decay=0", "weight_decay 0.1 -> 0"),
        ("--beta2=0.99", "beta2 0.95 -> 0.99"),
        ("--eps=1e-6", "eps 1e-08 -> 1e-06"),
        ("--gradient-clipping=0.5", "gradient_clipping 1 -> 0.5"),
        ("--dropout=0.1", "dropout 0 -> 0.1"),
        ("--document-mask", "document_mask False -> True"),
        ("--schedule=linear", "schedule cosine -> linear; min_lr_frac 0.1 -> 0"),
        ("--warmup-steps=3", "warmup_steps 0 -> 3"),
        ("--precision=fp32", "precision bf16 -> fp32; communication_data_type bf16 -> fp32"),
        ("--activation=relu", "activation gelu_tanh -> relu"),
        ("--micro-batch-size=1", "micro_batch_size 4 -> 1"),
        ("--activation-checkpointing=full", "activation_checkpointing none -> full"),
    ],
)
def test_every_hyperparameter_that_changed_is_listed(start: Start, flag: str, words: str) -> None:
    assert lines(saved(start(), 20), start(flag))[0] == f"changed since the checkpoint: {words}"


def test_a_learning_rate_that_jumps_is_said(start: Start) -> None:
    found = lines(saved(start(), 59), start(steps=120))
    assert found[0] == "changed since the checkpoint: steps 60 -> 120; warmup_steps 0 -> 1; decay_steps 60 -> 120"
    assert found[1].startswith("the learning rate goes from 1.02e-04 to 5.6")
    assert "at step 60, where the checkpoint's schedule had 1.01e-04" in found[1]
    assert len(lines(saved(start("--schedule=constant"), 20), start("--schedule=constant", steps=120))) == 1


def test_a_checkpoint_without_hyperparameters_is_compared_by_what_the_user_said(start: Start) -> None:
    old = replace(saved(start(), 20), hyperparameters={})
    assert lines(old, start()) == []
    assert lines(old, start("--dropout=0.1", "--lr=6e-4")) == [
        "changed since the checkpoint: lr None -> 0.0006; dropout 0 -> 0.1"
    ]


def test_a_finished_run_says_how_to_go_on(start: Start) -> None:
    run = start()
    assert list(finished_lines(saved(run, 59), run)) == []
    first, second = finished_lines(saved(run, 60), run)
    assert (
        first == "nothing to do: the checkpoint is at step 60 of 60. To go on, give more --steps, such as --steps 120"
    )
    assert "from 1.01e-04 to 5.5" in second and "--schedule constant --lr 1.01e-04" in second
    steady = start("--schedule=constant")
    assert len(list(finished_lines(saved(steady, 60), steady))) == 1
    shorter = start(steps=40)
    assert next(iter(finished_lines(saved(run, 60), shorter))).startswith("nothing to do: the checkpoint is at step 60")


def test_the_same_command_again_says_so_and_succeeds(train_command: Callable) -> None:
    command = partial(train_command, "--micro-batch-size", "1", "--ds", "ds_configs/zero1.json", "--steps")
    first, shorter, again, more = train_in_turn(
        [command("4"), command("3"), command("4"), command("6", "--lr", "5e-4")], world_size=2
    )
    assert "gradients: summed over 4 micro-steps in fp32, reduced over 2 ranks in bf16" in first
    assert "tiny-1m with n_layer 2, n_head 2, n_embd 32, the data set's vocabulary of 257" in first
    assert "bf16_optimizer" not in first, "DeepSpeed's prints of its memory"
    assert "finished at step 4 of 3" in shorter
    assert "nothing to do: the checkpoint is at step 4 of 4. To go on, give more --steps" in again
    assert "changed since" not in again
    assert "changed since the checkpoint: lr 0.001 -> 0.0005; steps 4 -> 6; decay_steps 4 -> 6" in more
