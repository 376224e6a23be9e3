"""A run's checkpoints: which belong to its current history, which one to use, which to keep or delete. No torch.

A run that returns to an earlier checkpoint begins a new history, as a restored database begins a new timeline. A
history has a number and the branches that lead to it: with the branch (1, 20), history 1 counts up to step 20. Every
manifest names its history.

    RUN/checkpoints/history.json    the current history, and the checkpoint that it began from
    RUN/checkpoints/kept.json       pinned checkpoints: {"step-00000500": "before the loss spike at step 612"}

history.json is replaced atomically when a run goes back, before its first step. The later steps of the old history are
then abandoned: kept, listed, and never resumed, counted or deleted unless the user requests it. Checkpoints without a
history belong to history 1.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import TypeVar

import xxhash

from llmscale.checkpoint.manifest import (
    BEST_NAME,
    CHECKPOINT_NAME,
    CHECKPOINTS_NAME,
    LATEST_NAME,
    MANIFEST_NAME,
    STATE_NAME,
    Checkpoint,
    CheckpointManifest,
    History,
    Pieces,
    checkpoint_name,
    checkpoints_folder,
    hash_file,
    hash_json,
    load_if_there,
    load_manifest,
    parse_history,
    read_checkpoint,
    save_manifest,
    save_pieces,
    signed_body,
    step_of,
)
from llmscale.errors import CheckpointError
from llmscale.files.atomic_write import sync_path, write_durably
from llmscale.untrusted.documents import MAX_BYTES, Rules, parse_json
from llmscale.untrusted.paths import read_regular, unreadable_as
from llmscale.untrusted.strangers import describe_stranger

HISTORY_NAME = "history.json"
#: Names of the remains of an interrupted save or delete.
LEFTOVER_NAME = re.compile(r"\.step-\d+(\.old-\d+)?\.(partial|deleted)(-\d+)?", re.ASCII)
#: Most checkpoints that a command takes in turn while training removes them.
_MOST_TRIES = 5
#: Names that are reported when they are not ours; others (`latest`, notes) are ignored.
_LOOKS_LIKE_OURS = re.compile(r"\.?step-")
_T = TypeVar("_T")
PINNED_NAME = "kept.json"
#: Most pins at a time, so that a run with a spike a day does not fill the disk; the oldest is unpinned first.
MAX_PINNED = 4


@dataclass
class FoundCheckpoints:
    """Everything under a run's checkpoints/, the newest first."""

    history: History = field(default_factory=History)
    """The current history."""
    origin: str | None = None
    """The checkpoint that the current history began from; None when the run began at step 0 and never went back."""
    current: list[Checkpoint] = field(default_factory=list)
    """Checkpoints of the current history."""
    abandoned: list[Checkpoint] = field(default_factory=list)
    """Checkpoints of other histories."""
    damaged: list[tuple[Path, str]] = field(default_factory=list)
    """Folders with a checkpoint's name that are damaged, and why; their history is unknown."""
    passed_over: list[tuple[Path, str]] = field(default_factory=list)
    """Names that look like ours and are not, and why; never touched."""
    notes: list[str] = field(default_factory=list)
    """Warnings for the user, such as an unreadable history.json."""

    def under(self, history: History) -> FoundCheckpoints:
        """Return the same checkpoints as another history sees them, without reading them again."""
        seen = replace(self, history=history, current=[], abandoned=[])
        seen._sort_out([*self.current, *self.abandoned])
        return seen

    def _sort_out(self, readable: list[Checkpoint]) -> None:
        """Divide checkpoints into those of the current history and the others."""
        # The canonical name comes before `.old-1`.
        for checkpoint in sorted(readable, key=lambda checkpoint: (-checkpoint.step, checkpoint.path.name)):
            of_current = self.history.includes(checkpoint.history.number, checkpoint.step)
            is_replaced = any(known.step == checkpoint.step for known in self.current)
            (self.current if of_current and not is_replaced else self.abandoned).append(checkpoint)


