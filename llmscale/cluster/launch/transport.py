"""Connections of a launch to its hosts: their names, the command that reaches each, and messages to it and from it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def host_command_by(launcher: str) -> Callable[[Host], list[str]]:
    """Return the function from a host to the command that serves a launch there, over its stdin and stdout.

    The command holds no secret: every user of both machines can read it.
    """

    def host_command(host: Host) -> list[str]:
        argv = module_argv("llmscale.cluster.launch.host")
        if launcher == "slurm":
            # One task on the node, as ssh would, with its full memory and cores, not the share of one task.
            where = ["--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--overlap", "--mem=0", "--cpu-bind=none"]
            return ["srun", *where, "--unbuffered", "--quiet", "--export=ALL", "--kill-on-bad-exit=0", *argv]
        if is_this_machine(host.name):
            # This shell's own ssh connection says nothing about how the hosts reach each other.
            return ["env", "--unset=SSH_CONNECTION", *argv]
        return command_for(host.name, argv)

    return host_command


class HostConnection:
    """The launcher's side of one host of an attempt."""

    def __init__(self, host: Host, argv: Sequence[str]) -> None:
        """Start the command `argv`. Raises OSError."""
        self.host, self.name = host, host.name
        # In a separate session: Ctrl-C in the terminal reaches the launcher alone, which tells the hosts what to do.
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout
        self._input, self._output = self._process.stdin, self._process.stdout.fileno()
        self.ready: dict[str, Any] | None = None
        """The host's first message: a free port, and addresses."""
        self.closed = False
        """True once the other side has closed the connection."""
        self._rest = b""
        """Received part of the next line."""
        self._last_line = ""
        """Newest line that is not a message, such as ssh's error."""
        self.heard_s = time.monotonic()

    def fileno(self) -> int:
        """Return the descriptor to wait for, as selectors ask for it."""
        return self._output

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self.heard_s

    def send(self, message: object = None) -> None:
        """Send a message, or an empty line as a sign of life; a closed connection drops it."""
        line = json.dumps(message) if message else ""
        with contextlib.suppress(OSError, ValueError):
            self._input.write(f"{line}\n".encode())
            self._input.flush()

    def read(self, show: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """Yield the messages that have come, and show all other lines."""
        data = os.read(self._output, 1 << 16)
        self.closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(MARK):
                self.heard_s = time.monotonic()
                yield json.loads(line[len(MARK) :])
            elif text := line.decode(errors="replace").strip():
                self._last_line = text
                show(f"{self.name}! {text}")

    def why_lost(self) -> str:
        """Return one line that explains why the host is lost."""
        if self._last_line:
            return self._last_line
        if self.closed:
            return f"its connection closed (exit status {self._process.wait()})"
        return f"no message from it for {self.silence_s:.0f} s"

    def hang_up(self) -> None:
        """Close this side of the connection, which ends the ranks of the host."""
        with contextlib.suppress(OSError):
            self._input.close()

    def close(self) -> bool:
        """Kill what is left of the connection. Return whether the ranks of the host are surely gone."""
        self.hang_up()
        if not self.closed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        # Ranks are killed with a process of this machine that started them.
        return self._process.wait() <= 0 and self.closed
