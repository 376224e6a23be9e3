"""Death between any two file operations, as SIGKILL or a power cut would bring it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: Audit events of operations that change what is on disk.
_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}


class Killed(BaseException):
    """No handler of the program catches it."""


class Killer:
    """Lets a number of changes happen and none after that."""

    def __init__(self) -> None:
        self._left: int | None = None
        sys.addaudithook(self._watch)

    @contextmanager
    def after(self, changes: int) -> Iterator[list[bool]]:
        """The block dies before its next change on disk when `changes` have happened. Yields a list that says so when
        the block is over."""
        died: list[bool] = []
        self._left = changes
        try:
            yield died
        except Killed:
            died.append(True)
        finally:
            self._left = None

    def _watch(self, event: str, args: tuple) -> None:
        if self._left is None:
            return
        if event in _CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            if self._left == 0:
                raise Killed
            self._left -= 1