def find_checkpoints(run: Path, history: History | None = None) -> FoundCheckpoints:
    """List a run's checkpoints by the current history, or by `history`.

    Raises CheckpointError when the folder exists and cannot be read: a run must not restart or go back because a disk
    did not answer.
    """
    listing = FoundCheckpoints()
    readable: list[Checkpoint] = []
    for path in _entries(checkpoints_folder(run)):
        reason = _why_not_ours(path)
        if reason is not None:
            listing.passed_over.append((path, reason))
        elif not LEFTOVER_NAME.fullmatch(path.name):
            try:
                readable.append(read_checkpoint(path))
            except CheckpointError as error:
                # Unless the run's own retention has deleted it in the meantime.
                if path.exists():
                    listing.damaged.append((path, str(error)))
    listing.damaged.sort(key=lambda entry: entry[0].name, reverse=True)
    if history is None:
        _read_history(run, readable, listing)
    else:
        listing.history = history
    listing._sort_out(readable)
    return listing


def list_checkpoints(run: Path) -> list[Path]:
    """List the checkpoints of a run's current history, the newest first; not verified. Raises CheckpointError."""
    return [checkpoint.path for checkpoint in find_checkpoints(run).current]


def find_any_checkpoint(run: Path) -> Path | None:
    """Return the newest folder with a checkpoint's name, of any history and in any state, without reading manifests.

    Raises CheckpointError.
    """
    ours = [
        path
        for path in _entries(checkpoints_folder(run))
        if _why_not_ours(path) is None and not LEFTOVER_NAME.fullmatch(path.name)
    ]
    return max(ours, key=lambda path: path.name, default=None)


def is_of_run(folder: Path, run: Path) -> bool:
    """Return whether a checkpoint is in the run's own checkpoints/."""
    return os.path.dirname(os.path.realpath(folder)) == os.path.realpath(checkpoints_folder(run))


def history_after(listing: FoundCheckpoints, start: Path, run: Path) -> History:
    """Return the history of a start from the checkpoint `start`: the current one when that ends there, else a new one.

    `listing` has the run's checkpoints.
    """
    of_histories = [*listing.current, *listing.abandoned]
    number = 1 + max([listing.history.number, *(saved.history.number for saved in of_histories)])
    if not is_of_run(start, run):
        is_empty = not (listing.current or listing.abandoned or listing.damaged)
        if is_empty and not listing.history.branches:
            return listing.history
        return History(number)
    known = {saved.path: saved.manifest for saved in of_histories}
    manifest = known.get(start) or load_manifest(start)
    here = (manifest.history.number, manifest.step)
    begun_here = listing.history.branches[-1:] == (here,)
    later = [saved for saved in listing.current if saved.step > manifest.step]
    # A checkpoint that is unreadable today may be readable tomorrow, and must not be the newest then.
    unknown = [path for path, _ in listing.damaged if step_of(path) > manifest.step]
    if listing.history.includes(*here) and not later and (begun_here or not unknown):
        return listing.history
    return History(number, (*manifest.history.branches, here))


