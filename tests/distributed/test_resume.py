"""A run stopped anywhere and continued elsewhere goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmscale.architecture.shape import SHAPE_KEYS
from llmscale.checkpoint.inventory import list_checkpoints
from llmscale.checkpoint.manifest import STATE_NAME, hash_file, load_manifest, save_manifest
from scripts.bench.resume.samples import read_samples
from tests.conftest import (
    REPOSITORY,
    assert_same_losses,
    build_train_command,
    flip_a_bit,
    forget_after,
    prepare_bytes,
    read_losses,
    refusal_of,
    run_ranks,
    words,
)

Train = Callable[..., str]
#: 20 steps in fp32, saving every fifth.
FLAGS = words("--precision fp32 --steps 20 --save-every 5 --keep-last 9 --lr 3e-3")


def flags_of(ds_config: str, *flags: str) -> tuple[str, ...]:
    return ("--ds", ds_config, *FLAGS, "--check-every", "1", *flags)


@pytest.fixture(scope="module")
def made_once(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of `train("zero1", 1)`, which many tests begin with."""
    run = tmp_path_factory.mktemp("made-once") / "run"
    run_ranks(build_train_command(tiny_set, run, *flags_of("zero1")), 1)
    return run


@pytest.fixture
def trained(made_once: Path, tmp_path: Path) -> Path:
    """tmp_path/run as `train("zero1", 1)` would have left it."""
    return Path(shutil.copytree(made_once, tmp_path / "run"))


@pytest.fixture
def train(train_command: Callable) -> Train:
    """`train(ds_config, world_size, *flags, expect=0)`: run or continue tmp_path/run with FLAGS; rank 0's output."""

    def run(ds_config: str, world_size: int, *flags: str, expect: int = 0) -> str:
        return run_ranks(train_command(*flags_of(ds_config, *flags)), world_size, expect=expect)

    return run


@pytest.fixture
def refused(train_command: Callable) -> Callable[..., str]:
    """`refused(*flags)`: why tmp_path/run does not continue so."""
    return lambda *flags: refusal_of(train_command(*flags_of("zero1", *flags)))


def test_goes_on_at_other_stages_and_world_sizes(train: Train, made_once: Path, trained: Path) -> None:
    straight, broken = made_once, trained
    for step, ds_config, world_size in ((5, "zero3", 1), (10, "zero2_offload", 4), (15, "zero3_offload", 2)):
        forget_after(broken, step)
        checkpoint = broken / "checkpoints" / f"step-{step:08d}"
        continues = f"continuing from {checkpoint}: step {step}, {step * 256:,} tokens seen"
        assert continues in train(ds_config, world_size)
    assert len(read_losses(straight)) == 20
    assert_same_losses(read_losses(broken), read_losses(straight))
    consumed, wanted = read_samples(broken), read_samples(straight)
    assert consumed.keys() == wanted.keys()
    assert all(np.array_equal(consumed[step], wanted[step]) for step in wanted)


def test_is_bit_equal_at_the_same_stage_and_world_size_with_dropout(train: Train, tmp_path: Path) -> None:
    flags = ("--dropout", "0.2", "--num-workers", "2", "--steps", "10")
    train("zero2", 2, *flags)
    straight = read_losses(tmp_path / "run")
    forget_after(tmp_path / "run", 5)
    train("zero2", 2, *flags)
    assert read_losses(tmp_path / "run") == straight


def test_changes_are_refused_or_allowed_with_their_price(train: Train, refused: Callable, trained: Path) -> None:
    forget_after(trained, 15)
    reason = refused("--no-shuffle")
    assert "order was {'shuffle': True} and is {'shuffle': False}" in reason
    assert "accept it with --allow-changed" in reason
    output = train("zero1", 1, "--seed", "7", "--allow-changed", "seed", "--allow-changed", "order")
    assert "WARNING: seed was 1337 and is 7 (the rest of the epoch has another order" in output


def _rewrite(folder: Path, change: Callable[[dict], object]) -> None:
    state = json.loads((folder / STATE_NAME).read_text())
    change(state)
    (folder / STATE_NAME).write_text(json.dumps(state))
    manifest = load_manifest(folder)
    files = tuple(hash_file(folder / STATE_NAME) if file.name == STATE_NAME else file for file in manifest.files)
    save_manifest(folder, dataclasses.replace(manifest, files=files))


def test_another_order_of_samples_is_refused_on_resume(refused: Callable, trained: Path) -> None:
    assert "num_canonical_nodes" in refused("--num-canonical-nodes", "6")
    for algorithm in ("feistel-blocks-1", "quantum-9"):
        folder = list_checkpoints(trained)[0]
        _rewrite(folder, lambda state, name=algorithm: state["identity"]["order"].update(algorithm=name))
        assert algorithm in refused()


