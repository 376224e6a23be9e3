"""A terminal for tests: a program runs on a real pty, and what it draws is kept by a terminal emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import pyte

from tests import warm_start


class Terminal:
    """`columns` x `rows`, with 1,000 rows of what has scrolled away."""

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 100,
        rows: int = 30,
        *,
        is_warm: bool = False,
        **variables: str | None,
    ) -> None:
        """`variables` are added to the environment; None takes one away. `is_warm` forks: see `warm_start`."""
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._unread: list[bytes] = []
        """Pieces of `raw` that the screen does not show yet."""
        self._master, slave = pty.openpty()
        self._set_size(columns, rows)
        # What is typed is not shown.
        settings = termios.tcgetattr(slave)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        environment: Mapping[str, str | None] = {**os.environ, "TERM": "xterm-256color", "COLUMNS": None, **variables}
        start = warm_start.Process if is_warm else subprocess.Popen
        self.process = start(
            list(command),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={name: value for name, value in environment.items() if value is not None},
            start_new_session=True,
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._master)

    def send(self, keys: bytes) -> None:
        """As if they were typed."""
        os.write(self._master, keys)

    def resize(self, columns: int, rows: int) -> None:
        """As a window manager does; the emulator wraps nothing anew."""
        self._set_size(columns, rows)
        self.screen.resize(rows, columns)

    def read_until(self, seen: Callable[[], object], timeout_s: float = 300.0) -> bool:
        """Show what the program draws until `seen` says so; False when the program ended before.

        `seen` is asked after each line or cursor movement, so that a late reader misses no frame.
        """
        deadline = time.monotonic() + timeout_s
        while not seen():
            assert time.monotonic() < deadline, "\n".join(self.lines())
            if not self._unread:
                if not select.select([self._master], [], [], 0.1)[0]:
                    if self.process.poll() is not None:
                        return bool(seen())
                    continue
                try:
                    data = os.read(self._master, 65536)
                except OSError:  # nobody has it open any more
                    return bool(seen())
                self.raw += data
                self._unread += re.findall(rb"\n|[^\n\x1b]+|\x1b[^\n\x1b]*", data)
            self._stream.feed(self._unread.pop(0))
        return True

    def wait(self) -> int:
        """Until the program has ended: its exit status."""
        self.read_until(lambda: False)
        return self.process.wait()

    def lines(self) -> list[str]:
        """The screen, without blanks at the ends."""
        return [line.rstrip() for line in self.screen.display]

    def text(self) -> str:
        """What has scrolled away, and the screen."""
        columns = self.screen.columns
        gone = ["".join(row[x].data for x in range(columns)).rstrip() for row in self.screen.history.top]
        return "\n".join([*gone, *self.lines()])

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
