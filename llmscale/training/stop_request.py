"""Signals that ask for a save and an orderly end. No torch: installed before anything slow is imported."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass
class StopRequest:
    """Notes signals; the loop reads it at step boundaries, where all ranks can agree to stop.

    A handler that acted at once could interrupt a collective and leave the other ranks waiting in it.
    """

    received: list[str] = field(default_factory=list)
    """Names of the signals that came, in order."""

    def install(self) -> None:
        """From now on note SIGTERM, SIGINT and SIGUSR1 instead of dying of them; a second SIGINT ends at once."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        _end_at_second_sigint()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number).name)


def _end_at_second_sigint() -> None:
    """Watch for it in a thread: Python runs no handler while the main thread waits in a collective for a dead peer, and
    that is when somebody presses Ctrl-C twice."""
    arrivals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    # A data worker's signals are not ours: forked, it would write them into the same pipe.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_count_sigints, args=(arrivals,), name="second SIGINT", daemon=True).start()


def _count_sigints(arrivals: int) -> None:
    """`arrivals` is a pipe with one byte per signal, its number."""
    count = 0
    while byte := os.read(arrivals, 1):
        count += byte[0] == signal.SIGINT
        if count == 2:
            # 128 + number is how shells report a signal.
            os._exit(128 + signal.SIGINT)