def record_history(run: Path, history: History, origin: Path) -> None:
    """Make `history`, which began from the checkpoint `origin`, the current one, durably. Raises OSError."""
    checkpoints_folder(run).mkdir(exist_ok=True)
    body = {
        **history.as_dict(),
        "began_from": str(origin),
        "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    text = json.dumps({"current": body, "xxh3_128": hash_json(body)}, indent=1)
    write_durably(checkpoints_folder(run) / HISTORY_NAME, text + "\n")


def report_passed_over(listing: FoundCheckpoints, report: Callable[[str], None]) -> None:
    """Report every name that only resembles a checkpoint's, and the notes."""
    for path, reason in listing.passed_over:
        report(f"WARNING: {path} is passed over: {reason}")
    for note in listing.notes:
        report(f"WARNING: {note}")


def _entries(folder: Path) -> list[Path]:
    """List the entries of a folder of checkpoints whose names resemble ours."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        if folder.parent.is_file():
            where = f"{folder.parent} is a file. Name a run folder, or one of its checkpoints/step-*."
            raise CheckpointError(where) from None
        raise CheckpointError(
            f"{folder} cannot be listed: {error.strerror}. Repair it, or name another run folder."
        ) from None
    return [folder / name for name in sorted(names) if _LOOKS_LIKE_OURS.match(name)]


def _why_not_ours(path: Path) -> str | None:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    if not LEFTOVER_NAME.fullmatch(path.name) and (match is None or match[1] != checkpoint_name(int(match[2]))):
        return "not a name that a save gives"
    if path.is_symlink():
        return "a link; to continue from where it leads, name that folder"
    if not path.is_dir():
        return "not a folder"
    return None


def _read_history(run: Path, readable: list[Checkpoint], listing: FoundCheckpoints) -> None:
    """Read the current history from history.json; without a readable one, from the manifests."""
    listing.history = max((saved.history for saved in readable), key=lambda history: history.number, default=History())
    path = checkpoints_folder(run) / HISTORY_NAME
    try:
        if (stored := load_if_there(path)) is not None:
            body = signed_body(stored, "current", str(path))
            listing.history = parse_history(body.get("history"), body.get("branches"), str(path))
            listing.origin = str(body.get("began_from"))
    except CheckpointError as error:
        listing.notes.append(
            f"{error} Using the newest history that saved a checkpoint, history {listing.history.number}, as the "
            "current one; choose another by naming its folder."
        )


def pinned_checkpoints(run: Path) -> dict[str, str]:
    """Return the pinned folders' names and reasons, the oldest first.

    Raises CheckpointError when kept.json cannot be read: then nothing may be deleted.
    """
    path = checkpoints_folder(run) / PINNED_NAME
    listed = load_if_there(path) or {}
    for name, why in listed.items():
        if not CHECKPOINT_NAME.fullmatch(name) or not isinstance(why, str):
            raise CheckpointError(f"{path} names {name[:80]!r}, which is not a checkpoint. Remove the file.")
    return {name: str(why) for name, why in listed.items()}


def pin_checkpoint(checkpoint: Path, why: str) -> None:
    """Protect one of a run's own checkpoints from retention. Raises OSError, CheckpointError."""
    folder = checkpoint.parent
    pinned = {name: known for name, known in pinned_checkpoints(folder.parent).items() if (folder / name).is_dir()}
    pinned.setdefault(checkpoint.name, why)
    newest = dict(list(pinned.items())[-MAX_PINNED:])
    write_durably(folder / PINNED_NAME, json.dumps(newest, indent=1) + "\n")


def find_checkpoint(path: Path, report: Callable[[str], None] = lambda line: None, *, step: int | None = None) -> Path:
    """Return the folder of the checkpoint that `open_checkpoint` reads. Raises CheckpointError."""
    return open_checkpoint(path, report, step=step).path


def open_checkpoint(
    path: Path, report: Callable[[str], None] = lambda line: None, *, step: int | None = None
) -> Checkpoint:
    """Read `path` if it is a checkpoint, else the run folder's newest checkpoint, or the one of `step`.

    checkpoints/best and checkpoints/latest name a checkpoint by what the manifests say, not by the file's text. Only
    the current history counts. `report` gets a line for every skipped entry. Raises CheckpointError.
    """
    if (path / MANIFEST_NAME).is_file() and step is None:
        return read_checkpoint(path)
    if (path / MANIFEST_NAME).is_file():
        raise CheckpointError(f"{path} is one checkpoint, and --step {step} chooses among those of a run folder.")
    if path.is_file() and (stranger := describe_stranger(path)):
        raise CheckpointError(f"{path} is no run folder.{stranger}")
    if path.parent.name == CHECKPOINTS_NAME and path.name in (BEST_NAME, LATEST_NAME):
        named = path.name
    else:
        named = ""
    path = path.parent.parent if named else path
    listing = find_checkpoints(path)
    report_passed_over(listing, report)
    for damaged, why in listing.damaged:
        report(f"WARNING: {damaged.name} is damaged and passed over: {why}")
    if listing.current and named == BEST_NAME:
        if best := find_best(listing.current):
            return best
        raise CheckpointError(
            f"{path} has no best checkpoint: none was saved at a step with a validation. For later ones let "
            "--save-every be a multiple of --val-every."
        )
    if listing.current:
        if step is None:
            return listing.current[0]
        return _of_step(listing, path, step)
    if listing.abandoned or listing.damaged:
        raise CheckpointError(explain_no_checkpoint(listing, path))
    what = "has no checkpoints yet" if path.is_dir() else "does not exist"
    if path.is_dir() and path.name == CHECKPOINTS_NAME:
        what = "holds checkpoints, and is not a run folder"
    if path.parent.name == CHECKPOINTS_NAME and not path.is_dir():
        others = find_checkpoints(path.parent.parent).current
        newest = f" The newest of its run is {others[0].path.name}." if others else ""
        raise CheckpointError(f"{path} does not exist: never saved, expired, or renamed.{newest}")
    if stranger := describe_stranger(path):
        raise CheckpointError(f"{path} is no run folder.{stranger}")
    if str(path).startswith("hf:"):
        raise CheckpointError(
            f"{path} is a published model, and a run or a checkpoint is needed here. `train --init-from {path}` begins "
            "a run with its weights; eval, sample and prune take its folder without hf:."
        )
    raise CheckpointError(f"{path} {what}. Name a run folder of train.py (--run), or one of its checkpoints/step-*.")


def use_checkpoint(folder: Path, find: Callable[[], Path], use: Callable[[Path], _T]) -> _T:
    """Return `use(folder)`; if training removed that checkpoint meanwhile, find and use another.

    Raises CheckpointError.
    """
    for _ in range(_MOST_TRIES - 1):
        try:
            return use(folder)
        except CheckpointError:
            if folder.is_dir():
                raise
            folder = find()
    return use(folder)


def _of_step(listing: FoundCheckpoints, run: Path, step: int) -> Checkpoint:
    """Return the current history's checkpoint of a step. Raises CheckpointError with the existing steps."""
    for checkpoint in listing.current:
        if checkpoint.step == step:
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in reversed(listing.current))
    aside = [checkpoint.path for checkpoint in listing.abandoned if checkpoint.step == step]
    if aside:
        where = f" {aside[0]} is of steps that the run went back from; name that folder to take it."
    else:
        where = ""
    raise CheckpointError(f"{run} has no checkpoint of step {step}. There are: {steps}.{where}")


