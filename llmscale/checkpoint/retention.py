"""Which checkpoints stay and which go. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from llmscale.checkpoint.history import LEFTOVER_NAME, Checkpoint, FoundCheckpoints, find_checkpoints
from llmscale.checkpoint.kept import kept_checkpoints
from llmscale.checkpoint.manifest import CHECKPOINT_NAME, History, checkpoints_folder, is_whole


def choose_expired(current: Sequence[Checkpoint], keep_last: int, keep_every: int) -> list[Checkpoint]:
    """Of a history's checkpoints, the newest first, those older than `keep_last` (at least 1) whole ones whose step is
    no multiple of `keep_every` (0: of nothing)."""
    expired, num_whole = [], 0
    for checkpoint in current:
        if num_whole < keep_last:
            num_whole += is_whole(checkpoint.path, checkpoint.manifest)
        elif not keep_every or checkpoint.step % keep_every:
            expired.append(checkpoint)
    return expired


def apply_retention(run: Path, history: History, keep_last: int, keep_every: int) -> None:
    """Delete what expired of `history`. What is abandoned, kept for a reason (kept.py), cannot be read or is not ours
    goes not; the newest whole checkpoint always stays. Raises OSError or CheckpointError."""
    kept = kept_checkpoints(run)
    for checkpoint in choose_expired(find_checkpoints(run, history).current, keep_last, keep_every):
        if checkpoint.path.name not in kept:
            delete_checkpoint(checkpoint.path)


def prunable(found: FoundCheckpoints) -> list[Path]:
    """What no run needs to go on: abandoned checkpoints, and damaged ones that another has taken the place of."""
    replaced = [path for path, _ in found.damaged if is_put_aside(path)]
    return [*(checkpoint.path for checkpoint in found.abandoned), *replaced]


def is_put_aside(path: Path) -> bool:
    """Whether another checkpoint took the place of this one."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return match is not None and match[3] is not None


def delete_checkpoint(path: Path) -> None:
    """Renamed before it is emptied, so that a half-deleted checkpoint never has a finished one's name. Raises
    OSError."""
    trash = free_name(path.with_name(f".{path.name}.deleted"))
    path.rename(trash)
    shutil.rmtree(trash)


def free_name(wanted: Path) -> Path:
    """`wanted`, or with -2, -3, ... the first name that is free. A folder of that name is a leftover, and removed."""
    number, path = 1, wanted
    while os.path.lexists(path):
        if is_real_folder(path):
            shutil.rmtree(path, ignore_errors=True)
        if os.path.lexists(path):
            number += 1
            path = wanted.with_name(f"{wanted.name}-{number}")
    return path


def is_real_folder(path: Path) -> bool:
    """A folder, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def remove_leftovers(run: Path) -> list[str]:
    """Delete what an interrupted save or delete left behind; returns a line about each. Call it when nobody is
    saving."""
    lines = []
    folder = checkpoints_folder(run)
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for path in (folder / name for name in names if LEFTOVER_NAME.fullmatch(name)):
        if not is_real_folder(path):
            continue
        try:
            shutil.rmtree(path)
            lines.append(f"removed {path.name}, left behind by an interrupted save")
        except OSError as error:
            lines.append(f"WARNING: {path}, left behind by an interrupted save, cannot be removed: {error.strerror}")
    return lines
