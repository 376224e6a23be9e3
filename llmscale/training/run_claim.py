"""This run's claim on its folder, which somebody may remove, rename or take over while it trains. No torch."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from llmscale.data.sample_log import FOLDER as SAMPLES_NAME
from llmscale.errors import ConfigError
from llmscale.training.failure import FAILURE_NAME
from llmscale.training.run_folder import (
    CONFIG_NAME,
    DS_CONFIG_NAME,
    LOCK_NAME,
    METRICS_NAME,
    ORIGIN_FOLDERS,
    STARTS_NAME,
    create_run_folder,
    lock_run_folder,
    remove_folders,
)

_FOLDERS = (SAMPLES_NAME, *ORIGIN_FOLDERS)
#: How long a network file system may take to show a new file to another host.
_VISIBLE_TRIES = 50
_VISIBLE_PAUSE_S = 0.1


class RunFolderClaim:
    """A run folder and the lock on it: one process takes it, every other rank sees that it is taken.

    A start that fails leaves no empty shell behind. From then on the claim knows whether the folder is still the one
    that was taken, and makes it again where it is gone. It is the same while its lock file is the one that was locked,
    or says the same: inode numbers change on some network file systems, and a copy that was put back is as good.
    """

    def __init__(self, run: Path, lock_name: str = LOCK_NAME) -> None:
        self._run, self._path = run, run / lock_name
        self._made: list[Path] = []
        self._lock: TextIO | None = None
        self._owner: str | None = None
        self._describe: Callable[[], None] = lambda: None

    def take(self) -> str:
        """Make the folder and lock it for this process. Returns what the lock file says of it; empty when it had no
        room for that. Raises ConfigError."""
        self._made = create_run_folder(self._run)
        self._lock = lock_run_folder(self._run, self._path.name)
        self._lock.seek(0)
        self._owner = self._lock.read()
        return self._owner

    def check_is_seen(self, owner: str) -> None:
        """Raise ConfigError unless another process, `owner`, has taken this folder, as this host sees it."""
        self._owner = owner
        # A network file system may show a new file late; listing the folder asks the server again.
        for _ in range(_VISIBLE_TRIES):
            with suppress(OSError):
                os.listdir(self._run)
                if not owner or self._path.read_text() == owner:
                    return
            time.sleep(_VISIBLE_PAUSE_S)
        raise ConfigError(
            f"--run {self._run} on host {platform.node()} is not the main rank's folder. Every rank must see the same "
            "one, on a file system that all nodes share: NFS, Lustre or the like"
        )

    def describe(self, action: Callable[[], None]) -> None:
        """Have `action` write what explains the run into the folder, now and whenever it has to be made again."""
        self._describe = action
        action()

    def find_loss(self) -> str | None:
        """What has become of the folder, in one line; None when it is there, or nobody has taken it."""
        if self._owner is None:
            return None
        try:
            if self._lock and os.path.samestat(os.stat(self._path), os.fstat(self._lock.fileno())):
                return None
            # Only now: whoever closes the file that it has locked gives up the lock.
            owner = self._path.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            gone = self._path if self._run.is_dir() else self._run
            return f"{gone} was removed or renamed during training; the next checkpoint makes it again"
        except OSError:
            # The disk does not answer. Writing will say so.
            return None
        if owner == self._owner:
            return None
        return (
            f"{self._run} is not this run's folder any more but that of {owner.strip() or 'another process'}: nothing "
            "is saved there. Move it away, and the next checkpoint makes a new one"
        )

    def check(self) -> None:
        """Raise OSError when what is written now would not lie in this run's folder."""
        loss = self.find_loss()
        if loss:
            raise OSError(loss)

    def renew(self, report: Callable[[str], None]) -> bool:
        """Make the folder again where it is gone, with the lock and all that explains the run; whether that was done.

        For the process that took it. What cannot be mended is left to `check`.
        """
        if self._lock is None or self.find_loss() is None or os.path.lexists(self._path):
            return False
        anew = RunFolderClaim(self._run, self._path.name)
        try:
            anew.take()
            anew.describe(self._describe)
        except (ConfigError, OSError) as error:
            # Half a run folder is none: the next checkpoint tries again.
            if anew._lock:
                self._path.unlink(missing_ok=True)
            anew.give_up()
            report(f"WARNING: the run folder is gone and cannot be made again: {error}")
            return False
        self._lock.close()
        self._lock, self._owner = anew._lock, anew._owner
        if anew._made:
            report(
                f"WARNING: {self._run} was removed or renamed during training. It is made again and what follows is "
                "saved there; earlier checkpoints and metrics are where it went"
            )
        else:
            report(f"WARNING: {self._path} was gone; {self._run} is claimed again")
        return True

    def give_up(self) -> None:
        """Release the lock, and remove it and the folders made for it when they hold nothing else.

        What a run in a new folder wrote about itself goes too: it never began.
        """
        own = {self._path.name}
        if self._made:
            own |= {CONFIG_NAME, DS_CONFIG_NAME, STARTS_NAME, METRICS_NAME, FAILURE_NAME, *_FOLDERS}
        with suppress(OSError):
            if self._lock and {path.name for path in self._run.iterdir()} <= own:
                for name in own & {*_FOLDERS}:
                    shutil.rmtree(self._run / name, ignore_errors=True)
                for name in own - {*_FOLDERS}:
                    (self._run / name).unlink(missing_ok=True)
        self.close()
        remove_folders(self._made)

    def close(self) -> None:
        """Release the lock; the folder stays as it is."""
        if self._lock:
            self._lock.close()
        self._lock = None
