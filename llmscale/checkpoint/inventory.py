"""Which of a run's checkpoints belong to its current history, and which were left behind. No torch.

A run that goes back to an earlier checkpoint begins a new history, as a database that is restored begins a new
timeline. A history has a number and the branches that lead to it: (1, 20) says that history 1 counts up to step 20.
Every manifest names the history it was written in, and

    RUN/checkpoints/history.json    the current history, and the checkpoint it began from

is replaced, at once and for good, when a run goes back and before its first step. From there on the steps that it left
behind are abandoned: kept, listed, and never resumed, counted or deleted unless the user says so. Checkpoints from
before there were histories are of history 1.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from llmscale.checkpoint.manifest import (
    CHECKPOINT_NAME,
    CHECKPOINTS_NAME,
    MANIFEST_NAME,
    STATE_NAME,
    CheckpointManifest,
    History,
    checkpoint_name,
    checkpoints_folder,
    hash_json,
    is_whole,
    load_manifest,
    parse_history,
    signed_body,
    step_of,
)
from llmscale.errors import CheckpointError
from llmscale.files.atomic_write import write_durably
from llmscale.untrusted.documents import Rules, load_json

HISTORY_NAME = "history.json"
#: What an interrupted save or delete leaves behind.
LEFTOVER_NAME = re.compile(r"\.step-\d+(\.old-\d+)?\.(partial|deleted)(-\d+)?", re.ASCII)
#: Names that ask to be explained when they are not ours; the rest (`latest`, notes) is nobody's business.
_LOOKS_LIKE_OURS = re.compile(r"\.?step-")


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose name and manifest agree. Its files are not verified."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def history(self) -> History:
        return self.manifest.history


@dataclass
class FoundCheckpoints:
    """Everything under a run's checkpoints/, the newest first."""

    history: History = field(default_factory=History)
    """The current one."""
    origin: str | None = None
    """The checkpoint that the current history began from; None when the run began at step 0 and never went back."""
    current: list[Checkpoint] = field(default_factory=list)
    """Of the current history."""
    abandoned: list[Checkpoint] = field(default_factory=list)
    """Of histories that were left."""
    damaged: list[tuple[Path, str]] = field(default_factory=list)
    """Checkpoints by their name that cannot be one, and why. To which history they belonged is not known."""
    passed_over: list[tuple[Path, str]] = field(default_factory=list)
    """Names that look like ours and are not, and why; never touched."""
    notes: list[str] = field(default_factory=list)
    """What else the user should know of: a record of the history that had to be guessed."""


def find_checkpoints(run: Path, history: History | None = None) -> FoundCheckpoints:
    """What a run has saved, as its current history sees it, or `history`. Raises CheckpointError when its folder is
    there and cannot be read: a run must not begin anew, or go back, because a disk did not answer."""
    found = FoundCheckpoints()
    readable: list[Checkpoint] = []
    for path in _entries(checkpoints_folder(run)):
        reason = _why_not_ours(path)
        if reason is not None:
            found.passed_over.append((path, reason))
        elif not LEFTOVER_NAME.fullmatch(path.name):
            try:
                readable.append(Checkpoint(path, load_manifest(path)))
            except CheckpointError as error:
                # Unless the run's own retention has deleted it this moment.
                if path.exists():
                    found.damaged.append((path, str(error)))
    # The canonical name comes before `.old-1`.
    readable.sort(key=lambda checkpoint: (-checkpoint.step, checkpoint.path.name))
    found.damaged.sort(key=lambda entry: entry[0].name, reverse=True)
    if history is None:
        _read_history(run, readable, found)
    else:
        found.history = history
    for checkpoint in readable:
        of_current = found.history.includes(checkpoint.history.number, checkpoint.step)
        is_replaced = any(known.step == checkpoint.step for known in found.current)
        (found.current if of_current and not is_replaced else found.abandoned).append(checkpoint)
    return found


def list_checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints of a run's current history, the newest first; not verified. Raises CheckpointError."""
    return [checkpoint.path for checkpoint in find_checkpoints(run).current]


def find_any_checkpoint(run: Path) -> Path | None:
    """One folder of a run that has the name of a checkpoint, of any history and in any state; the newest by its name.
    Reads no manifest. Raises CheckpointError."""
    ours = [
        path
        for path in _entries(checkpoints_folder(run))
        if _why_not_ours(path) is None and not LEFTOVER_NAME.fullmatch(path.name)
    ]
    return max(ours, key=lambda path: path.name, default=None)


def is_of_run(folder: Path, run: Path) -> bool:
    """Whether a checkpoint lies under a run's own checkpoints/."""
    try:
        return os.path.samefile(folder.resolve().parent, checkpoints_folder(run))
    except OSError:
        return False


