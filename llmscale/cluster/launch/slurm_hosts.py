"""The hosts of the Slurm job that this runs in."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from llmscale.cluster.hostfile import Host
from llmscale.errors import ConfigError

#: Where Slurm says how many ranks a node is meant for, in the order of trust.
_SLOT_VARIABLES = ("SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_PER_NODE")


def slurm_hosts(variables: Mapping[str, str], slots: int | None = None) -> tuple[Host, ...]:
    """All nodes of the job, each with `slots` ranks, or as many as the job has GPUs or tasks per node. Raises
    ConfigError outside of a job."""
    nodes = variables.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ConfigError("--launcher slurm: SLURM_JOB_NODELIST is not set, so this is no Slurm job. Use sbatch.")
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--launcher slurm: scontrol cannot be run ({error}).") from None
    if done.returncode or not done.stdout.split():
        raise ConfigError(f"--launcher slurm: scontrol does not know '{nodes}': {done.stderr.strip()}.")
    return tuple(Host(name, slots or _slots(variables)) for name in done.stdout.split())


def _slots(variables: Mapping[str, str]) -> int:
    for name in _SLOT_VARIABLES:
        # SLURM_GPUS_PER_NODE may say a type first, a100:8.
        number = re.search(r"(\d+)(\(x\d+\))?$", variables.get(name, ""))
        if number and int(number.group(1)) > 0:
            return int(number.group(1))
    return 1


def srun_command(host: str, argv: list[str]) -> list[str]:
    """Run `argv` as one task on one node of the job, its stdin and stdout connected to ours: what ssh would do."""
    return [
        *("srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--unbuffered", "--quiet"),
        # The whole node's memory and cores: without it a step gets the share of one task.
        *("--mem=0", "--cpu-bind=none", "--export=ALL", "--kill-on-bad-exit=0", *argv),
    ]
