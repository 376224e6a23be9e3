"""Write a folder of prepared data: atomically, resumably, with rejected records in a file beside it."""

from __future__ import annotations

import fcntl
import glob
import io
import json
import os
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.data.prepare.sources.source import Rejected
from llmscale.data.shards.manifest import MANIFEST_NAME, Manifest, PrepareRequest, load_manifest
from llmscale.data.shards.verify_shards import check_files
from llmscale.errors import DataError, write_failure
from llmscale.files.atomic_write import write_durably


@contextmanager
def new_folder(out: Path, *, replace: bool) -> Iterator[Path]:
    """Yields a hidden sibling of `out` to write into; when the block ends well it becomes `out`.

    With `replace`, an existing `out` is put aside first and deleted afterwards. Siblings that dead processes
    left are removed. Raises DataError when `out` cannot be written or has appeared meanwhile.
    """
    made = [folder for folder in out.parents if not os.path.lexists(folder)]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        recover(out)
        partial = _sibling(out, "partial")
        partial.mkdir()
    except OSError as error:
        _remove_empty(made)
        raise write_failure(error, out) from None
    try:
        with _held(partial):
            yield partial
            sync_tree(partial)
            put_in_place(partial, out, replace=replace)
    except OSError as error:
        raise write_failure(error, out) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _remove_empty(made)


def _remove_empty(folders: list[Path]) -> None:
    """What was made for an `out` that did not come; the innermost first."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def recover(out: Path) -> None:
    """Clear up after killed processes: drop half-written siblings, bring back an `out` put aside."""
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
    """What another process writes just now to become `out`."""
    return next((partial for partial in _siblings(out, "partial") if _is_held(partial)), None)


def _siblings(out: Path, kind: str) -> list[Path]:
    """Of any host, whose name may have changed or be another container's."""
    return sorted(out.parent.glob(f".{glob.escape(out.name)}.{kind}-*-[0-9]*"))


def _sibling(out: Path, kind: str) -> Path:
    return out.parent / f".{out.name}.{kind}-{socket.gethostname()}-{os.getpid()}"