def explain_no_checkpoint(listing: FoundCheckpoints, run: Path) -> str:
    """Explain why a run with checkpoints has none to continue from."""
    folder = checkpoints_folder(run)
    num_of_history = len(listing.current) + len(listing.damaged)
    if num_of_history:
        why = f"none of the {num_of_history} checkpoints in {folder} is intact"
    else:
        why = f"the history that began from {listing.origin} has no checkpoints"
    if listing.abandoned:
        others = f" {len(listing.abandoned)} abandoned ones can be taken by naming their folders."
    else:
        others = ""
    return f"{why}.{others} To start from scratch, use another run folder."


def read_state(folder: Path) -> dict[str, object]:
    """Read a checkpoint's plain values: counters, optimizer groups, identity, configuration. Raises CheckpointError."""
    path = folder / STATE_NAME
    state = load_if_there(path, not_finite=True)
    if state is None:
        raise CheckpointError(f"{path} cannot be read: it is missing.")
    return state


def read_verified_state(checkpoint: Checkpoint) -> dict[str, object]:
    """Read a checkpoint's plain values, whose hash is the manifest's.

    Raises CheckpointError unless every file is there with its size. The tensors' hashes are not checked.
    """
    folder = checkpoint.path
    if not checkpoint.is_whole():
        raise CheckpointError(f"{folder} lacks a part of a file.")
    path = folder / STATE_NAME
    with unreadable_as(CheckpointError, path):
        contents = read_regular(path, MAX_BYTES, follow_links=False)
    hashes = {file.name: file.xxh3_128 for file in checkpoint.manifest.files}
    if hashes.get(STATE_NAME) not in (None, xxhash.xxh3_128(contents).hexdigest()):
        raise CheckpointError(f"{path} does not match its hash: its content was altered.")
    return dict(parse_json(contents, Rules(CheckpointError, follow_links=False, not_finite=True), str(path)))


def choose_expired(current: Sequence[Checkpoint], keep_last: int, keep_every: int) -> list[Checkpoint]:
    """Choose the checkpoints of `current` (the newest first) that may be deleted.

    The newest ones up to `keep_last` (at least 1) complete ones stay, and multiples of `keep_every` (0: none).
    """
    expired = []
    num_complete = 0
    for checkpoint in current:
        if num_complete < keep_last:
            num_complete += checkpoint.is_whole()
        elif not keep_every or checkpoint.step % keep_every:
            expired.append(checkpoint)
    return expired


