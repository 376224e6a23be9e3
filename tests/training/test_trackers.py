"""Trackers: failures, TensorBoard files read back, wandb in its offline mode. Run as a script, this file is a rank."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmscale.config.run_arguments import parse_run_config
from llmscale.errors import ConfigError
from llmscale.training import metrics
from llmscale.training.metrics import FaultTolerantTracker, Tracker, start_tensorboard, start_wandb
from tests.conftest import read_losses


class Flaky(Tracker):
    """Fails at steps 2 to 4, and at the end."""

    name = "flaky"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, values: Mapping[str, float], step: int) -> None:
        if 2 <= step <= 4:
            raise RuntimeError("its server\nis gone")
        self.steps.append(step)

    def finish(self) -> None:
        raise OSError(28, "No space left on device")


def test_what_fails_is_said_once_and_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    inner = Flaky()
    tracker = FaultTolerantTracker(inner)
    for step in range(1, 7):
        tracker.log({"train/loss": 1.0}, step)
    tracker.finish()
    assert inner.steps == [1, 5, 6]
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(":")[1].split(". ")[0].strip() for line in lines] == [
        "flaky failed at step 2",
        "flaky works again",
        "flaky could not finish",
    ]
    assert "its server is gone" in lines[0]
    assert "3 records of steps 2 to 4" in lines[1]


def read_curves(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard draws: every file in turn, and a start drops what came before it of its step and later."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    curves: dict[str, dict[int, float]] = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = event_pb2.Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.session_log.status == event_pb2.SessionLog.START:
                curves = {name: {s: v for s, v in points.items() if s < event.step} for name, points in curves.items()}
            for value in event.summary.value:
                curves.setdefault(value.tag, {})[event.step] = value.simple_value
    return curves


def test_a_start_that_goes_back_drops_what_came_later(tmp_path: Path) -> None:
    first = start_tensorboard(tmp_path, first_step=0)
    for step in range(1, 11):
        first.log({"train/loss": float(step)}, step)
    first.roll_back(6)
    for step in range(7, 9):
        first.log({"train/loss": 100.0 + step}, step)
    first.finish()
    again = start_tensorboard(tmp_path, first_step=8)
    again.log({"train/loss": 200.0}, 9)
    again.finish()
    assert read_curves(tmp_path / "tensorboard") == {
        "train/loss": {**{step: float(step) for step in range(1, 7)}, 7: 107.0, 8: 108.0, 9: 200.0}
    }


def test_a_resumed_run_goes_on_with_the_same_curves(ranks: Callable, train_command: Callable, tmp_path: Path) -> None:
    flags = ("--tensorboard", "--precision", "fp32", "--val-every", "2")
    for steps in ("4", "6"):
        job = ranks(train_command(*flags, "--steps", steps), 1)
        output = job.wait()[0]
        assert job.exit_codes == [0], output
    curves = read_curves(tmp_path / "run/tensorboard")
    assert curves["train/loss"] == pytest.approx(read_losses(tmp_path / "run"))
    assert sorted(curves["validation/loss"]) == [2, 4, 6]
    assert sorted(curves["train/lr"]) == list(range(1, 7))


def test_a_missing_writer_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"--tensorboard needs tensorboardX: `pip install -e .*\[tensorboard\]"):
        start_tensorboard(tmp_path, first_step=0)


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be started.*Not a directory"):
        start_tensorboard(tmp_path, first_step=0)


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        ((), {}, ("llmscale", "run", None)),
        ((), {"WANDB_PROJECT": "mine", "WANDB_NAME": "first", "WANDB_DIR": "/wandb"}, ("mine", "first", "/wandb")),
        (
            ("--wandb-project", "p", "--wandb-name", "n"),
            {"WANDB_PROJECT": "mine", "WANDB_NAME": "first"},
            ("p", "n", None),
        ),
    ],
)
def test_variables_of_wandb_count_unless_a_flag_says_otherwise(
    flags: tuple[str, ...],
    variables: dict[str, str],
    expected: tuple[str, str, str | None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    given: dict[str, object] = {}

    def init(**words: object) -> SimpleNamespace:
        given.update(words)
        return SimpleNamespace(id="id")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = parse_run_config(["--data", "d", "--run", str(tmp_path / "run"), "--model", "tiny-1m", "--wandb", *flags])
    metrics.start_trackers(config, dict, first_step=0, wandb_run_id=None)
    project, name, folder = expected
    assert (given["project"], given["name"], given["dir"]) == (project, name, folder or str(tmp_path / "run"))
    assert "entity" not in given, "wandb reads WANDB_ENTITY itself"


@pytest.mark.slow
def test_offline_runs_leave_their_files_in_the_run_folder_and_continue_under_one_id(
    ranks: Callable, train_command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    flags = ("--wandb", "--wandb-name", "a name", "--steps", "3", "--val-every", "3", "--notify", "true a-token")
    job = ranks([__file__, *train_command(*flags)[1:]], 2)
    outputs = job.wait()
    assert job.exit_codes == [0, 0], outputs
    assert "wandb imported: True" in outputs[0]
    assert "wandb imported: False" in outputs[1], "only the main rank logs"
    files = list(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1
    content = files[0].read_bytes()
    for word in (b"train/loss", b"train/tokens_per_second", b"validation/loss", b"a name"):
        assert word in content
    sent = [file for file in run.glob("wandb/offline-run-*/**/*") if file.is_file() and "logs" not in file.parts]
    for file in sent:
        for word in ("a-token", str(tmp_path), str(Path.cwd())):
            assert word.encode() not in file.read_bytes(), f"{word} leaves the machine in {file.name}"
    state = json.loads((run / "checkpoints/step-00000003/state.json").read_text())
    assert state["wandb_run_id"] == files[0].stem.removeprefix("run-")


def test_without_the_flag_wandb_is_not_even_imported(ranks: Callable, train_command: Callable, tmp_path: Path) -> None:
    job = ranks([__file__, *train_command("--steps", "1")[1:]], 1)
    output = job.wait()[0]
    assert job.exit_codes == [0], output
    assert "wandb imported: False" in output
    assert not (tmp_path / "run" / "wandb").exists()


def test_a_missing_wandb_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"--wandb needs wandb: `pip install -e .*\[train\]"):
        start_wandb(tmp_path, project="p", name="n", config={}, run_id=None)


def test_without_an_account_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError) as raised:
        start_wandb(tmp_path, project="p", name="n", config={}, run_id=None)
    assert "No API key configured. Use `wandb login` to log in." in str(raised.value)
    assert "WANDB_MODE=offline" in str(raised.value)
    assert "\n" not in str(raised.value)


if __name__ == "__main__":
    from llmscale.train import main

    status = main()
    print("wandb imported:", "wandb" in sys.modules, flush=True)
    sys.exit(status)
