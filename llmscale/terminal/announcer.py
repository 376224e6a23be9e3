"""Say on stderr what a program is busy with: one line that is updated on a terminal, a line now and then in a log."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from llmscale.terminal.colour import can_redraw, is_terminal

#: Nobody waits longer than 5 s for a line.
REPEAT_S = 4.0
#: What may be over at once, and then needs no word: by then one is due.
SOON_S = 1.5
_STDERR = 2


class Announcer:
    """Announces one phase after the other; `is_silent` for all ranks but the main one, `is_plain` for whole lines."""

    def __init__(self, *, is_silent: bool = False, is_plain: bool = False) -> None:
        self._is_silent, self._redraws = is_silent, not is_plain and can_redraw(sys.stderr)
        self._changed = threading.Condition()
        self._words, self._after_s = "", 0.0
        self._thread: threading.Thread | None = None

    def begin(self, words: str, *, after_s: float = 0.0) -> None:
        """The next phase, which is announced when it has lasted `after_s` seconds."""
        if self._is_silent:
            return
        if not after_s:
            self._say(f"{words} ...")
        with self._changed:
            self._words, self._after_s = words, after_s
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._repeat, daemon=True)
            self._thread.start()

    def clear(self) -> None:
        """Take the line from the terminal: something else is to be printed."""
        if not self._is_silent and self._redraws:
            _write("\r\x1b[2K")

    def __enter__(self) -> Announcer:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the last phase; a second call does nothing."""
        if self._thread is not None:
            with self._changed:
                self._words = ""
                self._changed.notify()
            self._thread.join()
            self._thread = None
            self.clear()

    def _repeat(self) -> None:
        with self._changed:
            while words := self._words:
                began_s, is_announced, wait_s = time.monotonic(), not self._after_s, self._after_s or REPEAT_S
                while not self._changed.wait(wait_s):
                    self._say(f"still {words}: {time.monotonic() - began_s:.0f} s" if is_announced else f"{words} ...")
                    is_announced, wait_s = True, REPEAT_S

    def _say(self, line: str) -> None:
        if not self._redraws:
            _write(f"{line}\n")
            return
        import textwrap  # only here: every command would wait for it

        with suppress(OSError, ValueError):
            # A line that the terminal breaks cannot be taken back.
            line = textwrap.shorten(line, max(20, os.get_terminal_size(_STDERR).columns) - 1, placeholder=" ...")
        _write(f"\r\x1b[2K{line}")


@contextmanager
def announced(
    words: str, *, after_s: float = 0.0, on_terminal_only: bool = False, is_plain: bool = False
) -> Iterator[None]:
    """Announce one phase."""
    with Announcer(is_silent=on_terminal_only and not is_terminal(sys.stderr), is_plain=is_plain) as announcer:
        announcer.begin(words, after_s=after_s)
        yield


def _write(text: str) -> None:
    # Past Python's buffer: a process that is forked this moment would inherit its lock, locked for ever.
    with suppress(OSError):
        os.write(_STDERR, text.encode())
