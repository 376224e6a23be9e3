"""How the supervisor's agent is started on a host: through ssh, pdsh or srun, or directly on this machine."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch.slurm_hosts import srun_command
from llmscale.cluster.remote import SSH_OPTIONS, command_for, is_this_machine, module_argv

LAUNCHERS = ("ssh", "pdsh", "slurm")
_AGENT = "llmscale.cluster.launch.agent"


@dataclass(frozen=True)
class Reach:
    """A way to one host."""

    argv: list[str]
    """Starts the agent there, and lives as long as it."""
    token: str | None = None
    """With which the agent calls back; None when it talks over the command's stdin and stdout."""


def choose_reach(launcher: str, port: int | None) -> Callable[[Host], Reach]:
    """From a host to the way there. `port` is where agents can call back, needed for pdsh."""

    def reach(host: Host) -> Reach:
        if launcher == "slurm":
            return Reach(srun_command(host.name, module_argv(_AGENT)))
        if is_this_machine(host.name):
            # This shell's own ssh connection says nothing about how the hosts reach each other.
            return Reach(["env", "--unset=SSH_CONNECTION", *module_argv(_AGENT)])
        if launcher == "ssh":
            return Reach(command_for(host.name, module_argv(_AGENT)))
        token = secrets.token_hex(16)
        return Reach(pdsh_command(host.name, module_argv(_AGENT, ["--connect", str(port), "--token", token])), token)

    return reach


def pdsh_command(host: str, argv: list[str]) -> list[str]:
    """Run `argv` on one host through pdsh, which replaces %h, %u and %n in what it is given."""
    settings = f"PDSH_SSH_ARGS_APPEND={shlex.join(SSH_OPTIONS)}"
    return ["env", settings, "pdsh", "-R", "ssh", "-N", "-S", "-w", host, shlex.join(argv).replace("%", "%%")]
