"""Progress on stderr: an updated bar on a terminal, a new line every 10 s in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmscale.terminal.colour import can_redraw, terminal_columns
from llmscale.terminal.human_numbers import format_duration
from llmscale.untrusted.terminal import make_visible

_LINE_INTERVAL_S = 10.0
_TERMINAL_INTERVAL_S = 0.2
#: Work that ends sooner shows nothing.
_FIRST_SHOWN_S = 1.0
_BAR_WIDTH = 20
_TERMINAL_WIDTH = 100


def bytes_words(number: float) -> str:
    """Format a number of bytes as megabytes."""
    if number >= 1e7 or not number:
        return f"{number / 1e6:,.0f} MB"
    return f"{number / 1e6:,.1f} MB"


class Progress:
    """Amount done, rate and, if the total is known, the time left. Made by `show_progress`."""

    def __init__(self, label: str, total: int | None, words: Callable[[float], str], *, on_terminal: bool) -> None:
        self._label = label
        self._total = total
        self._words = words
        self._done = 0
        self._on_terminal = on_terminal
        self._start_s = time.monotonic()
        self._next_s = self._start_s + (_FIRST_SHOWN_S if on_terminal else _LINE_INTERVAL_S)
        self._first: tuple[int, int] | None = None

    def add(self, number: int) -> None:
        """Count `number` more bytes or items as done."""
        self._done += number
        self._first = (0, 0)
        self.show(self._done, self._done, self._total)

    def show(self, done: int, place: int, end: int | None, detail: str = "") -> None:
        """Show `done` units of work. `place` and `end`, in any unit, give the fraction that is complete."""
        now_s = time.monotonic()
        if self._first is None:
            # A resumed run does not begin at 0.
            self._first = (done, place)
        if now_s < self._next_s:
            return
        self._next_s = now_s + (_TERMINAL_INTERVAL_S if self._on_terminal else _LINE_INTERVAL_S)
        elapsed_s = now_s - self._start_s
        parts = [self._words(done), f"{self._words((done - self._first[0]) / elapsed_s)}/s"]
        if detail:
            parts.insert(1, detail)
        if end:
            fraction = min(place / end, 1)
            parts.append(f"{fraction:.0%}")
            advanced = place - self._first[1]
            if advanced > 0:
                parts.append(f"{format_duration(max(end - place, 0) * elapsed_s / advanced)} left")
            if self._on_terminal:
                filled = round(fraction * _BAR_WIDTH)
                parts[0] = f"[{'#' * filled}{'-' * (_BAR_WIDTH - filled)}] {parts[0]}"
        self._print(f"{self._label}: {', '.join(parts)}")

    def say(self, line: str) -> None:
        """Print a line that stays on the screen."""
        self.clear()
        print(line, file=sys.stderr, flush=True)

    def _print(self, line: str) -> None:
        if self._on_terminal:
            # A line that the terminal wraps could not be cleared.
            print(
                f"\r\x1b[2K{line[: (terminal_columns(sys.stderr) or _TERMINAL_WIDTH) - 1]}",
                end="",
                file=sys.stderr,
                flush=True,
            )
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the bar."""
        if self._on_terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


@contextmanager
def show_progress(
    label: str, total: int | None = None, words: Callable[[float], str] = bytes_words
) -> Iterator[Progress]:
    """Show an updated bar if stderr is a terminal, otherwise a line every 10 s.

    `words` formats an amount, for the work done and for the rate; `total` is the amount at the end.
    """
    progress = Progress(make_visible(label)[:60], total, words, on_terminal=can_redraw(sys.stderr))
    try:
        yield progress
    finally:
        progress.clear()


def count_words(unit: str) -> Callable[[float], str]:
    """Return a function that formats an amount with its unit, such as "1,234 files"."""
    return lambda number: f"{number:,.0f} {unit}" if number >= 10 or number == int(number) else f"{number:,.1f} {unit}"
