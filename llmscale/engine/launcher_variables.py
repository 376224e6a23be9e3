"""The environment variables that launchers set for ranks, checked once before torch reads them. No torch.

torch, DeepSpeed and Streaming answer a wrong value with a traceback, a hang or a wrong world size.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from llmscale.errors import ConfigError, MachineError
from llmscale.limits import MAX_RANKS
from llmscale.suggestions import did_you_mean

#: Variables that a launcher sets together; without RANK the process is a single rank.
_TOGETHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
#: For launchers that do not set RANK: variable with the number of processes -> launcher, variable with the index.
_PLAIN_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": ("srun", "SLURM_PROCID"),
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("mpirun", "PMI_RANK"),
}
#: deepspeed/accelerator/real_accelerator.py
_ACCELERATORS = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")
#: Numbers, or UUIDs; Slurm writes NoDevFiles for a job without GPUs.
_DEVICE = r"(-?\d+|(GPU|MIG)-[\w/-]+)"
_DEVICES = re.compile(rf"\s*({_DEVICE}(\s*,\s*{_DEVICE})*|NoDevFiles|none|void)?\s*", re.IGNORECASE)
#: Delay of the other copies, so that one process can report the problem first.
_FIRST_SPEAKS_S = 2.0


@dataclass(frozen=True)
class LauncherVariables:
    """Place of this process among all ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    meeting_point: tuple[str, int] | None = None
    """Address and port in MASTER_ADDR and MASTER_PORT; None without a launcher."""


def is_requeued(variables: Mapping[str, str]) -> bool:
    """Return whether Slurm has started the same job before."""
    return variables.get("SLURM_RESTART_COUNT", "0") != "0"


def read_launcher_variables(variables: Mapping[str, str]) -> LauncherVariables:
    """Read and check the environment. Raises ConfigError with the variable, its value, the legal values and the fix."""
    _check_libraries(variables)
    if "RANK" not in variables:
        check_started_alone(variables)
        return LauncherVariables()
    missing = [name for name in _TOGETHER if name not in variables]
    if missing:
        raise ConfigError(
            f"RANK is set to '{variables['RANK']}', but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            f"not: a launcher sets {', '.join(_TOGETHER)} together. Start with deepspeed, torchrun or `llmscale "
            "launch`, or `unset RANK` for a single process."
        )
    world_size = _whole(variables, "WORLD_SIZE", 1, MAX_RANKS)
    rank = _whole(variables, "RANK", 0, world_size - 1, f"below WORLD_SIZE {world_size}")
    local_rank = _whole(variables, "LOCAL_RANK", 0, rank, f"at most RANK {rank}")
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if name in variables:
            _whole(variables, name, local_rank + 1, world_size, f"above LOCAL_RANK, at most WORLD_SIZE {world_size}")
    address = variables["MASTER_ADDR"].strip()
    if not address or re.search(r"[\s/@]|://", address):
        raise ConfigError(f"MASTER_ADDR is '{address}'. Legal: the name or address of the host of rank 0.")
    return LauncherVariables(rank, world_size, local_rank, (address, _whole(variables, "MASTER_PORT", 1, 65535)))


def check_meeting_point(here: LauncherVariables, variables: Mapping[str, str]) -> None:
    """Check that MASTER_ADDR resolves and that MASTER_PORT is free on rank 0's host.

    Raises ConfigError for an unknown name, MachineError for a taken port or a name server that does not answer.
    """
    if here.meeting_point is None:
        return
    address, port = here.meeting_point
    _resolve(address)
    # torchrun's agent may already run the rendezvous at that port.
    if here.rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _check_free(port)


def check_started_alone(variables: Mapping[str, str]) -> None:
    """Raise ConfigError under a launcher that starts several processes without setting RANK.

    Each process would train alone, in the same folder.
    """
    if launch := _find_plain_launcher(variables):
        name, launcher, _ = launch
        raise ConfigError(
            f"{name} is {variables[name]}, but RANK is not set: {launcher} alone tells its processes nothing of each "
            "other. Use `llmscale launch`, which takes the hosts of a Slurm job, deepspeed or torchrun."
        )
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        if name in variables and (name, variables[name]) != ("WORLD_SIZE", "1"):
            raise ConfigError(
                f"{name} is '{variables[name]}', but RANK is not set: a launcher sets both. Start with deepspeed, "
                f"torchrun or `llmscale launch`, or `unset {name}` for a single process."
            )


