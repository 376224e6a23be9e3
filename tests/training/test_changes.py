"""A continued run says what it does differently, a finished one how to go on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from llmscale.checkpoint.manifest import STATE_NAME
from llmscale.checkpoint.run_state import RunState
from llmscale.data.shards.manifest import load_manifest
from llmscale.errors import CheckpointError, ConfigError
from llmscale.training.inputs import as_plain
from llmscale.training.run_folder import save_run_description
from llmscale.training.start import Start as ResolvedStart
from llmscale.training.start import change_lines, check_space, finished_lines, hyperparameters, lines_at_end
from llmscale.training.stop_request import Launcher, launch_names
from tests.conftest import read_losses
from tests.runs_in_turn import train_in_turn
from tests.training.test_inputs import prepare
from tests.training.test_start import save

Start = Callable[..., ResolvedStart]


@pytest.fixture
def start(tiny_set: Path, tmp_path: Path) -> Start:
    """`start(*flags)`: a run of 60 steps unless the flags say otherwise."""

    def run(*flags: str, steps: int = 60) -> ResolvedStart:
        return prepare(tiny_set, tmp_path, f"--steps={steps}", *flags)

    return run


def saved(run: ResolvedStart, step: int) -> RunState:
    values, precision = hyperparameters(run), run.resolved.precision
    return RunState(step, 0, 0, 0, {}, precision, {}, {}, config=as_plain(run.config), hyperparameters=values)


def lines(state: RunState, run: ResolvedStart) -> list[str]:
    return list(change_lines(state, run, hyperparameters(run)))


def test_nothing_is_said_when_nothing_changed(start: Start) -> None:
    assert lines(saved(start("--lr=1e-3"), 20), start("--lr=1e-3")) == []
    assert lines(saved(start(), 20), start("--save-every=7", "--log-every=3", "--keep-last=5")) == []


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--lr=6e-4", "lr 0.001 -> 0.0006"),
        ("--weight-decay=0", "weight_decay 0.1 -> 0"),
        ("--schedule=linear", "schedule cosine -> linear; min_lr_frac 0.1 -> 0"),
        ("--precision=fp32", "precision bf16 -> fp32; communication_data_type bf16 -> fp32"),
        ("--activation=relu", "activation gelu_tanh -> relu"),
    ],
)
def test_every_hyperparameter_that_changed_is_listed(start: Start, flag: str, words: str) -> None:
    assert lines(saved(start(), 20), start(flag))[0] == f"changed since the checkpoint: {words}"


def test_an_accepted_change_of_the_identity_is_listed(start: Start, begun: Path) -> None:
    for flags, words in (
        (
            ("--global-batch-size=4", "--allow-changed=global_batch_size"),
            "micro_batch_size 4 -> 2; global_batch_size 8 -> 4",
        ),
        (("--seed=3", "--allow-changed=seed"), "seed 1337 -> 3"),
        (("--seed=3", "--lr=6e-4", "--allow-changed=seed"), "lr 0.001 -> 0.0006; seed 1337 -> 3"),
    ):
        run = start(*flags)
        assert run.state is not None
        assert lines(run.state, run)[0] == f"changed since the checkpoint: {words}"


def test_a_learning_rate_that_jumps_is_said(start: Start) -> None:
    reported = lines(saved(start(), 59), start(steps=120))
    assert reported[0] == "changed since the checkpoint: steps 60 -> 120; warmup_steps 0 -> 1; decay_steps 60 -> 120"
    assert reported[1].startswith("the learning rate goes from 1.02e-04 to 5.6")
    assert "at step 60, where the checkpoint's schedule had 1.01e-04" in reported[1]
    assert len(lines(saved(start("--schedule=constant"), 20), start("--schedule=constant", steps=120))) == 1


def test_a_finished_run_says_how_to_go_on(start: Start) -> None:
    run = start()
    assert list(finished_lines(saved(run, 59), run)) == []
    first, second = finished_lines(saved(run, 60), run)
    assert (
        first
        == "nothing to do: the checkpoint is at step 60 of 60. To continue, give more --steps, such as --steps 120"
    )
    assert "from 1.01e-04 to 5.5" in second and "--schedule constant --lr 1.01e-04" in second
    steady = start("--schedule=constant")
    assert len(list(finished_lines(saved(steady, 60), steady))) == 1
    shorter = start(steps=40)
    assert next(iter(finished_lines(saved(run, 60), shorter))).startswith("nothing to do: the checkpoint is at step 60")


@pytest.fixture
def begun(start: Start) -> Path:
    """The folder of a run of 60 steps at step 20, which leaves out its step 30."""
    return save(start("--skip-steps=30:31"), 20)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--n-layer=3",), "n_layer was 4 and is 3. Give what it was, or name another --run folder"),
        (("--vocab-size=600",), "vocab_size was 257 and is 600"),
        (("--optimizer=muon",), "optimizer was adamw and is muon"),
        (
            ("--seed=3", "--global-batch-size=4"),
            r"seed was 1337 and is 3 .*--allow-changed seed.* global_batch_size was 8 and is 4 ",
        ),
        (("--skip-steps=25:26", "--skip-steps=25:26"), "25:26 is given twice"),
        (("--skip-steps=61:62",), "the run ends at step 60"),
        (("--skip-steps=20:22",), "step 20 is done"),
    ],
)
def test_what_cannot_continue_is_refused_with_both_values(
    start: Start, begun: Path, flags: tuple[str, ...], words: str
) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=words):
        start(*flags)


def test_what_can_continue_passes(start: Start, begun: Path) -> None:
    for flags in (
        (),
        ("--lr=1e-4", "--activation=relu"),
        ("--seed=3", "--allow-changed=seed"),
        ("--skip-steps=31:32",),
        ("--skip-steps=30:31",),
        ("--skip-steps=30:31", "--skip-steps=31:32"),
    ):
        assert lines_at_end(start(*flags)) == []


@pytest.mark.parametrize("run_id", ["job-7", "none"])
def test_where_a_launch_begins_counts_once(
    start: Start, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_id: str
) -> None:
    """As torchrun repeats its command: its count of restarts says nothing."""
    run, other = begun.parent.parent, tmp_path / "other"
    monkeypatch.setattr("llmscale.training.stop_request.find_launchers", lambda: [Launcher(7, "torchrun", "99")])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    shutil.copytree(run, other)
    again = (f"--run={other}", f"--init-from={begun}", "--skip-steps=30:31")

    with pytest.raises(ConfigError, match="--init-from begins a new run, but"):
        start(*again)
    save_run_description(other, {}, {}, {}, is_new=True, launches=launch_names(os.environ))
    continued = start(*again)
    assert continued.first_step == 20 and continued.left_out == f"--init-from {begun}"
    assert start(f"--run={other}", f"--resume={begun}", "--skip-steps=30:31").left_out == f"--resume {begun}"
    assert start(f"--run={other}", "--skip-steps=30:31").left_out == ""
    # Nothing to continue from: it begins there again.
    for folder in (other / "checkpoints").iterdir():
        shutil.rmtree(folder)
    assert start(f"--run={other}", f"--init-from={begun}", "--skip-steps=30:31").first_step == 0
    # Other arguments, or another launch.
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "1"])
    assert start(f"--run={other}", f"--resume={begun}").left_out == ""


def test_another_launch_goes_back_again(
    start: Start, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun.parent.parent
    named = f"--resume={begun}"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    save_run_description(run, {}, {}, {}, is_new=True, launches=launch_names(os.environ))
    assert start(named).left_out == f"--resume {begun}"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-8")
    assert start(named).left_out == ""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    save_run_description(run, {}, {}, {}, is_new=True, launches=launch_names(os.environ))
    assert start(named).left_out == "", "the same command twice in one job"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert start(named).left_out == f"--resume {begun}"


def test_weights_of_another_shape_cannot_begin_a_run(start: Start, begun: Path, tmp_path: Path) -> None:
    other = ("--init-from", str(begun), f"--run={tmp_path / 'other'}")
    assert start(*other, "--optimizer=muon", "--seed=3").state is None
    with pytest.raises(CheckpointError, match=r"n_layer was 4 and is 3.*name another checkpoint"):
        start(*other, "--n-layer=3")


def test_a_finished_run_starts_nothing_unless_its_checkpoint_is_damaged(start: Start, begun: Path) -> None:
    lines = lines_at_end(start(steps=20))
    assert lines[0].startswith("nothing to do: the checkpoint is at step 20 of 20")
    assert "finished at step 20 of 20" in lines[-1]
    content = (begun / STATE_NAME).read_text()
    (begun / STATE_NAME).write_text(content.replace('"precision": "bf16"', '"precision": "fp32"'))
    assert lines_at_end(start(steps=20)) == []


def test_another_set_is_named_by_its_folder(start: Start, begun: Path, tiny_set: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(tiny_set, tmp_path / "moved")
    assert start(f"--data={moved}").warnings == (), "the same content elsewhere"
    manifest = load_manifest(moved)
    train = manifest.splits["train"]
    shards = (replace(train.shards[0], hash="0" * 16), *train.shards[1:])
    manifest = replace(manifest, splits={**manifest.splits, "train": replace(train, shards=shards)})
    (moved / "manifest.json").write_text(manifest.to_json())
    with pytest.raises(CheckpointError, match=f"data was {tiny_set} and is {moved} .*--allow-changed data"):
        start(f"--data={moved}")


@pytest.mark.parametrize(("save_every", "checkpoints"), [(0, 1), (10, 4), (30, 3)])
def test_a_disk_without_room_for_the_checkpoints_is_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch, save_every: int, checkpoints: int
) -> None:
    run = start(f"--save-every={save_every}")
    one = run.resolved.optimizer.state_bytes(run.resolved.shape.architecture)
    usage = partial(shutil._ntuple_diskusage, 0, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(checkpoints * one + (64 << 20) - 1))
    with pytest.raises(ConfigError, match=f"{checkpoints} checkpoint.* of .*Free some space"):
        check_space(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(checkpoints * one + (64 << 20)))
    check_space(run)


def test_the_same_command_again_says_so_and_succeeds(train_command: Callable, tmp_path: Path) -> None:
    command = partial(train_command, "--micro-batch-size", "1", "--ds", "ds_configs/zero1.json", "--steps")
    first, shorter, again, more = train_in_turn(
        [command("4"), command("3"), command("4"), command("6", "--lr", "5e-4", "--precision", "fp32")], world_size=2
    )
    assert "gradients: summed over 4 micro-steps in fp32, reduced over 2 ranks in bf16" in first
    assert "tiny-1m with n_layer 2, n_head 2, n_embd 32, the dataset's vocabulary of 257" in first
    assert "bf16_optimizer" not in first, "DeepSpeed's prints of its memory"
    assert "finished at step 4 of 3" in shorter
    assert "nothing to do: the checkpoint is at step 4 of 4. To continue, give more --steps" in again
    assert "changed since" not in again
    assert "changed since the checkpoint: steps 4 -> 6; lr 0.001 -> 0.0005; decay_steps 4 -> 6" in more
    assert "precision changes from bf16 to fp32" in more
    assert list(read_losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
