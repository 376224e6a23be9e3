"""Where a set is prepared, or text cleaned by many machines: a hidden folder beside it that outlives a killed process,
so that the next one goes on.

`request.json` says what is prepared, `state.npz` how far it is; what the state does not know of is cut off. One process
at a time has the lock, which dies with it.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.errors import DataError, write_failure
from llmscale.files.whole import write_durably

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
