"""What is kept and what goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.checkpoint.manifest import checkpoints_folder, list_checkpoints
from llmscale.checkpoint.retention import choose_expired, remove_leftovers, step_of


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "expired"),
    [(1, 0, [40, 30, 20, 10]), (2, 0, [30, 20, 10]), (1, 20, [30, 10]), (9, 0, []), (1, 50, [40, 30, 20, 10])],
)
def test_choose_expired(keep_last: int, keep_every: int, expired: list[int]) -> None:
    assert choose_expired([10, 30, 20, 50, 40], keep_last, keep_every) == expired


def test_saves_delete_what_expired(save_steps: Callable, tmp_path: Path) -> None:
    save_steps(10, 20, 25, 30, keep_last=1, keep_every=10)
    assert [step_of(path) for path in list_checkpoints(tmp_path / "run")] == [30, 20, 10]
    assert not list(checkpoints_folder(tmp_path / "run").glob(".*"))


def test_removes_what_an_interrupted_save_left(save_steps: Callable, tmp_path: Path) -> None:
    save_steps(10)
    folder = checkpoints_folder(tmp_path / "run")
    for name in (".step-00000020.partial", ".step-00000005.deleted", "notes"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    assert sorted(remove_leftovers(tmp_path / "run")) == [".step-00000005.deleted", ".step-00000020.partial"]
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "notes", "step-00000010"]
