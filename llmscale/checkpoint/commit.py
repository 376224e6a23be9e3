"""Turn written files into a checkpoint, atomically. No torch.

The order of the steps makes it safe: a run killed between any two of them finds at its next start either this
checkpoint or everything that it had before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from llmscale.checkpoint.inventory import apply_retention, find_checkpoints, is_of_run, point_best
from llmscale.checkpoint.manifest import (
    BEST_NAME,
    LATEST_NAME,
    STATE_NAME,
    CheckpointManifest,
    Pieces,
    checkpoint_name,
    checkpoints_folder,
    hash_file,
    save_manifest,
    save_pieces,
)
from llmscale.errors import CheckpointError
from llmscale.files.atomic_write import sync_path, write_durably


@dataclass(frozen=True)
class Retention:
    """Checkpoints that stay."""

    keep_last: int
    """Number of the newest complete checkpoints that stay, at least 1."""
    keep_every: int
    """Checkpoints stay whose step is a multiple of this; 0: none."""


def commit_checkpoint(
    run: Path,
    partial: Path,
    manifest: CheckpointManifest,
    state: Mapping[str, object],
    retention: Retention,
    pieces: Pieces | None = None,
) -> list[str]:
    """Turn the folder `partial` into the run's checkpoint; its tensors are written and listed in `manifest`, or those
    of `pieces` if other disks have the rest.

    Raises OSError until the folder has its final name. From then on the checkpoint counts as saved: later steps that
    fail are returned as one line each.
    """
    write_durably(partial / STATE_NAME, json.dumps(state, indent=1))
    others = [hash_file(partial / STATE_NAME), hash_file(partial / "tensors.json")]
    files = sorted([*manifest.files, *others], key=lambda file: file.name)
    save_manifest(partial, replace(manifest, files=tuple(files)))
    if pieces is not None:
        save_pieces(partial, pieces)
    final = checkpoints_folder(run) / checkpoint_name(manifest.step)
    set_aside_existing(final)
    partial.rename(final)
    # Read once for both who need it, and after the rename.
    current = cache(lambda: find_checkpoints(run, manifest.history).current)
    afterwards: Sequence[tuple[str, Callable[[], object]]] = (
        ("the disk did not confirm it, and a power cut might undo it", lambda: sync_path(final.parent)),
        (f"{LATEST_NAME} does not point to it", lambda: point_latest(run, final)),
        (f"{BEST_NAME} may not name the best one", lambda: point_best(run, current())),
        (
            "not every checkpoint that --keep-last and --keep-every let go is deleted",
            lambda: apply_retention(run, current(), retention.keep_last, retention.keep_every),
        ),
    )
    return [f"{what}: {problem}" for what, action in afterwards for problem in _problems(action)]


def set_aside_existing(final: Path) -> None:
    """Rename an existing checkpoint of the same step, from another history, to `.old-1` or the next free number."""
    if not os.path.lexists(final):
        return
    number = 1
    while os.path.lexists(final.with_name(f"{final.name}.old-{number}")):
        number += 1
    final.rename(final.with_name(f"{final.name}.old-{number}"))


def point_latest(run: Path, checkpoint: Path) -> None:
    """Point `latest` to a checkpoint of this run, or remove it for another run's. Raises OSError."""
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
