"""Output of the processes of one host: read without delay, logged within limits, and shown in part.

A rank that waits for its output to be read does not train, so a separate thread only reads. The excess of a flood is
dropped, and a line reports how much.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from llmscale.cluster.launch.protocol import Output
from llmscale.files.buffered_log import BufferedLog

#: Size at which a log is renamed LOG.1, replacing the earlier one: disk use is at most twice this.
LOG_BYTES = 64 << 20
#: Rate at which a flood is logged after LOG_BYTES: the disk is for checkpoints.
LOGGED_BYTES_PER_S = 2 << 20
#: Limits of what is shown between two calls of `RankOutput.read`. The newest lines are kept: a rank's last lines say
#: most.
SHOWN_BYTES = 1 << 16
SHOWN_LINES = 500
#: Bytes that are kept from the end of a dropped part: an error comes last.
KEPT_BYTES = 1 << 14
#: Bytes of each log that wait in memory while the disk refuses them.
MAX_HELD_BYTES = 4 << 20
#: Length from which a line is shown in pieces.
LINE_BYTES = 1 << 14
_READ_BYTES = 1 << 20
_PIPE_BYTES = 1 << 20
_STOP_S = 2.0


@dataclass
class _Stream:
    """One pipe, its log, and its lines to show."""

    rank: int | None
    """None for the launcher."""
    descriptor: int
    log: BoundedLog
    newest: bytes = b""
    num_dropped: int = 0
    """Bytes since the last call of `take` that are not in `newest`."""

    def add(self, data: bytes) -> None:
        self.newest += data
        excess = len(self.newest) - SHOWN_BYTES
        if excess > 0:
            self.newest, self.num_dropped = self.newest[excess:], self.num_dropped + excess

    def take(self, is_last: bool) -> list[str]:
        """Return the complete lines; with `is_last` also an unfinished one."""
        complete, newline, rest = self.newest.rpartition(b"\n")
        self.newest = rest
        texts = complete.split(b"\n") if newline else []
        if is_last or len(rest) > LINE_BYTES:
            texts += [rest] if rest else []
            self.newest = b""
        too_many, texts = texts[:-SHOWN_LINES], texts[-SHOWN_LINES:]
        self.num_dropped += sum(len(text) + 1 for text in too_many)
        lines = []
        if self.num_dropped:
            lines.append(f"[{self.num_dropped:,} bytes came too fast to be shown; see the log]")
            self.num_dropped = 0
        for text in texts:
            # One message holds one line: an endless one is sent in pieces.
            pieces = [text[begin : begin + LINE_BYTES] for begin in range(0, len(text), LINE_BYTES)] or [b""]
            lines += [piece.decode(errors="replace").rstrip("\r") for piece in pieces]
        return lines


class RankOutput:
    """Reads all pipes of a host in a thread, until `close`."""

    def __init__(self) -> None:
        self._streams: list[_Stream] = []
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._end = os.pipe()
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._drain, name="output", daemon=True)
        self._thread.start()

    def add(self, rank: int | None, descriptor: int, log: Path) -> None:
        """Read `descriptor` from now on, and own it."""
        os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):  # the user's share of pipe buffers is used up
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        stream = _Stream(rank, descriptor, BoundedLog(log))
        with self._lock:
            self._streams.append(stream)
        self._selector.register(descriptor, selectors.EVENT_READ, stream)

    def read(self, is_last: bool = False) -> list[Output]:
        """Return the lines since the last call, the newest ones of a flood. All are in the log files already.

        `is_last`, when all writers have ended, adds the rest of the pipes and unfinished lines.
        """
        if is_last and self._stop():
            for stream in self._streams:
                while self._take_in(stream):
                    pass
        with self._lock:
            lines = [Output(stream.rank, line) for stream in self._streams for line in stream.take(is_last)]
        return lines + [Output(None, warning) for stream in self._streams for warning in stream.log.take_warnings()]

    def close(self) -> None:
        """Close pipes and logs."""
        if self._stop():
            self._selector.close()
            os.close(self._wakeup)
            os.close(self._end)
            for stream in self._streams:
                os.close(stream.descriptor)
                stream.log.close()

    def _stop(self) -> bool:
        """End the thread; return False if it is stuck in a write to a disk that does not answer."""
        os.write(self._end, b".")
        self._thread.join(_STOP_S)
        return not self._thread.is_alive()

    def _drain(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                self._take_in(key.data)

    def _take_in(self, stream: _Stream) -> bool:
        """Read the bytes that are in the pipe now. Return False when it is empty."""
        try:
            data = os.read(stream.descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(stream.descriptor)
            return False
        stream.log.write(data)
        with self._lock:
            stream.add(data)
        return True


class BoundedLog:
    """A log file of limited size and rate. A run must not die of its log.

    Bytes that a full disk refuses wait in memory; lost bytes are reported with their position in the output.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._num_written = 0
        """Bytes of all files of this log so far."""
        self._num_left_out = 0
        self._kept = b""
        """End of the part that is left out."""
        self._num_replaced = 0
        """Bytes of logs that were replaced."""
        self._budget_bytes = float(LOG_BYTES)
        self._filled_s = time.monotonic()
        self._warnings: list[str] = []
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def write(self, data: bytes) -> None:
        """Append the bytes, or count them as left out."""
        now = time.monotonic()
        refilled = self._budget_bytes + (now - self._filled_s) * LOGGED_BYTES_PER_S
        self._budget_bytes = min(float(LOG_BYTES), refilled)
        self._filled_s = now
        if len(data) > self._budget_bytes:
            self._num_left_out += len(data)
            self._kept = (self._kept + data)[-KEPT_BYTES:]
            return
        self._budget_bytes -= len(data)
        self._report_left_out()
        if self._size + len(data) > LOG_BYTES and self._size:
            self._rotate()
        self._append(data)

    def take_warnings(self) -> list[str]:
        """Return the warnings about the file itself since the last call."""
        warnings, self._warnings[:] = list(self._warnings), []
        return warnings

    def close(self) -> None:
        """Write the end of a part that was left out, and close the file."""
        self._report_left_out()
        self._file.close()

    def _report_left_out(self) -> None:
        if self._num_left_out:
            num_lost = self._num_left_out - len(self._kept)
            self._append(f"\n[{num_lost:,} bytes came too fast and are left out here]\n".encode() + self._kept)
            self._num_left_out, self._kept = 0, b""

    def _open(self) -> BufferedLog:
        with contextlib.suppress(OSError):
            self._size = self._path.stat().st_size
        return BufferedLog(
            self._path, warn=self._warnings.append, unit="byte", are_lines=False, most_held_bytes=MAX_HELD_BYTES
        )

    def _append(self, data: bytes) -> None:
        self._size += len(data)
        self._num_written += len(data)
        self._file.append(data, self._num_written)

    def _rotate(self) -> None:
        older = self._path.with_name(f"{self._path.name}.1")
        self._file.close()
        with contextlib.suppress(OSError):
            if older.exists():
                self._num_replaced += older.stat().st_size
            self._path.replace(older)
        self._size = 0
        self._file = self._open()
        cut = f"; {self._num_replaced:,} bytes before it were deleted" if self._num_replaced else ""
        self._append(f"[this log continues {older.name}{cut}]\n".encode())
