"""Locks that a killed build of a torch extension left behind: every later start would wait for them endlessly."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llmscale.untrusted.paths import in_home

#: A younger lock that nobody holds may belong to a build that is beginning or ending.
STALE_LOCK_S = 120.0


@dataclass(frozen=True)
class ExtensionLock:
    """A `lock` file in torch's extension cache: every process that finds one waits until it is removed."""

    path: str
    age_s: float
    held: bool
    """True while a process of this host has it open. A killed build leaves it closed."""


def extensions_folder() -> Path:
    """Return torch's folder of built extensions: one subfolder per Python and CUDA version, unless the variable is set.

    The variable is TORCH_EXTENSIONS_DIR.
    """
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return in_home(cache) / "torch_extensions"


def find_locks(folder: Path) -> Iterator[ExtensionLock]:
    """Yield every lock in the cache, at either depth."""
    open_files: set[str] | None = None
    for path in sorted([*folder.glob("*/lock"), *folder.glob("*/*/lock")]):
        with contextlib.suppress(FileNotFoundError):  # the build has ended in between
            age_s = max(0.0, time.time() - path.stat().st_mtime)
            if open_files is None:
                open_files = _open_files(filter(str.isdigit, os.listdir("/proc")))
            yield ExtensionLock(str(path), age_s, os.path.realpath(path) in open_files)


def remove_stale_locks() -> list[str]:
    """Remove old locks that no process of this host has open, and return their paths.

    torch keeps a lock open while it builds.
    """
    removed = []
    for lock in find_locks(extensions_folder()):
        if not lock.held and lock.age_s > STALE_LOCK_S:
            with contextlib.suppress(OSError):
                os.remove(lock.path)
                removed.append(lock.path)
    return removed


class HeldLocks:
    """Locks that given processes were seen to hold. If the processes are killed while they build, the locks remain."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def note(self, pids: Iterable[int]) -> None:
        """Record the locks that these processes have open now."""
        folder = f"{extensions_folder()}/"
        for path in _open_files(map(str, pids)):
            if path.startswith(folder) and path.endswith("/lock"):
                with contextlib.suppress(OSError):
                    self._seen[path] = _identity(path)

    def remove(self) -> None:
        """Remove the locks that are still the same files. Call it when their holders have ended."""
        for path, identity in self._seen.items():
            with contextlib.suppress(OSError):
                if _identity(path) == identity:
                    os.remove(path)


def _open_files(pids: Iterable[str]) -> set[str]:
    """Return the paths that processes of this host have open, as far as permissions allow."""
    paths = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    paths.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return paths


def _identity(path: str) -> tuple[int, int]:
    """Return values that change if the lock is released and taken again, perhaps by another host."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns
