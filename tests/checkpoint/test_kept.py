from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.checkpoint.history import list_checkpoints
from llmscale.checkpoint.kept import KEPT_NAME, MOST_KEPT, keep_checkpoint, kept_checkpoints
from llmscale.checkpoint.manifest import checkpoint_name, checkpoints_folder, step_of
from llmscale.errors import CheckpointError


def test_what_is_kept_outlives_retention(save_steps: Callable, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_steps(10, keep_last=1, keep_every=0)
    keep_checkpoint(checkpoints_folder(run) / checkpoint_name(10), "because")
    save_steps(20, 30, keep_last=1, keep_every=0)
    assert [step_of(path) for path in list_checkpoints(run)] == [30, 10]
    assert kept_checkpoints(run) == {checkpoint_name(10): "because"}


def test_the_oldest_goes_first_and_what_is_gone_does_not_count(tmp_path: Path) -> None:
    folder = checkpoints_folder(tmp_path)
    for step in range(1, MOST_KEPT + 3):
        (folder / checkpoint_name(step)).mkdir(parents=True)
        keep_checkpoint(folder / checkpoint_name(step), f"number {step}")
    assert list(kept_checkpoints(tmp_path)) == [checkpoint_name(step) for step in range(3, MOST_KEPT + 3)]
    (folder / checkpoint_name(3)).rmdir()
    keep_checkpoint(folder / checkpoint_name(1), "again")
    assert list(kept_checkpoints(tmp_path))[-1] == checkpoint_name(1)
    assert len(kept_checkpoints(tmp_path)) == MOST_KEPT


@pytest.mark.parametrize("content", ["{", "[]", '{"../x": "y"}', '{"step-00000001": 3}'])
def test_a_list_that_cannot_be_read_is_an_error(content: str, tmp_path: Path) -> None:
    checkpoints_folder(tmp_path).mkdir()
    (checkpoints_folder(tmp_path) / KEPT_NAME).write_text(content)
    with pytest.raises(CheckpointError):
        kept_checkpoints(tmp_path)
