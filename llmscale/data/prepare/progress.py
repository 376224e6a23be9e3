"""Progress on stderr: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LINE_INTERVAL_S = 15.0


class Progress:
    """Counts units done; shown by `show_progress`."""

    def __init__(self, label: str, unit: str) -> None:
        self._label = label
        self._unit = unit
        self._done = 0
        self._start_s = self._shown_s = time.monotonic()

    def add(self, count: int) -> None:
        self._done += count
        now_s = time.monotonic()
        if now_s - self._shown_s >= _LINE_INTERVAL_S:
            self._shown_s = now_s
            rate = self._done / (now_s - self._start_s)
            print(f"{self._label}: {self._done:,} {self._unit}, {rate:,.0f}/s", file=sys.stderr, flush=True)


class _Bar(Progress):
    """The same through tqdm."""

    def __init__(self, label: str, unit: str) -> None:
        from tqdm import tqdm

        super().__init__(label, unit)
        self._bar = tqdm(desc=label, unit=unit, unit_scale=True, file=sys.stderr)

    def add(self, count: int) -> None:
        self._bar.update(count)

    def close(self) -> None:
        self._bar.close()


@contextmanager
def show_progress(label: str, unit: str) -> Iterator[Progress]:
    """A bar when stderr is a terminal, otherwise a line every 15 s."""
    if not sys.stderr.isatty():
        yield Progress(label, unit)
        return
    bar = _Bar(label, unit)
    try:
        yield bar
    finally:
        bar.close()