def check_is_only_copy(variables: Mapping[str, str], command: str) -> None:
    """Refuse to run several copies of a `command` that starts ranks itself.

    All copies would train in the same folder and on the same GPUs. Raises ConfigError in the first copy and SystemExit
    with the same status in the others, so that one line is printed.
    """
    if launch := _find_plain_launcher(variables):
        name, launcher, place = launch
        fix = "`srun --ntasks=1`" if launcher == "srun" else f"{launcher} left out"
        what = (
            f"{name} is {variables[name]}: {launcher} started as many copies of `{command}`, which starts ranks itself."
        )
        remedy = f"Start one, with {fix}; on several nodes `llmscale launch`."
    elif "LOCAL_RANK" in variables or variables.get("WORLD_SIZE", "1") != "1":
        name, place = ("LOCAL_RANK", "LOCAL_RANK") if "LOCAL_RANK" in variables else ("WORLD_SIZE", "RANK")
        what = f"{name} is set: a launcher started this, and `{command}` starts ranks itself."
        remedy = (
            f"Give the launcher llmscale/train.py, or call `{command}` without one; where none is at work, `unset "
            "WORLD_SIZE RANK LOCAL_RANK` first."
        )
    else:
        return
    # Copies on other hosts (RANK) may have a log of their own.
    if place != "RANK" and variables.get(place, "0") != "0":
        # A launcher may end all copies with the first that ends.
        time.sleep(_FIRST_SPEAKS_S)
        raise SystemExit(2)
    raise ConfigError(f"{what} {remedy}")


def _find_plain_launcher(variables: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the variable with the number of processes, the launcher, and the variable with this process's index.

    Return None for a single process. A job script is one, and so is anything started in a shell of `srun --pty`.
    """
    is_in_shell = "SLURM_PTY_PORT" in variables and variables.get("SLURM_TASK_PID") != str(os.getpid())
    for name, (launcher, place) in _PLAIN_LAUNCHERS.items():
        if variables.get(name, "1") != "1" and not (launcher == "srun" and is_in_shell):
            return name, launcher, place
    return None


def _check_libraries(variables: Mapping[str, str]) -> None:
    """Check variables of libraries, which report mistakes late or not at all."""
    name = variables.get("DS_ACCELERATOR")
    if name is not None and name not in _ACCELERATORS:
        raise ConfigError(
            f"DS_ACCELERATOR is '{name}'.{did_you_mean(name, _ACCELERATORS)} Legal: {', '.join(_ACCELERATORS)}; "
            "`unset DS_ACCELERATOR` lets DeepSpeed look."
        )
    threads = variables.get("OMP_NUM_THREADS")
    # OpenMP has a list for nested teams: 4,3,2.
    if threads is not None and not re.fullmatch(r"\s*[1-9][0-9]{0,5}(\s*,\s*[1-9][0-9]{0,5})*\s*", threads):
        raise ConfigError(
            f"OMP_NUM_THREADS is '{threads}'. Legal: a whole number of at least 1, such as the cores per rank."
        )
    devices = variables.get("CUDA_VISIBLE_DEVICES")
    if devices is not None and not _DEVICES.fullmatch(devices):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES is '{devices}', which CUDA reads as no GPU at all. Legal: numbers or UUIDs with "
            "commas between them (0,1), or nothing for none."
        )


def _whole(variables: Mapping[str, str], name: str, lowest: int, highest: int, which: str = "") -> int:
    text = variables[name].strip()
    if re.fullmatch(r"[0-9]{1,9}", text) and lowest <= int(text) <= highest:
        return int(text)
    legal = f"at least {lowest} and {which}" if which else f"from {lowest} to {highest}"
    raise ConfigError(
        f"{name} is '{variables[name]}'. Legal: a whole number {legal}. Launchers set it: start with deepspeed, "
        f"torchrun or `llmscale launch`, or `unset {' '.join(_TOGETHER)}` for a single process."
    )


def _resolve(address: str) -> None:
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
            raise MachineError(f"MASTER_ADDR {address} cannot be resolved now: {reason}. Try again.") from None
        raise ConfigError(
            f"MASTER_ADDR {address} does not resolve on this host: {reason}. Give the launcher an address, "
            "or put the name into DNS or /etc/hosts (deepspeed --master_addr, torchrun --master-addr)."
        ) from None


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        # Like torch's store: connections of an ended run in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except PermissionError:
            raise ConfigError(f"MASTER_PORT {port} is reserved for root. Legal for others: 1024 to 65535.") from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return
            raise MachineError(
                f"MASTER_PORT {port} is taken on this host by another program, perhaps by another run. Give another: "
                "deepspeed --master_port N, torchrun --master-port N."
            ) from None
