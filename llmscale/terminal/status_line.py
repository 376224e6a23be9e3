"""Report on stderr what a program is busy with: one updated line on a terminal, in a log a line for what lasts."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from llmscale.terminal.colour import can_redraw, is_terminal, terminal_columns

#: Seconds between two lines of one phase, so that nobody waits longer than 5 s for a sign of life.
REPEAT_S = 4.0
#: Seconds after which a log has a line on a phase, and between two of them.
LOG_S = 20.0
#: Delay in seconds for phases that are usually shorter than this and then need no line.
SOON_S = 1.5
_STDERR = 2
#: Columns of a terminal that does not tell.
_WIDTH = 80


@dataclass(frozen=True, eq=False)
class _Phase:
    """One phase: two of the same words are still two."""

    words: str
    after_s: float


class StatusLine:
    """Shows one phase after the other. `is_silent` is for all ranks but rank 0; `is_plain` forces separate lines."""

    def __init__(self, *, is_silent: bool = False, is_plain: bool = False) -> None:
        self._is_silent = is_silent
        self._redraws = not is_plain and can_redraw(sys.stderr)
        self._changed = threading.Condition()
        self._phase: _Phase | None = None
        self._thread: threading.Thread | None = None

    def begin(self, words: str, *, after_s: float = 0.0) -> None:
        """Begin the next phase. It is shown once it has lasted `after_s` seconds, in a log at least LOG_S."""
        if self._is_silent:
            return
        if not self._redraws:
            after_s = max(after_s, LOG_S)
        if not after_s:
            self._say(f"{words} ...")
        with self._changed:
            self._phase = _Phase(words, after_s)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._repeat, daemon=True)
            self._thread.start()

    def clear(self) -> None:
        """Remove the line from the terminal, so that something else can be printed."""
        if not self._is_silent and self._redraws:
            _write("\r\x1b[2K")

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the last phase. A second call does nothing."""
        if self._thread is not None:
            with self._changed:
                self._phase = None
                self._changed.notify()
            self._thread.join()
            self._thread = None
            self.clear()

    def _repeat(self) -> None:
        with self._changed:
            while phase := self._phase:
                repeat_s = REPEAT_S if self._redraws else LOG_S
                began_s = time.monotonic()
                is_shown = not phase.after_s
                wait_s = phase.after_s or repeat_s
                # A predicate: a notification that arrives while the wait times out is lost.
                while not self._changed.wait_for(partial(self._is_over, phase), wait_s):
                    self._say(
                        f"still {phase.words}: {time.monotonic() - began_s:.0f} s" if is_shown else f"{phase.words} ..."
                    )
                    is_shown = True
                    wait_s = repeat_s

    def _is_over(self, phase: _Phase) -> bool:
        return self._phase is not phase

    def _say(self, line: str) -> None:
        if not self._redraws:
            _write(f"{line}\n")
            return
        import textwrap  # slow to import, and not every command needs it

        # A line that the terminal wraps could not be cleared.
        line = textwrap.shorten(line, max(20, terminal_columns(sys.stderr) or _WIDTH) - 1, placeholder=" ...")
        _write(f"\r\x1b[2K{line}")


@contextmanager
def show_status(words: str, *, after_s: float = 0.0, is_plain: bool = False) -> Iterator[None]:
    """Show one phase while the block runs."""
    with StatusLine(is_plain=is_plain) as status:
        status.begin(words, after_s=after_s)
        yield


@contextmanager
def show_if_slow(words: str) -> Iterator[None]:
    """Show one phase while the block runs, on a terminal only, once it has lasted `SOON_S` seconds."""
    with StatusLine(is_silent=not is_terminal(sys.stderr)) as status:
        status.begin(words, after_s=SOON_S)
        yield


def _write(text: str) -> None:
    # Unbuffered: a process forked at this moment would inherit Python's buffer with its lock held.
    with suppress(OSError):
        os.write(_STDERR, text.encode())
