"""Saves are whole or not there, and a failed one costs nothing but a warning."""

from __future__ import annotations

import resource
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmscale.checkpoint import save as save_module
from llmscale.checkpoint.load import load_full_weights
from llmscale.checkpoint.manifest import checkpoints_folder, find_damage, list_checkpoints, read_latest


def test_what_is_saved_is_what_is_loaded(save_steps: Callable, tmp_path: Path) -> None:
    (line,) = save_steps(3)
    assert line.startswith(f"saved {tmp_path / 'run' / 'checkpoints' / 'step-00000003'} in ")
    weights = load_full_weights(list_checkpoints(tmp_path / "run")[0])
    assert torch.equal(weights["w"], torch.arange(1000, dtype=torch.float32) + 3)


def test_background_saves_follow_each_other(save_steps: Callable, tmp_path: Path) -> None:
    lines = save_steps(1, 2, 3, in_background=True)
    assert len(lines) == 3
    checkpoints = list_checkpoints(tmp_path / "run")
    assert [path.name for path in checkpoints] == ["step-00000003", "step-00000002", "step-00000001"]
    assert all(find_damage(path) is None for path in checkpoints)


def test_the_same_step_is_replaced_as_a_whole(save_steps: Callable, tmp_path: Path) -> None:
    save_steps(5)
    (list_checkpoints(tmp_path / "run")[0] / "state.json").unlink()
    save_steps(5)
    assert find_damage(list_checkpoints(tmp_path / "run")[0]) is None


def test_a_full_disk_is_noticed_before_writing(
    save_steps: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 99, 1))
    (line,) = save_steps(2)
    assert line.startswith("WARNING: the checkpoint of step 2 was NOT saved: rank 0: ")
    assert "0.00 GiB free and 0.06 GiB are needed" in line
    _only_step_1_is_left(tmp_path / "run")


def test_a_write_that_fails_half_way_leaves_nothing(
    save_steps: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses to let any file grow beyond 4 kB, as a full disk or a quota would."""
    save_steps(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        (line,) = save_steps(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert line.startswith("WARNING: the checkpoint of step 2 was NOT saved: ")
    assert "older checkpoints are untouched" in line
    _only_step_1_is_left(tmp_path / "run")
    (line,) = save_steps(2)
    assert line.startswith("saved ")


def test_a_rank_without_the_shared_folder_says_so(
    save_steps: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "_VISIBLE_TRIES", 1)
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    (line,) = save_steps(2)
    monkeypatch.undo()
    assert "is not the main rank's folder" in line
    assert "Every node must write to one shared file system" in line


def _only_step_1_is_left(run: Path) -> None:
    assert sorted(path.name for path in checkpoints_folder(run).iterdir()) == ["latest", "step-00000001"]
    assert read_latest(run) == "step-00000001"
    assert find_damage(list_checkpoints(run)[0]) is None
