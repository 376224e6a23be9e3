"""From what a user names (a run folder or a checkpoint) to one checkpoint, and its plain values. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmscale.checkpoint.history import FoundCheckpoints, find_checkpoints, report_passed_over
from llmscale.checkpoint.manifest import CHECKPOINTS_NAME, MANIFEST_NAME, STATE_NAME, checkpoints_folder
from llmscale.errors import CheckpointError
from llmscale.untrusted.documents import Rules, load_json


def find_checkpoint(path: Path, report: Callable[[str], None] = lambda line: None, *, step: int | None = None) -> Path:
    """`path` itself when it is a checkpoint, else the newest one of the current history of the run folder `path`, or
    its one of `step`.

    `report` gets a line for everything in a run folder that is passed over. Raises CheckpointError.
    """
    if (path / MANIFEST_NAME).is_file():
        if step is not None:
            raise CheckpointError(f"{path} is one checkpoint, and --step {step} chooses among those of a run folder.")
        return path
    found = find_checkpoints(path)
    report_passed_over(found, report)
    for damaged, why in found.damaged:
        report(f"WARNING: {damaged.name} is damaged and passed over: {why}")
    if found.current:
        return found.current[0].path if step is None else _of_step(found, path, step)
    if found.abandoned or found.damaged:
        raise CheckpointError(no_checkpoint_to_take(found, path))
    what = "has no checkpoints yet" if path.is_dir() else "does not exist"
    if path.parent.name == CHECKPOINTS_NAME and not path.is_dir():
        others = find_checkpoints(path.parent.parent).current
        newest = f" The newest of its run is {others[0].path.name}." if others else ""
        raise CheckpointError(f"{path} does not exist: never saved, expired, or renamed.{newest}")
    raise CheckpointError(f"{path} {what}. Name a run folder of train.py (--run), or one of its checkpoints/step-*.")


def _of_step(found: FoundCheckpoints, run: Path, step: int) -> Path:
    """The current history's checkpoint of a step. Raises CheckpointError with the steps there are."""
    for checkpoint in found.current:
        if checkpoint.step == step:
            return checkpoint.path
    steps = ", ".join(str(checkpoint.step) for checkpoint in reversed(found.current))
    aside = [checkpoint.path for checkpoint in found.abandoned if checkpoint.step == step]
    where = f" {aside[0]} is of steps that the run went back from; name that folder to take it." if aside else ""
    raise CheckpointError(f"{run} has no checkpoint of step {step}. There are: {steps}.{where}")


def no_checkpoint_to_take(found: FoundCheckpoints, run: Path) -> str:
    """Why a run that has something has nothing to go on from."""
    folder = checkpoints_folder(run)
    num_of_history = len(found.current) + len(found.damaged)
    if num_of_history:
        why = f"none of the {num_of_history} checkpoints in {folder} is whole"
    else:
        why = f"the history that began from {found.origin} has no checkpoints"
    others = f" {len(found.abandoned)} abandoned ones can be named with --resume PATH." if found.abandoned else ""
    return f"{why}.{others} To start from scratch, use another --run folder."


def read_state(folder: Path) -> dict[str, object]:
    """The plain values of a checkpoint: counters, optimizer groups, identity, configuration."""
    path = folder / STATE_NAME
    try:
        return load_json(path, Rules(CheckpointError, follow_links=False, not_finite=True))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} cannot be read: it is missing.") from None
