"""Locks that a killed build of a torch extension left behind: every later start would wait for them for ever."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from llmscale.cluster.ops import STALE_LOCK_S
from llmscale.cluster.probe_system import extensions_folder, find_locks


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
