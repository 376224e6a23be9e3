"""A folder that appears complete or not at all, whatever kills the process that writes it."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from llmscale.errors import write_failure


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
