"""Signals that ask for a save and an orderly end. No torch: installed before anything slow is imported."""

from __future__ import annotations

import signal
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

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number).name)
        if number == signal.SIGINT:
            # The system's own answer works inside a collective that waits for a dead peer, where Python's does not.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
