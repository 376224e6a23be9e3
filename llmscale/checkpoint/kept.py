"""Checkpoints that retention leaves alone, because somebody may want to go back to them. No torch.

RUN/checkpoints/kept.json    {"step-00000500": "before the loss spike at step 612"}
"""

from __future__ import annotations

import json
from pathlib import Path

from llmscale.checkpoint.manifest import CHECKPOINT_NAME, checkpoints_folder
from llmscale.errors import CheckpointError
from llmscale.files.atomic_write import write_durably
from llmscale.untrusted.documents import Rules, load_json

KEPT_NAME = "kept.json"
#: At a time: a run with a spike a day must not fill the disk. The oldest goes first.
MOST_KEPT = 4


def kept_checkpoints(run: Path) -> dict[str, str]:
    """Folder name and reason, the oldest first. Raises CheckpointError when that cannot be read: then nothing may be
    deleted."""
    path = checkpoints_folder(run) / KEPT_NAME
    try:
        listed = load_json(path, Rules(CheckpointError, follow_links=False))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    for name, why in listed.items():
        if not CHECKPOINT_NAME.fullmatch(name) or not isinstance(why, str):
            raise CheckpointError(f"{path} names {name[:80]!r}, which is no checkpoint. Remove the file.")
    return {name: str(why) for name, why in listed.items()}


def keep_checkpoint(checkpoint: Path, why: str) -> None:
    """From now on retention leaves `checkpoint`, of a run's own, alone. Raises OSError, CheckpointError."""
    folder = checkpoint.parent
    kept = {name: known for name, known in kept_checkpoints(folder.parent).items() if (folder / name).is_dir()}
    kept.setdefault(checkpoint.name, why)
    newest = dict(list(kept.items())[-MOST_KEPT:])
    write_durably(folder / KEPT_NAME, json.dumps(newest, indent=1) + "\n")
