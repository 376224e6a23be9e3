"""Event files, read back with TensorBoard's own framing: length, its checksum, record, its checksum."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.training.trackers.tensorboard_files import start_tensorboard
from tests.conftest import read_losses


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
    first.go_back(6)
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
