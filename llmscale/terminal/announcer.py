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
REPEAT_S = 4.0
#: What may be over at once, and then needs no word: by then one is due.
SOON_S = 1.5
_STDERR = 2


class Announcer:
    """Announces one phase after the other; `is_silent` for all ranks but the main one."""

    def __init__(self, *, is_silent: bool = False) -> None:
        self._is_silent = is_silent
        self._changed = threading.Condition()
        self._words, self._after_s = "", 0.0
        self._thread: threading.Thread | None = None

    def begin(self, words: str, *, after_s: float = 0.0) -> None:
        """The next phase, which is announced when it has lasted `after_s` seconds."""
        if self._is_silent:
            return
        if not after_s:
            _say(f"{words} ...")
        with self._changed:
            self._words, self._after_s = words, after_s
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
                began_s, is_announced, wait_s = time.monotonic(), not self._after_s, self._after_s or REPEAT_S
                while not self._changed.wait(wait_s):
                    _say(f"still {words}: {time.monotonic() - began_s:.0f} s" if is_announced else f"{words} ...")
                    is_announced, wait_s = True, REPEAT_S


@contextmanager
def announced(words: str, *, after_s: float = 0.0, on_terminal_only: bool = False) -> Iterator[None]:
    """One phase."""
    announcer = Announcer(is_silent=on_terminal_only and not is_terminal(sys.stderr))
    announcer.begin(words, after_s=after_s)
    try:
        yield
    finally:
        announcer.end()


def _say(line: str) -> None:
    # Past Python's buffer: a process that is forked this moment would inherit its lock, locked for ever.
    with suppress(OSError):
        os.write(_STDERR, f"{line}\n".encode())
