"""Progress of a rank: noted for its watchdog, and reported to the launcher that asks for it. No torch: installed early.

`llmscale launch` names a pipe in the environment, and ends the ranks that report to it with the process that reads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import stat

from llmscale.training.stop_request import LAUNCHER_VARIABLE, STOP_SIGNALS

#: Names the descriptor of the pipe that takes the reports of all ranks of a host, one line of JSON each.
REPORTS_VARIABLE = "LLMSCALE_REPORTS"
#: Makes a rank write the stack of each of its threads.
STACKS_SIGNAL = signal.SIGUSR2
#: In JSON a character may become six bytes; a pipe takes 4,096 bytes whole.
_MAX_FAILURE_CHARACTERS = 500
_PR_SET_PDEATHSIG = 1


class Heartbeat:
    """Heartbeats of this rank. Without a pipe they are noted only."""

    def __init__(self, pipe: int | None, rank: int) -> None:
        self._pipe, self._rank = pipe, rank
        self.phase = "starting"
        """"starting", "training", "stopped", "finished" or "failed"."""
        self.step: int | None = None
        """Number of finished optimizer steps; None before the first one of this start."""
        self.count = 0
        """Number of heartbeats; it grows for as long as the rank gets on."""
        self.has_ended = False
        """True once nothing follows but the end of the process."""

    @classmethod
    def from_environment(cls) -> Heartbeat:
        """Return the heartbeat that the launcher's environment asks for. Child processes do not see it."""
        name = os.environ.pop(REPORTS_VARIABLE, "")
        rank = os.environ.get("RANK", "0")
        return cls(int(name) if _is_pipe(name) else None, int(rank) if rank.isdecimal() else 0)

    @property
    def is_supervised(self) -> bool:
        """True if a launcher reads the reports, and restarts the run."""
        return self._pipe is not None

    def install(self) -> None:
        """Answer STACKS_SIGNAL and stop signals; under a launcher, end with the process that started this one."""
        # By number: sys.stderr may have been replaced by something without a file.
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
        if self._pipe is not None:
            os.set_inheritable(self._pipe, False)
            # A rank must not train on unwatched: another one may be started in its place.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.environ.get(LAUNCHER_VARIABLE) != str(os.getppid()):
                os._exit(1)
        _unblock_signals()
        self.beat("starting")

    def beat(self, phase: str, step: int | None = None) -> None:
        """Note progress: `phase` is "starting", "training" or "stopped"; `step` counts finished optimizer steps."""
        self.phase, self.step = phase, step
        self.count += 1
        self._report()

    def fail(self, failure: str) -> None:
        """Report an error before the end of this process breaks the connections of other ranks."""
        self.phase = "failed"
        self._report(failure)

    def end(self, exit_code: int) -> None:
        """Report the end of this rank."""
        self.has_ended = True
        if exit_code:
            self.phase = "failed"
        elif self.phase != "stopped":
            self.phase = "finished"
        self._report()

    def end_early(self) -> None:
        """Report the end of a rank that was asked to stop before its first step."""
        self.phase = "stopped"
        self.end(0)

    def _report(self, failure: str | None = None) -> None:
        if self._pipe is None:
            return
        report = {"rank": self._rank, "pid": os.getpid(), "phase": self.phase, "step": self.step}
        if failure is not None:
            report["failure"] = failure[:_MAX_FAILURE_CHARACTERS]
        # A pipe that nobody empties takes no more, and does not block.
        with contextlib.suppress(OSError):
            os.write(self._pipe, json.dumps(report).encode() + b"\n")


def _is_pipe(name: str) -> bool:
    """Return whether `name` is an open pipe's number, and not left over from another process."""
    try:
        return stat.S_ISFIFO(os.fstat(int(name)).st_mode)
    except (ValueError, OSError, OverflowError):
        return False


def _unblock_signals() -> None:
    """Unblock signals, and deliver those that are pending.

    `llmscale train` and `llmscale launch` start ranks with these blocked, so that none is killed before it can answer.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGHUP))
