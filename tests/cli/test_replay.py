from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmscale.checkpoint.inventory import find_checkpoints
from llmscale.cli.main import main
from llmscale.cli.replay import _config
from llmscale.evaluate.model_source import open_model
from llmscale.training.sample_stream import find_step_samples
from tests.conftest import build_train_command, prepare_bytes, read_losses, start_ranks

#: Repeated by the planted document: bytes that no other one has.
GARBAGE = "{~^}|#"
STEPS = 24


@pytest.fixture(scope="session")
def planted_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of about 190 samples, some of them of one document of garbage."""
    folder, draw = tmp_path_factory.mktemp("planted"), random.Random(0)
    texts = [" ".join(draw.choice(("fox", "dog", "jumps", "over")) for _ in range(20)) for _ in range(75)]
    texts[40] = GARBAGE * 30
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prepare_bytes(folder / "text.jsonl", folder / "set")
    return folder / "set"


@pytest.fixture(scope="session")
def run(planted_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank with all samples, in two starts with different learning rates. Do not change it."""
    folder = tmp_path_factory.mktemp("replayed") / "run"
    flags = ("--save-every", "8", "--keep-last", "9", "--ds", "zero2")
    for start in (("--steps", "18"), ("--steps", str(STEPS), "--lr", "2e-3")):
        job = start_ranks(build_train_command(planted_set, folder, *flags, *start), 1)
        output = job.wait()
        assert job.exit_codes == [0], output
    return folder


