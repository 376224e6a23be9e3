"""How the supervisor's agent is started on a host: through ssh, pdsh or srun, or directly on this machine."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch.listener import Listener
from llmscale.cluster.launch.slurm_hosts import srun_command
from llmscale.cluster.remote import SSH_OPTIONS, command_for, is_this_machine, module_argv
from llmscale.errors import ConfigError

LAUNCHERS = ("ssh", "pdsh", "slurm")
_AGENT = "llmscale.cluster.launch.agent"


@dataclass(frozen=True)
class Reach:
    """A way to one host. Every user of both machines can read its command line: it holds no secret."""

    argv: list[str]
    """Starts the agent there, and lives as long as it."""
    calls_back: bool = False
    """The agent calls the listener; else it talks over the command's stdin and stdout."""


def choose_reach(launcher: str) -> Callable[[Host, Listener], Reach]:
    """From a host to the way there, and where it can call back. That raises OSError when it cannot. Raises ConfigError
    for a launcher that lacks something here."""
    if launcher == "pdsh" and importlib.util.find_spec("cryptography") is None:
        raise ConfigError("--launcher pdsh needs the package cryptography: pip install cryptography, or take ssh.")

    def reach(host: Host, listener: Listener) -> Reach:
        if launcher == "slurm":
            return Reach(srun_command(host.name, module_argv(_AGENT)))
        if is_this_machine(host.name):
            # This shell's own ssh connection says nothing about how the hosts reach each other.
            return Reach(["env", "--unset=SSH_CONNECTION", *module_argv(_AGENT)])
        if launcher == "ssh":
            return Reach(command_for(host.name, module_argv(_AGENT)))
        address, port = listener.address_facing(host.name)
        words = ["--connect", address, str(port), "--supervisor", listener.fingerprint]
        return Reach(pdsh_command(host.name, module_argv(_AGENT, words)), calls_back=True)

    return reach


def pdsh_command(host: str, argv: list[str]) -> list[str]:
    """Run `argv` on one host through pdsh, which replaces %h, %u and %n in what it is given."""
    settings = f"PDSH_SSH_ARGS_APPEND={shlex.join(SSH_OPTIONS)}"
    return ["env", settings, "pdsh", "-R", "ssh", "-N", "-S", "-w", host, shlex.join(argv).replace("%", "%%")]
