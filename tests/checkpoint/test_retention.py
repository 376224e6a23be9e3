"""What is kept and what goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import Checkpoint, choose_expired, list_checkpoints, remove_leftovers
from llmscale.checkpoint.manifest import (
    CheckpointManifest,
    StoredFile,
    checkpoint_name,
    checkpoints_folder,
    step_of,
)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "expired"),
    [(1, 0, [40, 30, 20, 10]), (2, 0, [30, 20, 10]), (1, 20, [30, 10]), (9, 0, []), (1, 50, [40, 30, 20, 10])],
)
def test_choose_expired(keep_last: int, keep_every: int, expired: list[int]) -> None:
    current = [saved(step) for step in (50, 40, 30, 20, 10)]
    assert [checkpoint.step for checkpoint in choose_expired(current, keep_last, keep_every)] == expired


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    """The newest lacks a file: the one before it is what the run would go on from."""
    torn = saved(50, StoredFile("gone", 1, ""))
    current = [torn, saved(40), saved(30)]
    assert choose_expired(current, 1, 0) == current[2:]
    assert choose_expired([torn, torn], 1, 0) == []


def saved(step: int, *files: StoredFile) -> Checkpoint:
    manifest = CheckpointManifest(step, 0, 1, 0, "fp32", "now", files)
    return Checkpoint(Path(checkpoint_name(step)), manifest)


def test_saves_delete_what_expired(save_steps: Callable, tmp_path: Path) -> None:
    save_steps(10, 20, 25, 30, keep_last=1, keep_every=10)
    assert [step_of(path) for path in list_checkpoints(tmp_path / "run")] == [30, 20, 10]
    assert not list(checkpoints_folder(tmp_path / "run").glob(".*"))


def test_removes_what_an_interrupted_save_left(save_steps: Callable, tmp_path: Path) -> None:
    save_steps(10)
    folder = checkpoints_folder(tmp_path / "run")
    for name in (".step-00000020.partial", ".step-00000005.deleted", ".step-00000030.partial-2", "notes"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    (folder / ".step-00000006.partial").write_text("not ours")
    (folder / ".step-00000007.partial").symlink_to(folder / "notes")
    lines = remove_leftovers(tmp_path / "run")
    assert [line.split()[1] for line in lines] == [
        *(".step-00000005.deleted,", ".step-00000020.partial,", ".step-00000030.partial-2,")
    ]
    assert sorted(path.name for path in folder.iterdir()) == [
        *(".step-00000006.partial", ".step-00000007.partial", "latest", "notes", "step-00000010")
    ]
    assert (folder / "notes" / "file").read_text() == "x"


def test_what_cannot_be_deleted_is_tried_again(save_steps: Callable, tmp_path: Path) -> None:
    """A delete that was interrupted left its folder under the name that the next one wants."""
    save_steps(10)
    folder = checkpoints_folder(tmp_path / "run")
    (folder / ".step-00000010.deleted").write_text("not ours")
    assert save_steps(20, keep_last=1)[-1].startswith("saved ")
    assert [step_of(path) for path in list_checkpoints(tmp_path / "run")] == [20]
    assert (folder / ".step-00000010.deleted").read_text() == "not ours"
