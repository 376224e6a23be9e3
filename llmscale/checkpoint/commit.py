"""The moment in which a checkpoint that was written becomes one. No torch.

The order of the steps is what makes it safe: killed between any two of them, a run finds at its next start either this
checkpoint or everything that it had before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmscale.checkpoint.inventory import apply_retention, is_of_run
from llmscale.checkpoint.manifest import (
    LATEST_NAME,
    STATE_NAME,
    CheckpointManifest,
    checkpoint_name,
    checkpoints_folder,
    hash_file,
    save_manifest,
)
from llmscale.errors import CheckpointError
from llmscale.files.atomic_write import sync_folder, write_durably


@dataclass(frozen=True)
class Retention:
    """What stays of a history."""

    keep_last: int
    """Whole checkpoints, at least 1."""
    keep_every: int
    """And each whose step is a multiple of this; 0: none."""


def commit_checkpoint(
    run: Path, partial: Path, manifest: CheckpointManifest, state: Mapping[str, object], retention: Retention
) -> list[str]:
    """Turn the folder `partial`, whose tensors are written and are in `manifest`, into the run's checkpoint of that
    step.

    Raises OSError when it is no checkpoint. Once it is one nothing is raised: a line is returned for everything else
    that was to be done and could not be.
    """
    write_durably(partial / STATE_NAME, json.dumps(state, indent=1))
    others = [hash_file(partial / STATE_NAME), hash_file(partial / "tensors.json")]
    files = sorted([*manifest.files, *others], key=lambda file: file.name)
    save_manifest(partial, replace(manifest, files=tuple(files)))
    final = checkpoints_folder(run) / checkpoint_name(manifest.step)
    set_aside_existing(final)
    partial.rename(final)
    afterwards: Sequence[tuple[str, Callable[[], object]]] = (
        ("the disk did not confirm it, and a power cut might undo it", lambda: sync_folder(final.parent)),
        (f"{LATEST_NAME} does not point to it", lambda: point_latest(run, final)),
        (
            "what --keep-last and --keep-every let go is not all removed",
            lambda: apply_retention(run, manifest.history, retention.keep_last, retention.keep_every),
        ),
    )
    return [f"{what}: {problem}" for what, action in afterwards for problem in _problems(action)]


def set_aside_existing(final: Path) -> None:
    """Another history's checkpoint of the same step, or whatever has its name, becomes `.old-1`, or the next that is
    free."""
    number = 1
    while os.path.lexists(final.with_name(f"{final.name}.old-{number}")):
        number += 1
    try:
        final.rename(final.with_name(f"{final.name}.old-{number}"))
    except FileNotFoundError:
        return


def point_latest(run: Path, checkpoint: Path) -> None:
    """Have `latest` name a checkpoint of this run, or nothing when it is another's. Raises OSError."""
    latest = checkpoints_folder(run) / LATEST_NAME
    if is_of_run(checkpoint, run):
        write_durably(latest, checkpoint.name + "\n")
    else:
        latest.unlink(missing_ok=True)


def _problems(action: Callable[[], object]) -> list[str]:
    try:
        action()
    except (OSError, CheckpointError) as error:
        return [str(error)]
    return []
