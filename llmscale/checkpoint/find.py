"""From what a user names (a run folder or a checkpoint) to one checkpoint, and its plain values. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from llmscale.checkpoint.manifest import MANIFEST_NAME, STATE_NAME, list_checkpoints
from llmscale.errors import CheckpointError


def find_checkpoint(path: Path) -> Path:
    """`path` itself when it is a checkpoint, else the newest one of the run folder `path`. Raises CheckpointError."""
    if (path / MANIFEST_NAME).is_file():
        return path
    checkpoints = list_checkpoints(path)
    if checkpoints:
        return checkpoints[0]
    what = "has no checkpoints yet" if path.is_dir() else "does not exist"
    raise CheckpointError(f"{path} {what}. Name a run folder of train.py (--run), or one of its checkpoints/step-*.")


def read_state(folder: Path) -> dict[str, object]:
    """The plain values of a checkpoint: counters, optimizer groups, identity, configuration."""
    try:
        return json.loads((folder / STATE_NAME).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / STATE_NAME} cannot be read: {error}.") from None
