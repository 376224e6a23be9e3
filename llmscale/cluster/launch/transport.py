"""Connections of a launch to its hosts: their names, the command that reaches each, and messages to it and from it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch.host import MARK
from llmscale.cluster.remote import command_for, is_this_machine, module_argv
from llmscale.errors import ConfigError

#: Slurm's variables for the number of ranks per node, in the order of preference.
_SLOT_VARIABLES = ("SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_PER_NODE")


def slurm_hosts(variables: Mapping[str, str], slots: int | None = None) -> tuple[Host, ...]:
    """Return all nodes of the Slurm job, each with `slots` ranks, or as many as the job has GPUs or tasks per node.

    Raises ConfigError outside of a job.
    """
    nodes = variables.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ConfigError("--launcher slurm: SLURM_JOB_NODELIST is not set, so this is not a Slurm job. Use sbatch.")
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--launcher slurm: scontrol cannot be run ({error}).") from None
    if done.returncode or not done.stdout.split():
        raise ConfigError(f"--launcher slurm: scontrol does not know '{nodes}': {done.stderr.strip()}.")
    return tuple(Host(name, slots or _slots(variables)) for name in done.stdout.split())


def _slots(variables: Mapping[str, str]) -> int:
    for name in _SLOT_VARIABLES:
        # SLURM_GPUS_PER_NODE may begin with a type: a100:8.
        number = re.search(r"(\d+)(\(x\d+\))?$", variables.get(name, ""))
        if number and int(number.group(1)) > 0:
            return int(number.group(1))
    return 1


LAUNCHERS = ("ssh", "slurm")
_HOST = "llmscale.cluster.launch.host"


def host_command_by(launcher: str) -> Callable[[Host], list[str]]:
    """Return the function from a host to the command that serves a launch there, over its stdin and stdout.

    The command holds no secret: every user of both machines can read it.
    """

    def host_command(host: Host) -> list[str]:
        argv = module_argv(_HOST)
        if launcher == "slurm":
            return _srun_command(host.name, argv)
        if is_this_machine(host.name):
            # This shell's own ssh connection says nothing about how the hosts reach each other.
            return ["env", "--unset=SSH_CONNECTION", *argv]
        return command_for(host.name, argv)

    return host_command


def _srun_command(host: str, argv: list[str]) -> list[str]:
    """Return the command that runs `argv` as one task on one node of the job, as ssh would."""
    # The node's full memory and cores; otherwise a step gets the share of one task.
    share = ["--mem=0", "--cpu-bind=none"]
    where = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap"]
    return ["srun", *where, *share, "--unbuffered", "--quiet", "--export=ALL", "--kill-on-bad-exit=0", *argv]


#: Messages that wait to be handled, before hosts wait.
_MAX_WAITING = 10_000

Inbox = queue.Queue["tuple[HostConnection, bytes | None]"]


def open_inbox() -> Inbox:
    return queue.Queue(_MAX_WAITING)


class HostConnection:
    """The launcher's side of one host of an attempt."""

    def __init__(self, host: Host, argv: Sequence[str], inbox: Inbox) -> None:
        """Start the command `argv`, whose lines go to `inbox`, None at the end. Raises OSError."""
        self.host, self.name = host, host.name
        # In a separate session: Ctrl-C in the terminal reaches the launcher alone, which tells the hosts what to do.
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.ready: dict[str, Any] | None = None
        """The host's first message: a free port, and addresses."""
        self.closed = False
        """True once the other side has closed the connection."""
        self._last_line = ""
        """Newest line that is no message, such as ssh's error."""
        self.heard_s = time.monotonic()
        threading.Thread(target=self._read, args=(inbox,), name=host.name, daemon=True).start()

    def _read(self, inbox: Inbox) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            inbox.put((self, line))
        inbox.put((self, None))

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self.heard_s

    def send(self, message: object = None) -> None:
        """Send a message, or an empty line as a sign of life; a closed connection drops it."""
        assert self._process.stdin
        line = json.dumps(message) if message else ""
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def take(self, line: bytes | None, show: Callable[[str], None]) -> dict[str, Any] | None:
        """Return the message in a line from the inbox; show any other line."""
        if line is None:
            self.closed = True
        elif line.startswith(MARK):
            self.heard_s = time.monotonic()
            with contextlib.suppress(ValueError):  # cut off by the end of the host
                return dict(json.loads(line[len(MARK) :]))
        elif text := line.decode(errors="replace").strip():
            self._last_line = text
            show(f"{self.name}! {text}")
        return None

    def why_lost(self) -> str:
        """Return one line that explains why the host is lost."""
        if self._last_line:
            return self._last_line
        if self.closed:
            return f"its connection closed (exit status {self._process.wait()})"
        return f"no message from it for {self.silence_s:.0f} s"

    def hang_up(self) -> None:
        """Close this side of the connection, which ends the ranks of the host."""
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self) -> bool:
        """Kill what is left of the connection. Return whether the ranks of the host are surely gone."""
        self.hang_up()
        if not self.closed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        # Ranks are killed with a process of this machine that started them.
        return self._process.wait() <= 0 and self.closed
