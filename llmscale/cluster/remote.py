"""Run one command on many hosts at once, through ssh; its arguments arrive unchanged."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llmscale.cluster.environment import search_path
from llmscale.untrusted.interpreter import module_command

#: Never ask for a password or about a host key, give up on a host that does not answer, and notice within 15 s when one
#: goes silent (ssh itself would wait for hours).
SSH_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
#: What ssh returns when it could not reach the host or lost it.
SSH_FAILED = 255
#: What `timeout` returns when time is up; here too.
TIMED_OUT = 124
#: Hosts that are asked at the same time.
FAN_OUT = 128


@dataclass(frozen=True)
class Finished:
    """What became of a command on one host."""

    returncode: int
    """The command's own, SSH_FAILED when the host could not be reached, TIMED_OUT when it was not done in time."""
    stdout: str
    stderr: str
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.returncode == TIMED_OUT


def run_on_hosts(
    hosts: Sequence[str], argv: Sequence[str], *, timeout_s: float, stdin: str | None = None
) -> dict[str, Finished]:
    """Run `argv` on every host at the same time, `stdin` fed to each; the answers by host name, in the given order.

    This machine (by any of its names) runs it directly, without ssh. Never raises for what a host does: see
    `Finished.returncode`. The remote login shell must be POSIX's (sh, bash, dash, zsh).
    """
    if not hosts:
        return {}
    with ThreadPoolExecutor(min(len(hosts), FAN_OUT)) as pool:
        answers = pool.map(lambda host: _run(command_for(host, argv), timeout_s, stdin), hosts)
        return dict(zip(hosts, answers, strict=True))


def command_for(host: str, argv: Sequence[str]) -> list[str]:
    """The local command line that runs `argv` on `host`: itself on this machine, else through ssh."""
    if is_this_machine(host):
        return list(argv)
    # ssh joins its arguments with spaces and hands the line to a shell there: it gets one word, quoted here.
    return ["ssh", "-T", *SSH_OPTIONS, host, "--", shlex.join(argv)]


def is_this_machine(host: str) -> bool:
    """Whether `host` is a name or an address of the machine this runs on. False for what does not resolve."""
    if host == "localhost" or host in (socket.gethostname(), socket.gethostname().split(".")[0]):
        return True
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_own_address(family, address[0]) for family, _, _, _, address in addresses)


def _is_own_address(family: socket.AddressFamily, address: str | int) -> bool:
    """Only an own address can be bound to."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def module_argv(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command of `python -m module` with this Python and this llmscale, at the same path on every host.

    A remote shell knows none of the variables of this one.
    """
    path = search_path(os.environ.get("PYTHONPATH"))
    return ["env", f"PYTHONPATH={path}", *module_command(module, *arguments)]


def _run(command: Sequence[str], timeout_s: float, stdin: str | None) -> Finished:
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        # As a shell says it: 127 for a command that is not there.
        return Finished(127, "", f"{command[0]}: {error.strerror}\n", time.monotonic() - began)
    try:
        stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        code = TIMED_OUT
    return Finished(code, stdout, stderr, time.monotonic() - began)
