"""Which checkpoints stay and which go. No torch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from llmscale.checkpoint.manifest import checkpoints_folder, list_checkpoints


def choose_expired(steps: list[int], keep_last: int, keep_every: int) -> list[int]:
    """Steps whose checkpoints may be deleted: neither among the newest `keep_last` nor a multiple of `keep_every`."""
    newest_first = sorted(steps, reverse=True)
    return [step for step in newest_first[keep_last:] if not keep_every or step % keep_every]


def apply_retention(run: Path, keep_last: int, keep_every: int) -> None:
    """Delete what expired, when a newer checkpoint is known to be good. The newest always stays (keep_last >= 1).

    A folder is renamed before it is emptied, so that a half-deleted checkpoint never has a finished one's name.
    """
    by_step = {step_of(path): path for path in list_checkpoints(run)}
    for step in choose_expired(list(by_step), keep_last, keep_every):
        trash = by_step[step].with_name(f".{by_step[step].name}.deleted")
        by_step[step].rename(trash)
        shutil.rmtree(trash)


def remove_leftovers(run: Path) -> list[str]:
    """Delete what an interrupted save or delete left behind; returns the names. Call it when nobody is saving."""
    leftovers = [
        path
        for path in checkpoints_folder(run).glob(".step-*")
        if re.fullmatch(r"\.step-\d+\.(partial|deleted)", path.name)
    ]
    for path in leftovers:
        shutil.rmtree(path)
    return [path.name for path in leftovers]


def step_of(path: Path) -> int:
    """The step in a checkpoint's folder name."""
    return int(path.name.removeprefix("step-"))
