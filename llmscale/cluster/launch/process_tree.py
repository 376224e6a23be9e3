"""Processes by their numbers, from /proc: which are ours, in which state, and how to end them. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from llmscale.training.stop_request import STOP_SIGNALS

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1
#: By then whatever SIGKILL can end has ended.
_KILL_S = 5.0
_LIBC = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """From now on a descendant whose parent dies becomes a child of this process, instead of escaping it."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """For Popen's preexec_fn: SIGKILL for the child when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_launcher() -> None:
    """For Popen's preexec_fn: as `die_with_parent`, and with those signals blocked that ask a run to save and stop.
    Slurm sends them to every process of a job, and a launcher that took one would kill its ranks while they save. The
    ranks unblock them: `Heartbeat.install`."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def process_state(pid: int) -> str:
    """The kernel's letter for a process (R, S, D, T for stopped, Z for dead and not yet reaped); "" when there is
    none."""
    try:
        # After the command in parentheses, which may itself hold some.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents first."""
    found = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def kill_descendants(pid: int) -> int:
    """SIGKILL everything below `pid`, again until nothing is left; how many there were. Reaps those that are children
    of this process."""
    deadline, killed = time.monotonic() + _KILL_S, set()
    while time.monotonic() < deadline:
        alive = [child for child in descendants(pid) if process_state(child) not in ("", "Z")]
        if not alive:
            break
        for child in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        killed.update(alive)
        time.sleep(0.02)
    return len(killed)


def _children(pid: int) -> list[int]:
    """Children of every thread of a process."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += [int(word) for word in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
    return found