def put_in_place(partial: Path, out: Path, *, replace: bool) -> None:
    """Rename a finished folder of the same disk to `out`. Raises OSError; then an existing `out` is as it was."""
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
        _sync(out.parent)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Shows that a process works on the folder, whatever it is renamed to, until the block or the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks on folders: the name says who it is
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _is_held(folder: Path) -> bool:
    """Whether a process works on the folder; also where that cannot be told."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        before, _, pid = folder.name.rpartition("-")
        return not before.endswith(f"-{socket.gethostname()}") or _is_alive(pid)
    finally:
        os.close(descriptor)
    return False


def _is_alive(pid: str) -> bool:
    """Whether another process has this id; our own id can only be a dead process's from before."""
    if not pid.isdecimal() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sync_tree(folder: Path) -> None:
    """Make all files below durable."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


#: Raised when what is in the folder means something else.
_VERSION = 3
_REQUEST_NAME, _STATE_NAME, _LOCK_NAME = "request.json", "state.npz", "lock"


def work_folder_of(out: Path, purpose: str = "prepare") -> Path:
    """The folder in which `out` is prepared, or whatever the purpose is."""
    return out.parent / f".{out.name}.partial-{purpose}"


class WorkFolder:
    """A folder that this process holds."""

    def __init__(self, path: Path, request: Mapping[str, object]) -> None:
        """Raises OSError. What another request or another version left there is removed."""
        self.path = path
        self.replaced_other = False
        if not _is_for(path, request):
            self.replaced_other = (path / _REQUEST_NAME).exists()
            self.clear()
            write_durably(path / _REQUEST_NAME, json.dumps({"version": _VERSION, **request}))
        elif not self.has_state() or not self.set_folder.is_dir():
            # A set that is not here is in its place: the process was killed before it could remove the rest.
            self.begin_anew()

    @property
    def set_folder(self) -> Path:
        """What becomes the set, there from the beginning until it is moved into its place."""
        return self.path / "set"

    def clear(self, keep: str = "") -> None:
        """Remove all but one, and begin with an empty set."""
        for path in self.path.iterdir():
            if path.name in (_LOCK_NAME, keep):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.set_folder.mkdir()

    def begin_anew(self) -> None:
        """Forget what is done of the same request."""
        self.clear(keep=_REQUEST_NAME)

    def has_state(self) -> bool:
        return (self.path / _STATE_NAME).exists()

    def save_state(self, facts: Mapping[str, object], arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """All of it or nothing. Raises OSError."""
        buffer = io.BytesIO()
        np.savez(buffer, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8), **arrays)
        write_durably(self.path / _STATE_NAME, buffer.getvalue())

    def load_state(self) -> tuple[dict[str, object], dict[str, NDArray[np.generic]]] | None:
        """What was saved last; None when nothing was. Raises OSError, ValueError."""
        if not self.has_state():
            return None
        with np.load(self.path / _STATE_NAME, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        return json.loads(arrays.pop("facts").tobytes()), arrays


@contextmanager
def open_work_folder(out: Path, request: Mapping[str, object], purpose: str = "prepare") -> Iterator[WorkFolder]:
    """The folder in which `out` is prepared, for this process alone. It stays when the block fails after a state was
    saved; otherwise it is removed with the folders that were made for it.

    Raises DataError when `out` cannot be written or another process prepares it.
    """
    path = work_folder_of(out, purpose)
    made = [folder for folder in out.parents if not os.path.lexists(folder)]
    is_done = False
    try:
        path.mkdir(parents=True, exist_ok=True)
        with open(path / _LOCK_NAME, "ab") as lock:
            _take(lock.fileno(), out)
            work = WorkFolder(path, request)
            try:
                yield work
                is_done = True
            finally:
                if is_done or not work.has_state():
                    shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise write_failure(error, out) from error
    finally:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def is_begun(out: Path, request: Mapping[str, object], purpose: str) -> bool:
    """Whether an earlier command has left work on the same request."""
    return _is_for(work_folder_of(out, purpose), request)


def remove_finished(out: Path, purpose: str = "prepare") -> None:
    """Remove what a process left that was killed just after `out` was in place."""
    path = work_folder_of(out, purpose)
    with suppress(OSError), open(path / _LOCK_NAME, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)


def _take(lock: int, out: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(
            f"Another process writes {out} just now (on {socket.gethostname()} or a host that shares its disk). Wait "
            "for it, or choose another --out."
        ) from None
    except OSError:
        pass  # a file system without locks: nobody can tell


def _is_for(path: Path, request: Mapping[str, object]) -> bool:
    return _load_request(path) == {"version": _VERSION, **request}


def _load_request(path: Path) -> dict[str, object] | None:
    try:
        record = json.loads((path / _REQUEST_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


#: What sets are that were prepared before these were settings.
_BEFORE: PrepareRequest = {"tokens before a document": "", "--parse-special-tokens": False}


class Destination(ABC):
    """The place of one set."""

    beside: Path
    """A local path; what lies beside it is ours."""
    is_remote: bool = False

    @abstractmethod
    def find(self, request: PrepareRequest) -> Manifest | None:
        """The set, if it is there and answers the request; None when there is none. Raises DataError when anything else
        is there."""

    @abstractmethod
    def begin(self, work: WorkFolder, request: PrepareRequest) -> None:
        """Before any text is read, once nothing was found. Raises DataError."""

    @abstractmethod
    def keep_shard(self, path: Path) -> None:
        """A shard that is whole. Raises DataError."""

    @abstractmethod
    def finish(self, work: WorkFolder) -> None:
        """The set in the work folder is whole. Raises DataError, OSError."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything, in the middle too."""


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
                f"{out} exists and is not a prepared set, so it will not be replaced. Choose another --out."
            )
        if self._overwrite:
            return None
        manifest = load_manifest(out)
        check_same(manifest, request, str(out), "Replace it with --overwrite")
        for split in manifest.splits:
            check_files(out, split, manifest)
        return manifest

    def begin(self, work: WorkFolder, request: PrepareRequest) -> None:
        """Nothing shows until all of it does."""

    def keep_shard(self, path: Path) -> None:
        """It lies where it should."""

    def close(self) -> None:
        """Nothing is open."""

    def finish(self, work: WorkFolder) -> None:
        sync_tree(work.set_folder)
        put_in_place(work.set_folder, self.beside, replace=self._overwrite)


