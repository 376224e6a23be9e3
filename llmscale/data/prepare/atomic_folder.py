"""A folder that appears complete or not at all, whatever kills the process that writes it."""

from __future__ import annotations

import glob
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmscale.errors import DataError


@contextmanager
def new_folder(out: Path, *, replace: bool) -> Iterator[Path]:
    """Yields a hidden sibling of `out` to write into; when the block ends well it becomes `out`.

    With `replace`, an existing `out` is put aside first and deleted afterwards. Siblings that dead processes
    of this host left are removed. Raises DataError when `out` cannot be written or has appeared meanwhile.
    """
    made = [folder for folder in out.parents if not os.path.lexists(folder)]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        recover(out)
        partial = _sibling(out, "partial")
        partial.mkdir()
    except OSError as error:
        _remove_empty(made)
        raise DataError(f"Cannot write {out}: {error.strerror}.") from None
    try:
        yield partial
        sync_tree(partial)
        put_in_place(partial, out, replace=replace)
    except OSError as error:
        raise DataError(f"Cannot write {out}: {error.strerror or error}.") from error
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
            if _is_alive(leftover.name.rpartition("-")[2]):
                continue
            if kind == "replaced" and not out.exists():
                os.rename(leftover, out)
            else:
                shutil.rmtree(leftover, ignore_errors=True)


def find_writer(out: Path) -> Path | None:
    """What another process of this host writes just now to become `out`."""
    return next((partial for partial in _siblings(out, "partial") if _is_alive(partial.name.rpartition("-")[2])), None)


def _siblings(out: Path, kind: str) -> list[Path]:
    return sorted(out.parent.glob(f".{glob.escape(out.name)}.{kind}-{glob.escape(socket.gethostname())}-*"))


def _sibling(out: Path, kind: str) -> Path:
    return out.parent / f".{out.name}.{kind}-{socket.gethostname()}-{os.getpid()}"


def put_in_place(partial: Path, out: Path, *, replace: bool) -> None:
    """Rename a finished folder of the same disk to `out`. Raises OSError; then an existing `out` is as it was."""
    aside = _sibling(out, "replaced")
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
