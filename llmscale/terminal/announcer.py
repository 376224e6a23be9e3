"""What a program is busy with, on stderr: a line as it begins, and one every few seconds while it lasts."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from llmscale.terminal.colour import is_terminal

#: Nobody waits longer than 5 s for a line.
_REPEAT_S = 4.0
_STDERR = 2


class Announcer:
    """Announces one phase after the other; `is_silent` for all ranks but the main one."""

    def __init__(self, *, is_silent: bool = False) -> None:
        self._is_silent = is_silent
        self._changed = threading.Condition()
        self._words = ""
        self._thread: threading.Thread | None = None

    def begin(self, words: str, *, at_once: bool = True) -> None:
        """The next phase. Without `at_once` it is announced only when it takes long."""
        if self._is_silent:
            return
        if at_once:
            _say(f"{words} ...")
        with self._changed:
            self._words = words
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._repeat, daemon=True)
            self._thread.start()

    def end(self) -> None:
        """The last phase is over; a second call does nothing."""
        if self._thread is not None:
            with self._changed:
                self._words = ""
                self._changed.notify()
            self._thread.join()
            self._thread = None

    def _repeat(self) -> None:
        with self._changed:
            while words := self._words:
                began_s = time.monotonic()
                while not self._changed.wait(_REPEAT_S):
                    _say(f"still {words}: {time.monotonic() - began_s:.0f} s")


@contextmanager
def announced(words: str, *, at_once: bool = True, on_terminal_only: bool = False) -> Iterator[None]:
    """One phase."""
    announcer = Announcer(is_silent=on_terminal_only and not is_terminal(sys.stderr))
    announcer.begin(words, at_once=at_once)
    try:
        yield
    finally:
        announcer.end()


def _say(line: str) -> None:
    # Past Python's buffer: a process that is forked this moment would inherit its lock, locked for ever.
    with suppress(OSError):
        os.write(_STDERR, f"{line}\n".encode())