def check_same(manifest: Manifest, request: PrepareRequest, where: str, remedy: str) -> None:
    """Whether a set answers the request. Raises DataError when it does not."""
    # A set of an older version lacks settings that did not exist: what they were then, else what is asked now.
    different = describe_differences({**request, **_BEFORE, **manifest.request}, request)
    if different:
        raise DataError(
            f"{where} already holds a set of {manifest.source} prepared differently: {different}. {remedy}, or choose "
            "another --out."
        )


def describe_differences(there: PrepareRequest, request: PrepareRequest) -> str:
    """By flag; where equal contents lie does not matter."""
    names = ("--input", "--tokenizer")
    return "; ".join(
        f"{key} {there.get(key)!r} there, {value!r} now"
        for key, value in request.items()
        if key not in names and there.get(key) != value
    )


#: Of each record, how much is kept.
_KEPT_BYTES = 1 << 20


def rejected_path(out: Path) -> Path:
    """The file of records that are no documents, beside the set."""
    return out.parent / f"{out.name}.rejected.jsonl"


class Quarantine:
    """A file of JSON lines: where a record stood, why it is none, and its bytes (not UTF-8 as \\x..)."""

    def __init__(self, path: Path, most: int) -> None:
        self.path = path
        self.num_records = self.size_bytes = 0
        self._most = most

    def go_on(self, size_bytes: int, num_records: int) -> None:
        """Keep what an interrupted run has put there; what is behind is cut off, and an empty file removed.

        Raises DataError when it was allowed more than this one.
        """
        if num_records > self._most:
            raise DataError(
                f"{self.path} holds {num_records:,} records that were set aside before the interruption, more than "
                f"--max-rejected {self._most}. To go on, give --max-rejected {num_records} or more."
            )
        self.size_bytes, self.num_records = size_bytes, num_records
        if size_bytes:
            os.truncate(self.path, size_bytes)
        else:
            self.path.unlink(missing_ok=True)

    def add(self, rejected: Sequence[Rejected]) -> None:
        """Raises DataError beyond the limit, OSError."""
        if not rejected:
            return
        allowed = rejected[: self._most - self.num_records]
        if allowed:
            with open(self.path, "ab") as file:
                for record in allowed:
                    file.write(_line(record))
                file.flush()
                os.fsync(file.fileno())
                self.size_bytes = file.tell()
            self.num_records += len(allowed)
        if len(allowed) < len(rejected):
            raise TooManyRejected(rejected[len(allowed)], self._most)


class TooManyRejected(DataError):
    """More records are none than may be."""

    def __init__(self, first: Rejected, most: int) -> None:
        remedy = f"To set such records aside and go on, give --max-rejected {max(100, 10 * most)}"
        count = f" {most:,} were set aside before it, as many as may be." if most else ""
        super().__init__(f"{first.describe()}{count} {remedy}.")


def _line(record: Rejected) -> bytes:
    kept = record.contents[:_KEPT_BYTES].rstrip(b"\r\n").decode(errors="backslashreplace")
    return json.dumps({"where": record.where, "reason": record.reason, "contents": kept}).encode() + b"\n"
