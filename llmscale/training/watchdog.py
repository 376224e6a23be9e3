"""Progress of a rank: reported to the launcher that asks for it, and watched, so that a rank that hangs ends.

`llmscale launch` names a pipe in the environment, and ends the ranks that report to it with the process that reads it.
Under any launcher a rank that hangs writes the stacks of all its threads to the run folder, and ends: the others wait
for it in a collective, most of them without a time limit. A process that is stopped (SIGSTOP, a debugger) counts no
time; its peers notice it. No torch: installed early.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.errors import MachineError
from llmscale.training.run_folder import LOGS_NAME, record_failure
from llmscale.training.stop_request import LAUNCHER_VARIABLE, STOP_SIGNALS, end_with_parent, names_lost_peer
from llmscale.untrusted.paths import open_own

if TYPE_CHECKING:
    from llmscale.config.run_config import RunConfig

#: Names the descriptor of the pipe that takes the reports of all ranks of a host, one line of JSON each.
REPORTS_VARIABLE = "LLMSCALE_REPORTS"
#: Makes a rank write the stack of each of its threads.
STACKS_SIGNAL = signal.SIGUSR2
#: Exit status of a rank that hung.
HUNG_STATUS = 76
_POLL_S = 0.5
#: Time that the stacks may take, and that the other ranks have to write theirs before this one's end breaks them.
_STACKS_S = 5.0


class Heartbeat:
    """Heartbeats of this rank. Without a pipe they are noted only."""

    def __init__(self, pipe: int | None, rank: int) -> None:
        self._pipe = pipe
        self._rank = rank
        self.phase = "starting"
        """"starting", "training", "stopped", "finished" or "failed"."""
        self.step: int | None = None
        """Number of finished optimizer steps; None before the first one of this start."""
        self.lost_peer = False
        """True if this rank failed because another one ended, or does not answer."""
        self.count = 0
        """Number of heartbeats; it grows for as long as the rank gets on."""
        self.has_ended = False
        """True once nothing follows but the end of the process."""

    @classmethod
    def from_environment(cls) -> Heartbeat:
        """Return the heartbeat that the launcher's environment asks for. Child processes do not see it."""
        name = os.environ.pop(REPORTS_VARIABLE, "")
        rank = os.environ.get("RANK", "0")
        return cls(int(name) if name.isdecimal() else None, int(rank) if rank.isdecimal() else 0)

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
            end_with_parent(signal.SIGKILL)
            if os.environ.get(LAUNCHER_VARIABLE) != str(os.getppid()):
                os._exit(1)
        # `llmscale train` and `launch` start ranks with these blocked, so that none is killed before it can answer.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGHUP))
        self.beat("starting")

    def beat(self, phase: str, step: int | None = None) -> None:
        """Note progress: `phase` is "starting", "training" or "stopped"; `step` counts finished optimizer steps."""
        self.phase = phase
        self.step = step
        self.count += 1
        self._report()

    def fail(self, failure: str) -> None:
        """Report an error before the end of this process breaks the connections of other ranks."""
        self.phase = "failed"
        self.lost_peer = names_lost_peer(failure)
        self._report()

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

    def _report(self) -> None:
        if self._pipe is None:
            return
        report = {
            "rank": self._rank,
            "pid": os.getpid(),
            "phase": self.phase,
            "step": self.step,
            "lost_peer": self.lost_peer,
        }
        # A pipe that nobody empties takes no more, and does not block.
        with contextlib.suppress(OSError):
            os.write(self._pipe, json.dumps(report).encode() + b"\n")


# ---------------------------------------------------------------- the watchdog


def watch(heartbeat: Heartbeat, config: RunConfig, rank: int, tell: Callable[[int, str], None]) -> None:
    """End this process if a start or a step takes longer than its limit, from now on until the last heartbeat.

    `tell` is called with the exit status and the failure.
    """
    threading.Thread(target=_watch, args=(heartbeat, config, rank, tell), name="watchdog", daemon=True).start()


def stacks_path(run: Path, rank: int) -> Path:
    return run / LOGS_NAME / f"stacks-rank-{rank:05d}.txt"


def _watch(heartbeat: Heartbeat, config: RunConfig, rank: int, tell: Callable[[int, str], None]) -> None:
    count = heartbeat.count
    silent_s = 0.0
    while not heartbeat.has_ended:
        time.sleep(_POLL_S)
        # Counted, not measured: it stands still while the process is stopped.
        count, silent_s = heartbeat.count, (silent_s + _POLL_S if count == heartbeat.count else 0.0)
        if heartbeat.step is None:
            limit_s = config.start_timeout_s
        else:
            limit_s = config.hang_timeout_s
        if limit_s and silent_s > limit_s and not heartbeat.has_ended:
            _end(heartbeat, config.run, rank, silent_s, tell)


def _end(heartbeat: Heartbeat, run: Path, rank: int, silent_s: float, tell: Callable[[int, str], None]) -> None:
    step = heartbeat.step
    flag = "--start-timeout-s" if step is None else "--hang-timeout-s"
    since = "the start" if step is None else f"step {step}"
    failure = f"no progress for {silent_s:.0f} s after {since} ({flag})"
    heartbeat.fail(failure)
    line = f"error: rank {rank}: {failure}; the stacks of its threads: {stacks_path(run, rank)}\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode())

    def write_and_tell() -> None:
        _write_stacks(run, rank, step, failure)
        tell(HUNG_STATUS, failure)

    # In a thread: the disk may be what hangs.
    threading.Thread(target=write_and_tell, name="stacks", daemon=True).start()
    time.sleep(_STACKS_S)
    os._exit(HUNG_STATUS)


def _write_stacks(run: Path, rank: int, step: int | None, failure: str) -> None:
    path = stacks_path(run, rank)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "wb", buffering=0) as file:
            file.write(f"==== {datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC, {failure}\n".encode())
            faulthandler.dump_traceback(file, all_threads=True)
    record_failure(run, MachineError(failure), step=step or 0, rank=rank)
