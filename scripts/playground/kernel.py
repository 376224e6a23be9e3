"""Linux namespaces and processes of the playground. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

DEADLINE_S = 20.0
_T = TypeVar("_T")


def in_network(pid: int, *argv: str) -> None:
    """Run a command in the network namespace of a process. Raises RuntimeError with its error message."""
    done = subprocess.run(["nsenter", f"--target={pid}", "--net", *argv], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


def listens_on_ssh_port(pid: int) -> bool:
    """Return whether a server listens on port 22 in the network of a process, by the namespace's socket table."""
    table = Path(f"/proc/{pid}/net/tcp").read_text()
    return any(fields[1].endswith(":0016") and fields[3] == "0A" for fields in map(str.split, table.splitlines()[1:]))


def _space(pid: int, kind: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None


def net_space(pid: int) -> str | None:
    return _space(pid, "net")


def pid_space(pid: int) -> str | None:
    return _space(pid, "pid")


def only_child(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill(pid: int) -> None:
    """Kill a process, unless it is gone or `pid` is 0."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_gone(pid: int) -> None:
    """Wait for a killed process, and reap it if it is a child of this one."""
    deadline = time.monotonic() + DEADLINE_S
    while pid and Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def until(condition: Callable[[], _T | None], what: str) -> _T:
    """Return the first true result of `condition`. Raises RuntimeError that names `what` if it takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        result = condition()
        if result:
            return result
        time.sleep(0.01)
    raise RuntimeError(f"{what} did not come up within {DEADLINE_S:.0f} s")
