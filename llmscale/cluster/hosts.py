"""Hosts of a run: those of a hostfile or a Slurm job, and the command that reaches each.

A hostfile has a line `name slots=N` per host. Lines that DeepSpeed misreads, or only warns about, are errors here.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmscale.cluster.remote import command_for, is_this_machine, module_argv
from llmscale.config.bundled_files import HOSTFILES
from llmscale.errors import ConfigError
from llmscale.limits import MAX_GPUS_PER_NODE
from llmscale.untrusted.documents import CONFIG_MAX_BYTES
from llmscale.untrusted.paths import read_regular

#: Names that ssh, pdsh and DeepSpeed's --include all read as one plain name: pdsh expands [ ] and commas, DeepSpeed
#: splits at @ and :, and a leading dash would be an option.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Host:
    """One host of a run."""

    name: str
    """Name that ssh knows."""
    slots: int
    """Ranks to run there: GPUs, or processes on a CPU machine."""


def parse_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Return the hosts in the order of the file, or of llmscale's own file of that name.

    Raises ConfigError for a missing or empty file, and for a line that cannot be used.
    """
    path = HOSTFILES.find(Path(path))
    try:
        lines = read_regular(path, CONFIG_MAX_BYTES).decode("utf-8-sig").splitlines()
    except FileNotFoundError:
        raise ConfigError(
            f"--hostfile {path} does not exist. Write one with a line `name slots=N` per host, "
            f"or leave --hostfile out to use this machine.{HOSTFILES.why_missing(path)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--hostfile {path} cannot be read: {reason}.") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, start=1):
        entry = line.split("#", 1)[0].strip()
        if not entry:
            continue
        host = _parse_line(entry, f"{path}:{number}")
        if host.name in hosts:
            raise ConfigError(f"{path}:{number}: host '{host.name}' is listed twice. Give it one line with all slots.")
        hosts[host.name] = host
    if not hosts:
        raise ConfigError(f"--hostfile {path} names no host. Write one line `name slots=N` per host.")
    return tuple(hosts.values())


def _parse_line(entry: str, where: str) -> Host:
    """Parse a line without its comment. Raises ConfigError whose text begins with `where`."""
    line = re.fullmatch(r"(\S+)\s+slots=([0-9]{1,6})", entry)
    if line is None:
        raise ConfigError(f"{where}: '{entry}' is not `name slots=N`. {_advise(entry)}")
    name, slots = line[1], int(line[2])
    if "," in name or ("[" in name and "]:" not in name):
        raise ConfigError(f"{where}: '{name}' looks like a range or a list. Write one line per host.")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: '{name}' is not a plain host name. Use letters, digits, dots, dashes and underscores; begin "
            "with a letter or digit. Set a user, a port or an IPv6 address for it in ~/.ssh/config (User, Port, "
            "HostName)."
        )
    if slots > MAX_GPUS_PER_NODE:
        raise ConfigError(f"{where}: slots={slots} is too many. At most {MAX_GPUS_PER_NODE} ranks run on one host.")
    if slots == 0:
        raise ConfigError(f"{where}: slots=0 runs nothing on '{name}'. Delete the line, or give at least one slot.")
    return Host(name, slots)


def _advise(entry: str) -> str:
    """Return the line that a wrong one probably means: its only host, with the number of slots, or its only number."""
    name = re.match(r"[A-Za-z][\w.-]*(?=[\s:,;]|$)", entry)
    counts = re.findall(r"\bslots\s*[=:]\s*([1-9][0-9]{0,2})\b", entry) or re.findall(
        r"[\s:,;=]([1-9][0-9]{0,2})\b", entry
    )
    if name is None or len(counts) > 1:
        return "Write one line `name slots=N` per host."
    return f"Write `{name[0]} slots={counts[0]}`." if counts else f"Write `{name[0]} slots=N`, N being its GPUs."


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
