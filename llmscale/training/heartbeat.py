"""Supervision of a rank: heartbeats, its output, its stacks when it hangs, and its end with its launcher.

Except for the stacks, all of it is off unless the environment names a watch folder
(llmscale/cluster/launch/ranks.py). No torch: installed before anything slow is imported.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
from pathlib import Path
from typing import TextIO

from llmscale.files.buffered_log import warn_on_stderr
from llmscale.training.stop_request import STOP_SIGNALS

#: Names a folder on the host's own disk with a pipe per rank for its output; the rank adds its heartbeat and stacks.
WATCH_VARIABLE = "LLMSCALE_WATCH"
#: Makes a rank write the stack of each of its threads.
STACKS_SIGNAL = signal.SIGUSR2
#: Size of a heartbeat: one write, so that no reader sees half of one.
_HEARTBEAT_BYTES = 200
_PR_SET_PDEATHSIG = 1


def heartbeat_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's newest heartbeat: one JSON object, padded with spaces."""
    return folder / f"rank-{rank:05d}.json"


def output_path(folder: Path, rank: int) -> Path:
    """Return the pipe that takes a rank's output."""
    return folder / f"rank-{rank:05d}.pipe"


def stacks_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stacks"


class Heartbeat:
    """Heartbeats of this rank. Without a watch folder every method does nothing."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._file = -1
        self._count = 0
        self._phase = "starting"
        self._first_step: int | None = None
        self._step: int | None = None
        self._stacks: TextIO | None = None
        self._has_failed = False

    @classmethod
    def from_environment(cls) -> Heartbeat:
        """Return the heartbeat that the launcher's environment asks for."""
        folder = os.environ.get(WATCH_VARIABLE)
        return cls(Path(folder) if folder else None, int(os.environ.get("RANK", "0")))

    @property
    def is_supervised(self) -> bool:
        """True if a supervisor started this rank and ends it together with its launcher."""
        return self._folder is not None

    def install(self) -> None:
        """Answer STACKS_SIGNAL; under a supervisor, also connect the output and write the first heartbeat."""
        if self._folder is None:
            # By number: sys.stderr may have been replaced by something without a file.
            faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
            _unblock_signals()
            return
        # A rank must not train on unwatched after its launcher was killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        output = os.open(output_path(self._folder, self._rank), os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        self._stacks = stacks_path(self._folder, self._rank).open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        self._file = os.open(heartbeat_path(self._folder, self._rank), os.O_WRONLY | os.O_CREAT, 0o600)
        _unblock_signals()
        self.beat("starting")

    def beat(self, phase: str, step: int | None = None) -> None:
        """Write a heartbeat: `phase` is "starting", "training" or "stopped"; `step` counts finished optimizer steps."""
        self._phase, self._step = phase, step
        if phase == "training" and self._first_step is None:
            self._first_step = step
        self._write(None)

    def end(self, exit_code: int) -> None:
        """Write the last heartbeat, with the exit status of this rank."""
        if exit_code:
            self._phase = "failed"
        elif self._phase != "stopped":
            self._phase = "finished"
        self._write(exit_code)

    def end_early(self) -> None:
        """Write the last heartbeat of a rank that was asked to stop before its first step."""
        self._phase = "stopped"
        self.end(0)

    def _write(self, exit_code: int | None) -> None:
        if self._file < 0:
            return
        self._count += 1
        beat = {
            "pid": os.getpid(),
            "count": self._count,
            "phase": self._phase,
            "first_step": self._first_step,
            "step": self._step,
            "exit_code": exit_code,
        }
        try:
            os.pwrite(self._file, json.dumps(beat).ljust(_HEARTBEAT_BYTES).encode(), 0)
        except OSError as error:
            if not self._has_failed:
                warn_on_stderr(f"WARNING: rank {self._rank} cannot write its heartbeat: {error.strerror}.")
            self._has_failed = True


def _unblock_signals() -> None:
    """Unblock signals, and deliver those that are pending.

    `llmscale train` and the supervisor's launcher start ranks with these blocked, so that none is killed before it can
    answer.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGHUP))