def history_after(found: FoundCheckpoints, start: Path, run: Path) -> History:
    """The history that a start from the checkpoint `start` goes on in: the current one when that ends there, else a new
    one. `found` is what the run has saved."""
    number = 1 + max([found.history.number, *(saved.history.number for saved in [*found.current, *found.abandoned])])
    if not is_of_run(start, run):
        is_empty = not (found.current or found.abandoned or found.damaged)
        return found.history if is_empty and not found.history.branches else History(number)
    manifest = load_manifest(start)
    here = (manifest.history.number, manifest.step)
    begun_here = found.history.branches[-1:] == (here,)
    later = [saved for saved in found.current if saved.step > manifest.step]
    # What cannot be read may be readable again tomorrow, and must not be the newest then.
    unknown = [path for path, _ in found.damaged if step_of(path) > manifest.step]
    if found.history.includes(*here) and not later and (begun_here or not unknown):
        return found.history
    return History(number, (*manifest.history.branches, here))


def record_history(run: Path, history: History, origin: Path) -> None:
    """Make `history`, which begins from the checkpoint `origin`, the current one; durable when this returns. Raises
    OSError."""
    checkpoints_folder(run).mkdir(exist_ok=True)
    body = {
        **history.as_dict(),
        "began_from": str(origin),
        "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    text = json.dumps({"current": body, "xxh3_128": hash_json(body)}, indent=1)
    write_durably(checkpoints_folder(run) / HISTORY_NAME, text + "\n")


def report_passed_over(found: FoundCheckpoints, report: Callable[[str], None]) -> None:
    """One line for everything that has nearly the name of a checkpoint."""
    for path, reason in found.passed_over:
        report(f"WARNING: {path} is passed over: {reason}")
    for note in found.notes:
        report(f"WARNING: {note}")


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder of checkpoints and has, or nearly has, the name of one or of its leftovers."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be listed: {error.strerror}. Mend it, or name another --run folder."
        ) from None
    return [folder / name for name in sorted(names) if _LOOKS_LIKE_OURS.match(name)]


def _why_not_ours(path: Path) -> str | None:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    if not LEFTOVER_NAME.fullmatch(path.name) and (match is None or match[1] != checkpoint_name(int(match[2]))):
        return "not a name that train.py gives"
    if path.is_symlink():
        return "a link; to continue from where it leads, name that with --resume"
    if not path.is_dir():
        return "not a folder"
    return None


def _read_history(run: Path, readable: list[Checkpoint], found: FoundCheckpoints) -> None:
    """The current history by its record; without one by the manifests, which say it from its first checkpoint on."""
    found.history = max((saved.history for saved in readable), key=lambda history: history.number, default=History())
    path = checkpoints_folder(run) / HISTORY_NAME
    try:
        body = signed_body(load_json(path, Rules(CheckpointError, follow_links=False)), "current", str(path))
        found.history = parse_history(body.get("history"), body.get("branches"), str(path))
        found.origin = str(body.get("began_from"))
    except (FileNotFoundError, NotADirectoryError):
        return
    except CheckpointError as error:
        found.notes.append(
            f"{error} The newest history that saved a checkpoint, history "
            f"{found.history.number}, is taken for the current one; --resume PATH goes on with another."
        )


PINNED_NAME = "kept.json"
#: At a time: a run with a spike a day must not fill the disk. The oldest goes first.
MAX_PINNED = 4


def pinned_checkpoints(run: Path) -> dict[str, str]:
    """Folder name and reason, the oldest first. Raises CheckpointError when that cannot be read: then nothing may be
    deleted."""
    path = checkpoints_folder(run) / PINNED_NAME
    try:
        listed = load_json(path, Rules(CheckpointError, follow_links=False))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    for name, why in listed.items():
        if not CHECKPOINT_NAME.fullmatch(name) or not isinstance(why, str):
            raise CheckpointError(f"{path} names {name[:80]!r}, which is no checkpoint. Remove the file.")
    return {name: str(why) for name, why in listed.items()}


def pin_checkpoint(checkpoint: Path, why: str) -> None:
    """From now on retention leaves `checkpoint`, of a run's own, alone. Raises OSError, CheckpointError."""
    folder = checkpoint.parent
    kept = {name: known for name, known in pinned_checkpoints(folder.parent).items() if (folder / name).is_dir()}
    kept.setdefault(checkpoint.name, why)
    newest = dict(list(kept.items())[-MAX_PINNED:])
    write_durably(folder / PINNED_NAME, json.dumps(newest, indent=1) + "\n")


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
    kept = pinned_checkpoints(run)
    for checkpoint in choose_expired(find_checkpoints(run, history).current, keep_last, keep_every):
        if checkpoint.path.name not in kept:
            delete_checkpoint(checkpoint.path)


def prunable(found: FoundCheckpoints) -> list[Path]:
    """What no run needs to go on: abandoned checkpoints, and damaged ones that another has taken the place of."""
    replaced = [path for path, _ in found.damaged if was_set_aside(path)]
    return [*(checkpoint.path for checkpoint in found.abandoned), *replaced]


def was_set_aside(path: Path) -> bool:
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
