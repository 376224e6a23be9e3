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

from llmscale.checkpoint import inventory
from llmscale.checkpoint import save as save_module
from llmscale.checkpoint.inventory import find_checkpoints, list_checkpoints, record_history
from llmscale.checkpoint.manifest import History, checkpoints_folder, find_damage
from tests.checkpoint.conftest import folder_of
from tests.checkpoint.written import load_full_weights

#: Of a run that went back to step 10.
SECOND = History(2, ((1, 10),))


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


def test_a_background_save_touches_no_gpu(
    save_steps: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would open a context on GPU 0, whichever GPU the rank has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("asked for a stream"))
    (line,) = save_steps(1, in_background=True)
    assert line.startswith("saved ")


def test_the_same_step_is_replaced_as_a_whole(save_steps: Callable, tmp_path: Path) -> None:
    save_steps(5)
    (list_checkpoints(tmp_path / "run")[0] / "state.json").unlink()
    save_steps(5)
    assert find_damage(list_checkpoints(tmp_path / "run")[0]) is None
    old_1 = checkpoints_folder(tmp_path / "run") / "step-00000005.old-1"
    assert "state.json cannot be read" in str(find_damage(old_1)), "nothing is lost that nobody gave up"


def test_an_abandoned_checkpoint_outlives_the_save_of_the_same_step(save_steps: Callable, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_steps(10, 20, 30, keep_last=9)
    record_history(run, SECOND, folder_of(run, 10))
    assert save_steps(20, keep_last=1, history=SECOND)[-1].startswith("saved ")
    checkpoints = find_checkpoints(run)
    assert [saved.path.name for saved in checkpoints.current] == ["step-00000020"]
    assert [saved.path.name for saved in checkpoints.abandoned] == ["step-00000030", "step-00000020.old-1"]
    assert all(find_damage(saved.path) is None for saved in [*checkpoints.current, *checkpoints.abandoned])


def test_retention_never_ranks_by_steps_of_another_history(save_steps: Callable, tmp_path: Path) -> None:
    """The run of 10 to 60 that went back to 20 and was stopped at 43."""
    run = tmp_path / "run"
    save_steps(10, 20, 30, 40, 50, 60)
    history = History(2, ((1, 20),))
    record_history(run, history, folder_of(run, 20))
    save_steps(30, 40, 43, keep_last=2, history=history)
    checkpoints = find_checkpoints(run)
    assert [saved.path.name for saved in checkpoints.current] == ["step-00000043", "step-00000040"]
    assert {saved.step for saved in checkpoints.abandoned} == {30, 40, 50, 60}
    assert (checkpoints_folder(run) / "latest").read_text().strip() == "step-00000043"


@pytest.mark.parametrize("in_the_way", ["latest", "history.json"])
def test_what_was_committed_is_not_called_lost(save_steps: Callable, tmp_path: Path, in_the_way: str) -> None:
    """A folder where a file should be."""
    save_steps(1)
    folder = checkpoints_folder(tmp_path / "run")
    (folder / "latest").unlink()
    (folder / in_the_way).mkdir()
    (folder / in_the_way / "x").write_text("")
    lines = save_steps(2, keep_last=1)
    assert lines[0].startswith(f"saved {folder / 'step-00000002'} in ")
    assert not any("NOT saved" in line for line in lines)
    if in_the_way == "latest":
        assert lines[1].startswith(f"WARNING: {folder / 'step-00000002'} is saved, but latest does not point to it: ")
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000002"]


def test_a_checkpoint_that_cannot_be_deleted_does_not_undo_the_save(
    save_steps: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(1)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(inventory, "delete_checkpoint", refuse)
    lines = save_steps(2, keep_last=1)
    assert lines[0].startswith("saved ")
    assert "is saved, but not every checkpoint that expired is deleted: " in lines[1]
    assert "Permission denied" in lines[1]
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000002", "step-00000001"]


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_names_in_the_way_do_not_keep_a_step_from_being_saved(save_steps: Callable, tmp_path: Path, kind: str) -> None:
    folder = checkpoints_folder(tmp_path / "run")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    folder.mkdir(parents=True)
    for name in (".step-00000002.partial", "step-00000002"):
        if kind == "file":
            (folder / name).write_text("x")
        elif kind == "link":
            (folder / name).symlink_to(precious)
        else:
            (folder / name).mkdir()
            (folder / name / "file").write_text("x")
    assert save_steps(2)[0].startswith("saved ")
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000002"]
    assert (folder / "step-00000002.old-1").exists()
    assert (precious / "file").read_text() == "x"


def test_a_run_folder_that_is_not_ours_any_more_gets_nothing(save_steps: Callable, tmp_path: Path) -> None:
    def gone() -> None:
        raise OSError("the run folder is gone")

    (line,) = save_steps(2, check_run_folder=gone)
    assert line.startswith("WARNING: the checkpoint of step 2 was NOT saved: the run folder is gone")
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_noticed_before_writing(
    save_steps: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 99, 1))
    (line,) = save_steps(2)
    assert line.startswith("WARNING: the checkpoint of step 2 was NOT saved: ")
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


def test_a_rank_that_loses_the_folder_says_so(
    save_steps: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "_VISIBLE_TRIES", 1)
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    (line,) = save_steps(2)
    monkeypatch.undo()
    assert "NOT saved" in line and "is not the folder that it was at the start" in line


def _only_step_1_is_left(run: Path) -> None:
    assert sorted(path.name for path in checkpoints_folder(run).iterdir()) == ["latest", "step-00000001"]
    assert (checkpoints_folder(run) / "latest").read_text().strip() == "step-00000001"
    assert find_damage(list_checkpoints(run)[0]) is None