def find_best(current: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the complete checkpoint of `current` (the newest first) with the lowest validation loss, if any.

    Only losses over the samples of the newest validation count. Raises CheckpointError.
    """
    known = [(saved.manifest.validation, saved) for saved in current if saved.manifest.validation]
    complete = [(validation, saved) for validation, saved in known if saved.is_whole()]
    samples = complete[0][0].samples if complete else ""
    comparable = [(validation.loss, saved) for validation, saved in complete if validation.samples == samples]
    if comparable:
        return min(comparable, key=lambda entry: entry[0])[1]
    return None


def point_best(run: Path, current: Sequence[Checkpoint]) -> None:
    """Let checkpoints/best name the best checkpoint of `current` (the newest first), or remove it without one.

    It is for people and completion: commands read the manifests, which a kill cannot leave behind. Raises OSError,
    CheckpointError.
    """
    path = checkpoints_folder(run) / BEST_NAME
    if best := find_best(current):
        write_durably(path, best.path.name + "\n")
    else:
        path.unlink(missing_ok=True)


def apply_retention(run: Path, current: Sequence[Checkpoint], keep_last: int, keep_every: int) -> None:
    """Delete the expired checkpoints of `current` (the newest first). Raises OSError or CheckpointError.

    Pinned, abandoned, unreadable and foreign folders stay, and always the newest complete and the best checkpoint.
    """
    pinned = pinned_checkpoints(run)
    best = find_best(current)
    for checkpoint in choose_expired(current, keep_last, keep_every):
        if checkpoint.path.name not in pinned and checkpoint is not best:
            delete_checkpoint(checkpoint.path)


def prunable(listing: FoundCheckpoints) -> list[Path]:
    """List the checkpoints that no run needs: abandoned ones, and damaged ones that were replaced (`.old-1`)."""
    names = ((path, CHECKPOINT_NAME.fullmatch(path.name)) for path, _ in listing.damaged)
    return [*(checkpoint.path for checkpoint in listing.abandoned), *(path for path, name in names if name and name[3])]


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint; renaming it first keeps a half-deleted one from looking finished. Raises OSError."""
    trash = free_name(path.with_name(f".{path.name}.deleted"))
    path.rename(trash)
    shutil.rmtree(trash)


def free_name(wanted: Path) -> Path:
    """Remove the leftover folder `wanted` and return its path, or the first free one with -2, -3, ..."""
    number = 1
    path = wanted
    while os.path.lexists(path):
        if is_real_folder(path):
            shutil.rmtree(path, ignore_errors=True)
        if os.path.lexists(path):
            number += 1
            path = wanted.with_name(f"{wanted.name}-{number}")
    return path


def is_real_folder(path: Path) -> bool:
    """Return whether a path is a folder and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def remove_leftovers(run: Path) -> list[str]:
    """Delete the remains of interrupted saves and deletes; return a line about each. Call it when nobody is saving."""
    lines = []
    folder = checkpoints_folder(run)
    if folder.is_dir():
        names = sorted(os.listdir(folder))
    else:
        names = []
    for path in (folder / name for name in names if LEFTOVER_NAME.fullmatch(name)):
        if not is_real_folder(path):
            continue
        try:
            shutil.rmtree(path)
            lines.append(f"removed {path.name}, left behind by an interrupted save")
        except OSError as error:
            lines.append(f"WARNING: {path}, left behind by an interrupted save, cannot be removed: {error.strerror}")
    return lines


def commit_checkpoint(
    run: Path,
    partial: Path,
    manifest: CheckpointManifest,
    state: Mapping[str, object],
    *,
    keep_last: int,
    keep_every: int,
    pieces: Pieces | None = None,
) -> list[str]:
    """Turn the folder `partial` into the run's checkpoint; its tensors are written and listed in `manifest`, or those
    of `pieces` if other disks have the rest. Others are deleted as `choose_expired` says.

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
            "not every checkpoint that expired is deleted",
            lambda: apply_retention(run, current(), keep_last, keep_every),
        ),
    )
    problems = []
    for what, action in afterwards:
        try:
            action()
        except (OSError, CheckpointError) as error:
            problems.append(f"{what}: {error}")
    return problems


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
