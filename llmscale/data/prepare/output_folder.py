"""Write an output folder atomically and resumably, with rejected records in a file beside it."""

from __future__ import annotations

import base64
import fcntl
import glob
import json
import os
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmscale.data.prepare.sources.source import Rejected
from llmscale.data.shards.manifest import MANIFEST_NAME, Manifest, PrepareRequest, load_manifest
from llmscale.data.shards.verify_shards import check_files
from llmscale.errors import DataError, write_failure
from llmscale.files.atomic_write import sync_path, write_durably

#: Incremented when the meaning of the folder's files changes.
_VERSION = 7
_REQUEST_NAME = "request.json"
_STATE_NAME = "state.json"
_LOCK_NAME = "lock"
_ARRAY_KEY = "llmscale array"
#: Bytes kept of each record.
_KEPT_BYTES = 1 << 20


@contextmanager
def new_folder(out: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a hidden sibling of `out` to write into, which becomes `out` when the block succeeds.

    With `replace`, an existing `out` is renamed first and deleted afterwards. Siblings of dead processes are removed.
    Raises DataError when `out` is not writable or has appeared meanwhile.
    """
    with _folders_above(out):
        recover(out)
        partial = _sibling(out, "partial")
        partial.mkdir()
        try:
            with _held(partial):
                yield partial
                sync_tree(partial)
                put_in_place(partial, out, replace=replace)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _folders_above(out: Path) -> Iterator[None]:
    """Make the folders above `out`; at the end those that were made and are empty are removed.

    Raises DataError for any OSError.
    """
    made = [folder for folder in out.parents if not os.path.lexists(folder)]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise write_failure(error, out) from error
    finally:
        with suppress(OSError):
            for folder in made:  # innermost first
                folder.rmdir()


def recover(out: Path) -> None:
    """Clean up after killed processes: remove half-written siblings, restore a renamed `out`."""
    if not out.parent.is_dir():
        return
    for kind in ("partial", "replaced"):
        for leftover in _siblings(out, kind):
            if _is_held(leftover):
                continue
            if kind == "replaced" and not out.exists():
                os.rename(leftover, out)
            else:
                shutil.rmtree(leftover, ignore_errors=True)


def find_writer(out: Path) -> Path | None:
    """Return the folder in which another live process is writing `out`, or None."""
    return next((partial for partial in _siblings(out, "partial") if _is_held(partial)), None)


def _siblings(out: Path, kind: str) -> list[Path]:
    """Return siblings of all hosts: host names change, and containers have others."""
    return sorted(out.parent.glob(f".{glob.escape(out.name)}.{kind}-*-[0-9]*"))


def _sibling(out: Path, kind: str) -> Path:
    return out.parent / f".{out.name}.{kind}-{socket.gethostname()}-{os.getpid()}"


def put_in_place(partial: Path, out: Path, *, replace: bool) -> None:
    """Rename a finished folder on the same disk to `out`. Raises OSError; then an existing `out` is unchanged."""
    aside = _sibling(out, "replaced")
    with _held(out) if replace and out.exists() else nullcontext():
        if replace and out.exists():
            os.rename(out, aside)
        try:
            os.rename(partial, out)
        except OSError:
            if aside.exists() and not out.exists():
                os.rename(aside, out)
            raise
        sync_path(out.parent)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock the folder, whatever it is renamed to, until the block or the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _is_held(folder: Path) -> bool:
    """Return whether a live process holds the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    is_free = _lock(descriptor)
    os.close(descriptor)
    return not is_free


def _lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed. Return False if another process holds it; never on a file system
    without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def sync_tree(folder: Path) -> None:
    """Flush all files below to disk."""
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


def work_folder_of(out: Path, purpose: str = "prepare") -> Path:
    """Return the folder in which `out` is made."""
    return out.parent / f".{out.name}.partial-{purpose}"


class WorkFolder:
    """A work folder that this process has locked."""

    def __init__(self, path: Path, request: Mapping[str, object]) -> None:
        """Open the folder; work of another request or version is removed. Raises OSError."""
        self.path = path
        self.replaced_other = False
        if not _is_for(path, request):
            self.replaced_other = (path / _REQUEST_NAME).exists()
            self.clear()
            write_durably(path / _REQUEST_NAME, json.dumps({"version": _VERSION, **request}))
        elif not self.has_state() or not self.set_folder.is_dir():
            # Without the dataset folder, the last process was killed after moving it into place.
            self.begin_anew()

    @property
    def set_folder(self) -> Path:
        """Folder that becomes the dataset; it exists until it is moved into place."""
        return self.path / "set"

    def clear(self, keep: str = "") -> None:
        """Remove everything except `keep` and the lock, and start with an empty dataset folder."""
        for path in self.path.iterdir():
            if path.name in (_LOCK_NAME, keep):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.set_folder.mkdir()

    def begin_anew(self) -> None:
        """Discard all work on the same request."""
        self.clear(keep=_REQUEST_NAME)

    def has_state(self) -> bool:
        return (self.path / _STATE_NAME).exists()

    def save_state(self, facts: Mapping[str, object]) -> None:
        """Save JSON values and arrays of one dimension, at any depth, atomically. Raises OSError."""

        def describe(array: NDArray[np.generic]) -> dict[str, str]:
            return {_ARRAY_KEY: array.dtype.str, "base64": base64.b64encode(array.tobytes()).decode()}

        write_durably(self.path / _STATE_NAME, json.dumps(facts, default=describe))

    def load_state(self) -> dict[str, Any] | None:
        """Return the state saved last, or None. Raises OSError, ValueError."""
        if not self.has_state():
            return None

        def restore(value: dict[str, Any]) -> object:
            if _ARRAY_KEY not in value:
                return value
            return np.frombuffer(base64.b64decode(value["base64"]), value[_ARRAY_KEY]).copy()

        facts: dict[str, Any] = json.loads((self.path / _STATE_NAME).read_bytes(), object_hook=restore)
        return facts


@contextmanager
def open_work_folder(out: Path, request: Mapping[str, object], purpose: str = "prepare") -> Iterator[WorkFolder]:
    """Open the work folder of `out` for this process alone. If the block fails after a state was saved, the folder
    stays; otherwise it is removed, with parent folders made for it.

    Raises DataError when `out` is not writable or another process is writing it.
    """
    path = work_folder_of(out, purpose)
    with _folders_above(out):
        path.mkdir(exist_ok=True)
        with open(path / _LOCK_NAME, "ab") as lock:
            if not _lock(lock.fileno()):
                raise DataError(
                    f"Another process is writing {out} (on {socket.gethostname()} or a host that shares its disk). "
                    "Wait for it, or choose another --out."
                )
            work = WorkFolder(path, request)
            is_done = False
            try:
                yield work
                is_done = True
            finally:
                if is_done or not work.has_state():
                    shutil.rmtree(path, ignore_errors=True)


def remove_finished(out: Path, purpose: str = "prepare") -> None:
    """Remove the work folder of a process that was killed after `out` was in place."""
    path = work_folder_of(out, purpose)
    with suppress(OSError), open(path / _LOCK_NAME, "ab") as lock:
        if _lock(lock.fileno()):
            shutil.rmtree(path, ignore_errors=True)


def _is_for(path: Path, request: Mapping[str, object]) -> bool:
    try:
        return bool(json.loads((path / _REQUEST_NAME).read_bytes()) == {"version": _VERSION, **request})
    except (OSError, ValueError):
        return False


class Destination(ABC):
    """The place of a dataset. Nothing is done there before `finish` unless a subclass does it."""

    beside: Path
    """Local path; files beside it are the command's."""
    is_remote: bool = False

    @abstractmethod
    def find(self, request: PrepareRequest) -> Manifest | None:
        """Return the dataset if it exists and matches the request, None if nothing exists. Raises DataError for
        anything else."""

    def begin(self, work: WorkFolder, request: PrepareRequest) -> None:  # noqa: B027
        """Start a dataset before any text is read. Raises DataError."""

    def keep_shard(self, path: Path) -> None:  # noqa: B027
        """Take a finished shard. Raises DataError."""

    @abstractmethod
    def finish(self, work: WorkFolder) -> None:
        """Publish the finished dataset in the work folder. Raises DataError, OSError."""

    def close(self) -> None:  # noqa: B027
        """Release all resources, also after a failure."""


class LocalFolder(Destination):
    """A folder that appears in one move."""

    def __init__(self, out: Path, *, overwrite: bool) -> None:
        self.beside = out
        self._overwrite = overwrite

    def find(self, request: PrepareRequest) -> Manifest | None:
        out = self.beside
        recover(out)
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return None
        if not (out / MANIFEST_NAME).is_file():
            raise DataError(
                f"{out} exists and is not a prepared dataset, so it will not be replaced. Choose another --out."
            )
        if self._overwrite:
            return None
        manifest = load_manifest(out)
        check_same(manifest, request, str(out))
        for split in manifest.splits:
            check_files(out, split, manifest)
        return manifest

    def finish(self, work: WorkFolder) -> None:
        sync_tree(work.set_folder)
        put_in_place(work.set_folder, self.beside, replace=self._overwrite)


def check_same(manifest: Manifest, request: PrepareRequest, where: str) -> None:
    """Raise DataError unless a dataset matches the request."""
    different = describe_differences(manifest.request, request)
    if different:
        raise DataError(
            f"{where} already holds a dataset of {manifest.source} prepared differently: {different}. Replace it with "
            "--overwrite, or choose another --out."
        )


def describe_differences(there: Mapping[str, object], request: Mapping[str, object]) -> str:
    """Return the differences by flag; the location of equal contents does not count."""
    names = ("--input", "--tokenizer", "--decontaminate")
    return "; ".join(
        f"{key} {there.get(key)!r} there, {value!r} now"
        for key, value in request.items()
        if key not in names and there.get(key) != value
    )


def rejected_path(out: Path) -> Path:
    """Return the path of the file of rejected records, beside the dataset."""
    return out.parent / f"{out.name}.rejected.jsonl"


class RejectedRecords:
    """A JSON lines file of rejected records: position, reason and bytes (invalid UTF-8 as \\x..)."""

    def __init__(self, path: Path, most: int) -> None:
        self.path = path
        self.num_records = self.size_bytes = 0
        self._most = most

    def resume(self, size_bytes: int, num_records: int) -> None:
        """Keep an interrupted run's records, truncate the file after them, and remove an empty file.

        Raises DataError when they exceed this run's limit.
        """
        if num_records > self._most:
            raise DataError(
                f"{self.path} holds {num_records:,} records that were rejected before the interruption, more than "
                f"--max-rejected {self._most}. To resume, give --max-rejected {num_records} or more."
            )
        self.size_bytes = size_bytes
        self.num_records = num_records
        if size_bytes:
            os.truncate(self.path, size_bytes)
        else:
            self.path.unlink(missing_ok=True)

    def add(self, rejected: Sequence[Rejected]) -> None:
        """Append records. Raises DataError beyond the limit, OSError."""
        if not rejected:
            return
        allowed = rejected[: self._most - self.num_records]
        if allowed:
            with open(self.path, "ab") as file:
                for record in allowed:
                    contents = record.contents[:_KEPT_BYTES].rstrip(b"\r\n").decode(errors="backslashreplace")
                    line = json.dumps({"where": record.where, "reason": record.reason, "contents": contents})
                    file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
                self.size_bytes = file.tell()
            self.num_records += len(allowed)
        if len(allowed) < len(rejected):
            first = rejected[len(allowed)]
            if self._most:
                count = f" {self._most:,} were rejected before it, the limit."
            else:
                count = ""
            remedy = f"To skip such records, give --max-rejected {max(100, 10 * self._most)}"
            remedy += " or --skip-undecodable" * first.is_undecodable
            raise DataError(f"{first.describe()}{count} {remedy}.")
