"""A lock that keeps two processes from writing to one folder."""

from __future__ import annotations

import fcntl
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from llmscale.errors import ConfigError
from llmscale.untrusted.paths import open_own

#: Name of the lock in a run folder.
LOCK_NAME = ".lock"


def lock_folder(folder: Path, name: str = LOCK_NAME, *, named: str | None = None) -> TextIO:
    """Lock a folder for this process until the returned file is closed or the process ends. `named` is the folder in
    the user's words.

    A POSIX record lock: forked data workers do not inherit it, and network file systems support it. Raises ConfigError
    if another process holds it (two runs in one folder would overwrite each other's checkpoints), or if the file cannot
    be written.
    """
    path = folder / name
    what = named or str(folder)
    try:
        # For its owner alone: whoever can read a file can lock it.
        file = os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+")
        if not _lock(file):
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            raise ConfigError(f"{what} is in use by {owner}. Wait for it to end, or name another folder.")
    except OSError as error:
        raise ConfigError(f"{what}: {path.name} cannot be written: {error.strerror or error}.") from None
    with suppress(OSError):  # a full disk may have no space for the text; the lock holds without it
        os.ftruncate(file.fileno(), 0)
        # Not through the file's buffer: closing the file would try to write it again.
        os.write(file.fileno(), f"process {os.getpid()} on host {platform.node()}\n".encode())
    return file


def _lock(file: TextIO) -> bool:
    """Lock a file, and return False if another process holds the lock."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        return False
    except OSError:
        # This file system has no locks; train without one.
        pass
    return True