def test_a_gpt2_of_before_there_were_other_blocks_goes_on(train: Train, trained: Path) -> None:
    """Its checkpoint says of the shape n_layer, n_head, n_embd, activation, dropout and bias."""
    straight = read_losses(trained)
    forget_after(trained, 15)

    def make_old(state: dict) -> None:
        new = set(SHAPE_KEYS) - {"n_layer", "n_head", "n_embd", "activation", "dropout", "bias"}
        for section in ("config", "hyperparameters"):
            for key in new:
                state[section].pop(key, None)
            state[section]["bias"] = True
        state["config"]["record_samples"] = True

    _rewrite(list_checkpoints(trained)[0], make_old)
    assert "changed since" not in train("zero1", 1)
    assert read_losses(trained) == straight


def test_a_checkpoint_of_0_1_0_continues_as_that_version_did(train_command: Callable, tmp_path: Path) -> None:
    """tests/checkpoint/run-0.1.0 is of two ranks at stage 1."""
    shutil.copytree(REPOSITORY / "tests" / "checkpoint" / "run-0.1.0", tmp_path / "run")
    flags = words("--n-layer 1 --n-head 2 --n-embd 8 --precision fp32 --lr 3e-3 --steps 8 --ds zero3")
    output = run_ranks(train_command(*flags), 1)
    assert "changed since" in output and "zero_stage 1 -> 3" in output
    expected = {5: 5.414912700653076, 6: 5.389516830444336, 7: 5.379880905151367, 8: 5.358550071716309}
    assert_same_losses(read_losses(tmp_path / "run"), expected)


def test_a_checkpoint_of_0_2_0_continues_as_that_version_did(train_command: Callable, tmp_path: Path) -> None:
    """tests/checkpoint/run-0.2.0 is of two ranks at stage 2, with Muon."""
    shutil.copytree(REPOSITORY / "tests" / "checkpoint" / "run-0.2.0", tmp_path / "run")
    flags = words("--n-layer 1 --n-head 2 --n-embd 8 --precision fp32 --lr 3e-3 --steps 8 --ds zero3 --optimizer muon")
    output = run_ranks(train_command(*flags), 1)
    assert "changed since" in output and "zero_stage 2 -> 3" in output
    expected = {5: 5.420226097106934, 6: 5.395824432373047, 7: 5.386139869689941, 8: 5.364698886871338}
    assert_same_losses(read_losses(tmp_path / "run"), expected)


def test_a_changed_global_batch_goes_on_behind_the_last_sample(train: Train, trained: Path) -> None:
    forget_after(trained, 15)
    train("zero1", 1, "--global-batch-size", "4", "--allow-changed", "global_batch_size", "--steps", "24")
    consumed = read_samples(trained)
    first = np.concatenate([consumed[step] for step in range(15)])
    rest = np.concatenate([consumed[step] for step in range(15, 24)])
    assert len(first) == 120
    assert len(rest) == 36
    assert not set(first) & set(rest), "a sample was seen twice within the first epoch"


def test_damaged_checkpoints_are_passed_over_but_never_all_of_them(train: Train, trained: Path) -> None:
    run = trained
    straight = read_losses(run)
    flip_a_bit(list_checkpoints(run)[0] / "__0_0.distcp")
    (run / "checkpoints" / ".step-00000099.partial").mkdir()
    output = train("zero1", 1)
    assert "WARNING: step-00000020 is damaged and passed over" in output
    assert "its content was altered" in output
    assert "continuing from" in output
    assert "removed .step-00000099.partial, left behind by an interrupted save" in output
    assert read_losses(run) == straight
    for folder in list_checkpoints(run):
        (folder / "manifest.json").unlink()
    assert "none of the 4 checkpoints in" in train("zero1", 1, expect=2)


def test_begins_from_the_weights_of_another_run(train: Train, trained: Path, tmp_path: Path) -> None:
    last = read_losses(trained)[20]
    output = train("zero3", 2, "--init-from", str(trained), "--run", str(tmp_path / "second"), "--steps", "2")
    assert "everything else starts at step 0" in output
    losses = read_losses(tmp_path / "second")
    assert set(losses) == {1, 2}
    assert abs(losses[1] - last) < 0.3, "the first loss is that of trained weights"
    damaged = list_checkpoints(trained)[0] / "__0_0.distcp"
    flip_a_bit(damaged)
    output = train("zero1", 1, "--init-from", str(trained), "--run", str(tmp_path / "third"), expect=2)
    assert f"--init-from {trained}: {damaged} does not match its hash" in output


def test_weights_of_another_tokenizer_are_refused(refused: Callable, trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    prepare_bytes(Path(json.__path__[0]), other, seq_len=16)
    reason = refused("--init-from", str(trained), "--data", str(other), "--run", str(tmp_path / "second"))
    assert "was prepared for seq_len 16, the model has positions for 32" in reason
