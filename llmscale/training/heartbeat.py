"""What a supervisor wants of a rank: heartbeats, its output, its stacks when it hangs, and no life without it.

All of it is off, but for the stacks, unless the environment names a watch folder: see
llmscale/cluster/launch/ranks.py. No torch: installed before anything slow is imported.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
from pathlib import Path
from typing import TextIO

from llmscale.files.append import warn_on_stderr
from llmscale.training.stop_request import STOP_SIGNALS

#: Names a folder on the host's own disk that holds, per rank, a pipe for its output; the rank adds its heartbeat
#: and, when asked, its stacks.
WATCH_VARIABLE = "LLMSCALE_WATCH"
#: Sent to a rank, it makes it write down what each of its threads is doing.
STACKS_SIGNAL = signal.SIGUSR2
#: Heartbeats are written in one call of this many bytes, so that no reader sees half of one.
_HEARTBEAT_BYTES = 200
_PR_SET_PDEATHSIG = 1


def heartbeat_path(folder: Path, rank: int) -> Path:
    """The newest heartbeat of a rank: one JSON object, padded with spaces."""
    return folder / f"rank-{rank:05d}.json"


def output_path(folder: Path, rank: int) -> Path:
    """The pipe that takes a rank's output."""
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
        """As the launcher's environment says."""
        folder = os.environ.get(WATCH_VARIABLE)
        return cls(Path(folder) if folder else None, int(os.environ.get("RANK", "0")))

    @property
    def is_supervised(self) -> bool:
        """A supervisor started this rank, and ends it when something above it is gone."""
        return self._folder is not None

    def install(self) -> None:
        """Answer STACKS_SIGNAL from now on; under a supervisor also give it the output and the first heartbeat."""
        if self._folder is None:
            # By number: sys.stderr may have been replaced by something without a file.
            faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
            _unblock_signals()
            return
        # When the launcher is killed, its ranks must not train on with nobody to watch them.
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
        """This rank lives: `phase` is "starting", "training" or "stopped"; `step` counts finished optimizer steps."""
        self._phase, self._step = phase, step
        if phase == "training" and self._first_step is None:
            self._first_step = step
        self._write(None)

    def end(self, exit_code: int) -> None:
        """The last heartbeat: the status that this rank ends with."""
        if exit_code:
            self._phase = "failed"
        elif self._phase != "stopped":
            self._phase = "finished"
        self._write(exit_code)

    def end_early(self) -> None:
        """The last heartbeat of a rank that was asked to stop before its first step."""
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
    """Let signals in. `llmscale train` and the supervisor's launcher start ranks with these blocked, so that none is
    killed before it can answer; what came meanwhile is delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGHUP))
