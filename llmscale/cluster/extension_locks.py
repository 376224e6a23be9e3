"""Locks that a killed build of a torch extension left behind: every later start would wait for them for ever."""

from __future__ import annotations

import contextlib
import os

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
