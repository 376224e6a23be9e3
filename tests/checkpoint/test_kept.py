from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.checkpoint.inventory import MAX_PINNED, PINNED_NAME, list_checkpoints, pin_checkpoint, pinned_checkpoints
from llmscale.checkpoint.manifest import checkpoint_name, checkpoints_folder, step_of
from llmscale.errors import CheckpointError


def test_what_is_kept_outlives_retention(save_steps: Callable, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_steps(10, keep_last=1, keep_every=0)
    pin_checkpoint(checkpoints_folder(run) / checkpoint_name(10), "because")
    save_steps(20, 30, keep_last=1, keep_every=0)
    assert [step_of(path) for path in list_checkpoints(run)] == [30, 10]
    assert pinned_checkpoints(run) == {checkpoint_name(10): "because"}


def test_the_oldest_goes_first_and_what_is_gone_does_not_count(tmp_path: Path) -> None:
    folder = checkpoints_folder(tmp_path)
    for step in range(1, MAX_PINNED + 3):
        (folder / checkpoint_name(step)).mkdir(parents=True)
        pin_checkpoint(folder / checkpoint_name(step), f"number {step}")
    assert list(pinned_checkpoints(tmp_path)) == [checkpoint_name(step) for step in range(3, MAX_PINNED + 3)]
    (folder / checkpoint_name(3)).rmdir()
    pin_checkpoint(folder / checkpoint_name(1), "again")
    assert list(pinned_checkpoints(tmp_path))[-1] == checkpoint_name(1)
    assert len(pinned_checkpoints(tmp_path)) == MAX_PINNED


@pytest.mark.parametrize("content", ["{", "[]", '{"../x": "y"}', '{"step-00000001": 3}'])
def test_a_list_that_cannot_be_read_is_an_error(content: str, tmp_path: Path) -> None:
    checkpoints_folder(tmp_path).mkdir()
    (checkpoints_folder(tmp_path) / PINNED_NAME).write_text(content)
    with pytest.raises(CheckpointError):
        pinned_checkpoints(tmp_path)
