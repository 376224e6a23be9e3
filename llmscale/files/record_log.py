"""A log of lines that survives a full disk: records wait in memory until they can be written."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from llmscale.untrusted.paths import open_own

#: Bytes at the end of a file in which the last line must begin.
_TAIL_BYTES = 1 << 20
#: Most records that wait for the disk: some 20 MB.
_MOST_WAITING = 20_000


class RecordLog:
    """Appends records, each completely or not at all. A failing disk raises nothing: training continues.

    Records that the disk refuses wait in memory for the next one, the oldest only while they are few. `warn` gets one
    line when they begin to wait, one when the first is dropped, and one at the end if some are missing.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._num_dropped = 0
        self._is_failing = False

    def append(self, record: bytes) -> None:
        """Add one record. The caller includes the newline."""
        if len(self._waiting) == _MOST_WAITING:
            if not self._num_dropped:
                self._warn(f"WARNING: {self._path}: {_MOST_WAITING:,} records wait; older ones are dropped.")
            self._num_dropped += 1
        self._waiting.append(record)
        self._write_waiting()

    def close(self) -> None:
        """Write the waiting records, make all durable, and report the missing ones."""
        self._write_waiting()
        if missing := len(self._waiting) + self._num_dropped:
            self._warn(f"WARNING: {self._path} lacks records that the disk refused: {missing}.")
        if self._descriptor is None:
            return
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            # Network file systems report a full disk only here.
            self._warn(f"WARNING: {self._path}: its newest records may be lost: {error.strerror or error}.")
        os.close(self._descriptor)
        self._descriptor = None

    def _write_waiting(self) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = _open_at_last_line(self._path)
            _append(self._descriptor, b"".join(self._waiting))
        except OSError as error:
            if not self._is_failing:
                self._warn(
                    f"WARNING: {self._path} cannot be written: {error.strerror or error}. Training continues; new "
                    "records wait in memory until the file can be written again."
                )
            self._is_failing = True
        else:
            self._waiting.clear()
            self._is_failing = False


def _open_at_last_line(path: Path) -> int:
    """Open a log, and cut off the part of a line that a killed process left."""
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    os.ftruncate(descriptor, size - len(tail.rpartition(b"\n")[2]))
    return descriptor


def _append(descriptor: int, content: bytes) -> None:
    """Append everything, or nothing: readers never see part of a line."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, end)
        raise