@pytest.fixture
def replay(llmscale: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def ask(run: Path, *words: object) -> dict[str, Any]:
        done = llmscale("replay", str(run), "--json", *map(str, words))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ask


def hashes(folder: Path) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def planted_step(run: Path) -> int:
    """The last step with a sample of nothing but garbage."""

    def is_planted(step: int) -> bool:
        windows = [sample.tokens for sample in find_step_samples(run, step).samples]
        return any(bytes(window.astype("uint8")).decode(errors="replace") in GARBAGE * 9 for window in windows)

    return max(step for step in range(9, STEPS + 1) if is_planted(step))


def test_a_step_is_rebuilt_to_the_bit_and_a_planted_document_is_first(run: Path, replay: Callable) -> None:
    before, step = hashes(run), planted_step(run)
    replayed = replay(run, "--step", step)
    assert replayed["loss"] == replayed["logged_loss"] == read_losses(run)[step]
    losses = replayed["losses"]
    assert losses[0]["text"] in GARBAGE * 9
    assert sorted(loss["sample"] for loss in losses) == sorted(
        s.sample_id for s in find_step_samples(run, step).samples
    )
    # Of the second start, from a checkpoint of the first: with the learning rate of the second.
    last = replay(run, "--step", STEPS - 1)
    assert last["checkpoint"].endswith("step-00000018") and last["loss"] == read_losses(run)[STEPS - 1]
    # What would have been, here and in the steps after.
    without = replay(run, "--step", step, "--without", losses[0]["sample"])
    rest = [loss["loss"] for loss in losses[1:]]
    assert without["loss"] == pytest.approx(sum(rest) / len(rest), rel=1e-6)
    assert [loss["loss"] for loss in without["losses"]] == rest
    assert hashes(run) == before


def test_losses_and_gradients_are_those_of_the_model(run: Path, replay: Callable) -> None:
    replayed = replay(run, "--step", 17, "--precision", "fp32")
    model = open_model(run / "checkpoints" / "step-00000016").load_model().train()
    samples = {sample.sample_id: sample.tokens for sample in find_step_samples(run, 17).samples}
    for loss in replayed["losses"]:
        tokens = torch.from_numpy(samples[loss["sample"]].astype("int64"))[None]
        assert loss["loss"] == pytest.approx(model(tokens[:, :-1], tokens[:, 1:]).item(), rel=1e-5)
    tokens = torch.stack([torch.from_numpy(window.astype("int64")) for window in samples.values()])
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    expected = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
    assert replayed["gradient_norms"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert list(replayed["gradient_norms"].values()) == sorted(replayed["gradient_norms"].values(), reverse=True)


def test_one_process_rebuilds_what_ranks_have_trained(planted_set: Path, tmp_path: Path, replay: Callable) -> None:
    flags = ("--steps", "6", "--save-every", "2", "--keep-last", "9", "--ds", "zero3", "--precision", "fp32")
    job = start_ranks(build_train_command(planted_set, tmp_path / "run", *flags), 2)
    job.wait()
    assert job.exit_codes == [0, 0]
    replayed = replay(tmp_path / "run", "--step", 6)
    assert replayed["trained_by"]["world_size"] == 2 and replayed["replayed_by"]["world_size"] == 1
    assert replayed["loss"] == pytest.approx(read_losses(tmp_path / "run")[6], rel=2e-7)


def test_a_step_of_a_start_with_minutes_has_the_schedule_that_it_set(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    state = folder / "checkpoints" / f"step-{STEPS:08}" / "state.json"
    values = json.loads(state.read_text())
    values["config"] |= {"minutes": 5, "steps": None}
    state.write_text(json.dumps(values))
    args = argparse.Namespace(run=folder, step=STEPS - 1, precision=None, ds=None, data=None)
    config = _config(args, find_checkpoints(folder), folder / "checkpoints" / "step-00000018", tmp_path / "new")
    assert (config.minutes, config.steps) == (None, STEPS)


def test_lines_name_the_sample_and_the_parameter(run: Path, llmscale: Callable) -> None:
    step = planted_step(run)
    lines = llmscale("replay", str(run), "--step", str(step), "--samples", "1").stdout.splitlines()
    assert "equal to the logged loss, bit for bit" in lines
    first = lines[next(place for place, line in enumerate(lines) if line.endswith("  sample")) + 1]
    assert GARBAGE in first
    assert any(line.endswith("wte.weight") for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--step", "25"), "steps 1 to 24"),
        (("--step", "20", "--without", "9999"), "--without 9999"),
        (("--step", "20", "--without", "nope:1"), "--without nope:1"),
    ],
)
def test_a_mistake_is_one_line(
    run: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(run), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_step_before_every_checkpoint_is_rebuilt_from_the_seed_to_the_bit(run: Path, replay: Callable) -> None:
    replayed = replay(run, "--step", 5)
    assert replayed["checkpoint"] is None
    assert replayed["loss"] == replayed["logged_loss"] == read_losses(run)[5]
    assert {loss["sample"] for loss in replayed["losses"]} == {s.sample_id for s in find_step_samples(run, 5).samples}


def test_a_run_with_initial_weights_begins_with_them_again(
    run: Path, planted_set: Path, tmp_path: Path, replay: Callable
) -> None:
    tuned = tmp_path / "tuned"
    for more in (("--steps", "4", "--init-from", str(run)), ("--steps", "6")):
        job = start_ranks(build_train_command(planted_set, tuned, "--ds", "zero2", "--keep-last", "1", *more), 1)
        output = job.wait()
        assert job.exit_codes == [0], output
    assert replay(tuned, "--step", 3, "--precision", "fp32")["loss"] == pytest.approx(read_losses(tuned)[3], rel=1e-2)


def test_flags_that_are_gone_are_said(run: Path, tmp_path: Path, llmscale: Callable) -> None:
    """The oldest checkpoint left is of the second start, which had another learning rate."""
    folder = shutil.copytree(run, tmp_path / "run")
    for step in (8, 16, 18):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08}")
    done = llmscale("replay", str(folder), "--step", "3", "--samples", "1")
    assert done.returncode == 0, done.stderr
    assert "with the flags of the start after step 18" in done.stdout


def test_what_can_be_replayed_is_said_where_the_beginning_is_too_far(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmscale.cli.replay._MOST_FROM_START", 4)
    assert main(["replay", str(run), "--step", "7"]) == 2
    assert "Steps 1 to 4 and 9 to 24 can be replayed, the first 4 from its beginning" in capsys.readouterr().err


def test_a_moved_dataset_is_named(
    run: Path, planted_set: Path, tmp_path: Path, tiny_set: Path, replay: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    for data, words in ((tiny_set, "is not what"), ("nosuch", "does not exist here")):
        assert main(["replay", str(run), "--step", "20", "--data", str(data)]) == 2
        assert f"--data {data} {words}" in capsys.readouterr().err
    there = planted_set.rename(tmp_path / "elsewhere")
    try:
        assert main(["replay", str(run), "--step", "20"]) == 2
        assert "--data" in capsys.readouterr().err
        assert replay(run, "--step", 18, "--data", there)["losses"]
    finally:
        there.rename(planted_set)
