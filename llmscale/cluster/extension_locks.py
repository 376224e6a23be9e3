"""Locks that a killed build of a torch extension left behind: every later start would wait for them for ever."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: A younger lock that nobody holds may be a build that begins or ends just now.
STALE_LOCK_S = 120.0


@dataclass(frozen=True)
class ExtensionLock:
    """A `lock` in torch's extension cache: whoever finds one waits until it is gone."""

    path: str
    age_s: float
    held: bool
    """Some process of this host has it open; a killed build leaves it behind closed."""


def extensions_folder() -> Path:
    """Where torch builds extensions; below it one folder per Python and CUDA version, unless the variable is set."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(cache).expanduser() / "torch_extensions"


def find_locks(folder: Path) -> Iterator[ExtensionLock]:
    """Every lock in the cache, at either depth."""
    open_files: set[str] | None = None
    for path in sorted([*folder.glob("*/lock"), *folder.glob("*/*/lock")]):
        with contextlib.suppress(FileNotFoundError):  # the build ended just now
            age_s = max(0.0, time.time() - path.stat().st_mtime)
            open_files = _open_files() if open_files is None else open_files
            yield ExtensionLock(str(path), age_s, os.path.realpath(path) in open_files)


def remove_stale_locks() -> list[str]:
    """Remove old locks that no process of this host has open (torch keeps its own open while it builds); their
    paths."""
    removed = []
    for lock in find_locks(extensions_folder()):
        if not lock.held and lock.age_s > STALE_LOCK_S:
            with contextlib.suppress(OSError):
                os.remove(lock.path)
                removed.append(lock.path)
    return removed


class HeldLocks:
    """Locks that some processes were seen to hold: when they are killed while they build, their locks stay."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def note(self, pids: Iterable[int]) -> None:
        """Look at what these processes have open."""
        for pid in pids:
            for path in _open_locks(pid):
                with contextlib.suppress(OSError):
                    self._seen[path] = _identity(path)

    def remove(self) -> list[str]:
        """Remove those that are still the same files. Call it when their holders are gone; the paths removed."""
        removed = []
        for path, identity in self._seen.items():
            with contextlib.suppress(OSError):
                if _identity(path) == identity:
                    os.remove(path)
                    removed.append(path)
        return removed


def _open_files() -> set[str]:
    """Paths that processes of this host have open, as far as we may look. torch keeps its lock open while it builds."""
    paths = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            paths.add(os.readlink(descriptor))
    return paths


def _open_locks(pid: int) -> list[str]:
    paths = []
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                paths.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return [path for path in paths if path.startswith(f"{extensions_folder()}/") and path.endswith("/lock")]


def _identity(path: str) -> tuple[int, int]:
    """A lock that was released and taken anew, by another host perhaps, is another file."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns
