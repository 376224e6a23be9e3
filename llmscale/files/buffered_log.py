"""A log that survives a full or failing disk: records wait in memory until they can be written; it never raises."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmscale.untrusted.paths import open_own

#: Most bytes of records that wait in memory for the disk; later ones are lost.
MOST_HELD_BYTES = 16 << 20
#: Pause between two attempts while the disk refuses.
_RETRY_S = 1.0
#: After an attempt longer than this, as on a network file system without its server, the pause is 20 times as long.
_SLOW_TRY_S = 0.05
_PAUSE_OVER_TRY = 20.0
#: Bytes at the end of a file in which the last line must begin.
_TAIL_BYTES = 1 << 20


@dataclass
class Missing:
    """A range of records that are not in the file."""

    first: int
    """Label of the first record."""
    last: int
    """Label of the last record."""
    why: str
    """Error message of the disk."""
    count: int = 1

    def describe(self, unit: str) -> str:
        records = f"{self.count} record{'s' * (self.count != 1)}"
        which = f"{unit} {self.first}" if self.first == self.last else f"{unit}s {self.first} to {self.last}"
        return f"{records} of {which} ({self.why})"


def warn_on_stderr(line: str) -> None:
    """Print a line on stderr, unbuffered."""
    print(line, file=sys.stderr, flush=True)


class BufferedLog:
    """Appends records, each with a number (`label`, such as its step) for messages.

    Records are written completely and in order, or not at all. While the disk refuses, they wait in memory. `warn` gets
    one line when writing begins to fail, one when it works again, and one at the end if records are missing.
    """

    def __init__(
        self,
        path: Path,
        *,
        warn: Callable[[str], None] = warn_on_stderr,
        unit: str = "step",
        are_lines: bool = True,
        most_held_bytes: int = MOST_HELD_BYTES,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the log. `unit` is the noun for labels; with `are_lines`, an unfinished last line is repaired.

        `check` is called before the file is opened, and raises OSError while `path` must not be written to.
        """
        self._path, self._warn, self._unit, self._are_lines = path, warn, unit, are_lines
        self._most_held_bytes, self._check = most_held_bytes, check
        self._descriptor = -1
        self._end = -1
        """Offset after the last complete record; -1 before the file was opened."""
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        self._waited: Missing | None = None
        """Records that have waited since writing began to fail."""
        self._error: str | None = None
        """Reason why the last attempt failed; None while writing works."""
        self._is_losing = False
        self._retry_at = 0.0
        self.lost: list[Missing] = []
        """Records dropped for lack of memory, or still waiting when the log was closed."""
        self._try()

    def append(self, record: bytes, label: int) -> None:
        """Add one record. The caller includes the newline."""
        if self._error is not None:
            self._note_waiting(label)
        if self._held_bytes + len(record) > self._most_held_bytes and self._held:
            self._lose(label)
        else:
            self._is_losing = False
            self._held.append((label, record))
            self._held_bytes += len(record)
        if self._error is None or time.monotonic() >= self._retry_at:
            self._try()

    def close(self) -> None:
        """Write the waiting records, fsync, and report the missing ones."""
        self._try()
        if self._descriptor >= 0:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                self._warn(f"WARNING: {self._path}: its newest records may be lost: {error.strerror or error}.")
        self._close_descriptor()
        if self._held:
            waiting = Missing(self._held[0][0], self._held[-1][0], self._error or "", len(self._held))
            self.lost = sorted([*self.lost, waiting], key=lambda missing: missing.first)
            self._held.clear()
        if self.lost:
            self._warn(f"WARNING: {self._path} lacks {self._describe_lost()}.")

    def _try(self) -> None:
        """Write the waiting records until the disk refuses."""
        began = time.monotonic()
        try:
            if not self._is_open():
                self._open()
            while self._held:
                self._write(self._held[0][1])
                self._held_bytes -= len(self._held.popleft()[1])
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            # Opened again next time: the descriptor may be stale, and its file deleted.
            self._close_descriptor()
            took_s = time.monotonic() - began
            pause_s = _PAUSE_OVER_TRY * took_s if took_s > _SLOW_TRY_S else _RETRY_S
            self._retry_at = time.monotonic() + max(pause_s, _RETRY_S)
            self._begin_to_fail(error)
        else:
            self._recover()

    def _is_open(self) -> bool:
        """Return whether `path` still names the opened file, which may have been removed or renamed."""
        try:
            return self._descriptor >= 0 and os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        self._close_descriptor()
        self._check()
        self._descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT)
        size = os.fstat(self._descriptor).st_size
        if 0 <= self._end <= size:
            # Any further bytes are part of a record whose writing failed.
            os.ftruncate(self._descriptor, self._end)
            return
        if size < self._end:
            self._warn(f"WARNING: {self._path} was cut short or replaced: {self._end - size:,} bytes of it are gone.")
        self._end = size
        if self._are_lines:
            self._mend_last_line()

    def _mend_last_line(self) -> None:
        """Add a missing newline to the last line, or cut off the JSON object that a killed process left unfinished."""
        begin = max(0, self._end - _TAIL_BYTES)
        *_, rest = os.pread(self._descriptor, self._end - begin, begin).split(b"\n")
        if not rest:
            return
        if rest.startswith(b"{") and not _is_json(rest):
            self._end -= len(rest)
            os.ftruncate(self._descriptor, self._end)
        else:
            self._write(b"\n")

    def _write(self, record: bytes) -> None:
        """Write the complete record; on an error `_end` stays unchanged."""
        rest, offset = memoryview(record), self._end
        while rest:
            written = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[written:], offset + written
        self._end = offset

    def _begin_to_fail(self, error: OSError) -> None:
        is_first, self._error = self._error is None, error.strerror or str(error)
        if is_first:
            self._warn(
                f"WARNING: {self._path} cannot be written: {self._error}. Training continues; new records wait in "
                "memory until the file can be written again."
            )
            for label, _ in self._held:
                self._note_waiting(label)

    def _recover(self) -> None:
        if self._error is None:
            return
        waited = f": {self._waited.describe(self._unit)} had to wait" if self._waited else ""
        lacks = f"It lacks {self._describe_lost()}" if self.lost else "Nothing is missing"
        self._warn(f"WARNING: {self._path} is written again{waited}. {lacks}.")
        self._error = self._waited = None

    def _note_waiting(self, label: int) -> None:
        if self._waited is None:
            self._waited = Missing(label, label, self._error or "")
        else:
            self._waited.last, self._waited.count = label, self._waited.count + 1

    def _lose(self, label: int) -> None:
        if self._is_losing:
            self.lost[-1].last, self.lost[-1].count = label, self.lost[-1].count + 1
        else:
            self.lost.append(Missing(label, label, self._error or ""))
        self._is_losing = True

    def _describe_lost(self) -> str:
        return ", ".join(missing.describe(self._unit) for missing in self.lost)

    def _close_descriptor(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
