"""Locks that a killed build of a torch extension left behind: every later start would wait for them endlessly."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from llmscale.untrusted.paths import in_home

#: A younger lock that nobody here holds may belong to a build on another host.
STALE_LOCK_S = 120.0


def remove_stale_locks(since_s: float = float("inf")) -> list[str]:
    """Remove locks in torch's extension cache that no process of this host holds, and return their paths.

    They must be old, or not older than `since_s` (Unix time), when processes began that have ended now.
    """
    removed = []
    # A folder with one subfolder per Python and CUDA version, unless a variable names it.
    cache = in_home(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    for path in (*folder.glob("*/lock"), *folder.glob("*/*/lock")):
        with contextlib.suppress(FileNotFoundError):  # the build has ended in between
            made_s = path.stat().st_mtime
            if (time.time() - made_s > STALE_LOCK_S or made_s >= since_s) and not _is_held(path):
                path.unlink()
                removed.append(str(path))
    return removed


def _is_held(lock: Path) -> bool:
    """Return whether a process of this host has the file open, as torch does while it builds."""
    name = os.path.realpath(lock)
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):  # closed in between
                    if os.readlink(f"/proc/{process}/fd/{descriptor}") == name:
                        return True
    return False
