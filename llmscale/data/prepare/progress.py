"""Progress on stderr: a line that renews itself on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from llmscale.untrusted.terminal import make_visible

_LINE_INTERVAL_S = 15.0
_TERMINAL_INTERVAL_S = 0.2


class Progress:
    """What has been done, how fast, and when it will be over where that can be known; shown by `show_progress`."""

    def __init__(self, label: str, total_bytes: int | None, *, on_terminal: bool) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._on_terminal = on_terminal
        self._start_s = self._shown_s = time.monotonic()
        self._first: tuple[int, int] | None = None

    def add(self, num_bytes: int) -> None:
        """So many more bytes are done."""
        self._done_bytes += num_bytes
        self.show(self._done_bytes, self._done_bytes, self._total_bytes)

    def show(self, done_bytes: int, place: int, end: int | None, detail: str = "") -> None:
        """`done_bytes` is the work that the rate counts; `place` of `end`, in any unit, says how much is left."""
        now_s = time.monotonic()
        if self._first is None:
            self._first = (done_bytes, place)
        if now_s - self._shown_s < (_TERMINAL_INTERVAL_S if self._on_terminal else _LINE_INTERVAL_S):
            return
        self._shown_s = now_s
        elapsed_s = now_s - self._start_s
        parts = [f"{done_bytes / 1e6:,.0f} MB", f"{(done_bytes - self._first[0]) / elapsed_s / 1e6:,.1f} MB/s"]
        if detail:
            parts.insert(1, detail)
        if end:
            parts.append(f"{min(place / end, 1):.0%}")
            gone = place - self._first[1]
            if gone > 0:
                parts.append(f"{describe_duration(max(end - place, 0) * elapsed_s / gone)} left")
        self._print(f"{self._label}: {', '.join(parts)}")

    def say(self, line: str) -> None:
        """A line that stays."""
        self.clear()
        print(line, file=sys.stderr, flush=True)

    def _print(self, line: str) -> None:
        if self._on_terminal:
            print(f"\r\x1b[2K{line[:200]}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._on_terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


@contextmanager
def show_progress(label: str, total_bytes: int | None = None) -> Iterator[Progress]:
    """A line that renews itself when stderr is a terminal, otherwise one every 15 s."""
    progress = Progress(make_visible(label)[:60], total_bytes, on_terminal=sys.stderr.isatty())
    try:
        yield progress
    finally:
        progress.clear()


def describe_duration(seconds: float) -> str:
    """Such as 2 h 05 min, 12 min or 40 s."""
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min" if seconds >= 90 else f"{seconds:.0f} s"
