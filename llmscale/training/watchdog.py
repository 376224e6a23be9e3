"""End a rank that hangs, under any launcher: the others wait for it in a collective, most of them without a time limit.

It writes the stacks of all threads to the run folder first. A process that is stopped (SIGSTOP, a debugger) counts no
time; its peers notice it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from llmscale.config.run_config import RunConfig
from llmscale.errors import MachineError
from llmscale.training.heartbeat import Heartbeat
from llmscale.training.run_folder import LOGS_NAME, record_failure
from llmscale.untrusted.paths import open_own

#: Exit status of a rank that hung.
HUNG_STATUS = 76
_POLL_S = 0.5
#: Time that the stacks may take, and that the other ranks have to write theirs before this one's end breaks them.
_STACKS_S = 5.0


def watch(heartbeat: Heartbeat, config: RunConfig, rank: int, tell: Callable[[int, str], None]) -> None:
    """End this process if a start or a step takes longer than its limit, from now on until the last heartbeat.

    `tell` is called with the exit status and the failure.
    """
    threading.Thread(target=_watch, args=(heartbeat, config, rank, tell), name="watchdog", daemon=True).start()


def stacks_path(run: Path, rank: int) -> Path:
    return run / LOGS_NAME / f"stacks-rank-{rank:05d}.txt"


def _watch(heartbeat: Heartbeat, config: RunConfig, rank: int, tell: Callable[[int, str], None]) -> None:
    count, silent_s = heartbeat.count, 0.0
    while not heartbeat.has_ended:
        time.sleep(_POLL_S)
        # Counted, not measured: it stands still while the process is stopped.
        count, silent_s = heartbeat.count, (silent_s + _POLL_S if count == heartbeat.count else 0.0)
        limit_s = config.start_timeout_s if heartbeat.step is None else config.hang_timeout_s
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
