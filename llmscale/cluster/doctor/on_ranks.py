"""Checks on the ranks of a run, on every host at once: a timed all-reduce, and what the run's engine computes.

`python -m llmscale.cluster.doctor.on_ranks` starts a process per rank on its host; rank 0 prints the answer. No torch
but in the ranks.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llmscale.cluster.doctor.report import CheckRow, HostReport, format_by_host, format_hosts, green, red, yellow
from llmscale.cluster.hosts import ask_hosts, print_answer, read_request
from llmscale.cluster.launch.ranks import LocalRanks, rank_environment
from llmscale.engine.network import find_port, set_network_interface
from llmscale.errors import ConfigError, LlmscaleError, MachineError
from llmscale.numerics.report import LAST, ONE_RANK, Report, Try
from llmscale.untrusted.interpreter import module_command
from llmscale.untrusted.terminal import print_to_stderr

_MODULE = "llmscale.cluster.doctor.on_ranks"
#: Holds the job of a rank, in JSON.
_JOB_VARIABLE = "LLMSCALE_DOCTOR_JOB"
#: Bandwidth below these fractions of the promised one is red and yellow: the all-reduce takes another path.
_SLOW_FAIL_FRAC = 0.1
_SLOW_WARN_FRAC = 0.2
#: Time that ranks wait for each other, and what they have beyond it until the kernel and the asking process end them.
_WAIT_S = 60
_SPARE_S = 5
#: Buffers grow until one all-reduce takes this long, or up to these sizes.
_LONG_S = 0.25
_MAX_BYTES = {"gloo": 64 * 2**20, "nccl": 1024 * 2**20}
_FIRST_BYTES = 2**20
_REPEATS = 3
#: Time for a network file system to show a new file to another host.
_LOOK_S = 5.0


def _ask_ranks(hosts: Mapping[str, int], job: Mapping[str, object], patience_s: float) -> tuple[str, dict[str, str]]:
    """Give `job` to as many ranks on each host as it says. Return rank 0's JSON, and by host why it failed.

    The job has the ranks' time limit, `timeout_s`, and where they meet, `master` and `port`. Raises ConfigError for a
    run that the ranks refuse.
    """
    host_of = [host for host, count in hosts.items() for _ in range(count)]
    ranks = {host: [rank for rank, at in enumerate(host_of) if at == host] for host in hosts}
    requests = {host: {**job, "world_size": len(host_of), "ranks": ranks[host]} for host in hosts}
    answers = ask_hosts(_MODULE, requests, patience_s)
    for answer in answers.values():
        if answer.returncode == 2:
            raise ConfigError(answer.describe().removeprefix("error: "))
    failures = {host: answer.describe() for host, answer in answers.items() if answer.returncode}
    first = next(iter(hosts))
    return answers[first].answer, failures if failures or answers[first].answer else {first: "no result"}


def main() -> int:
    """Start this host's ranks, or be one of them (its variable is set)."""
    if _JOB_VARIABLE not in os.environ:
        return _start_ranks(read_request())
    job = json.loads(os.environ[_JOB_VARIABLE])
    # The kernel ends what hangs, even where no thread of Python can run or the parent was killed.
    signal.alarm(math.ceil(job["timeout_s"]))
    try:
        {"all-reduce": _time_all_reduce, "numbers": _check_numbers}[job["task"]](job)
    except LlmscaleError as error:
        print_to_stderr(f"error: {error}")
        return 2
    return 0


def _start_ranks(job: Mapping[str, Any]) -> int:
    """Run this host's ranks, and return their exit status."""
    names = {"MASTER_ADDR": "master", "MASTER_PORT": "port", "WORLD_SIZE": "world_size"}
    meeting = {variable: str(job[key]) for variable, key in names.items()}
    environments = rank_environment({**os.environ, _JOB_VARIABLE: json.dumps(job)}, job["ranks"], meeting)
    return LocalRanks(module_command(_MODULE), environments, show=print_to_stderr).run()


# ---------------------------------------------------------------- the timed all-reduce


@dataclass(frozen=True)
class AllReduceResult:
    """Report of rank 0."""

    backend: str
    """gloo or nccl."""
    world_size: int
    num_bytes: int
    seconds: float
    """Median time of one all-reduce of num_bytes."""
    sees: list[bool]
    """True for a rank that sees a file of rank 0 in the run folder."""

    @property
    def bus_bytes_per_s(self) -> float:
        """Return the bytes per second of each link in one direction.

        2 (N - 1) / N of the buffer passes each link (NVIDIA's nccl-tests, PERFORMANCE.md).
        """
        return 2 * (self.world_size - 1) / self.world_size * self.num_bytes / self.seconds


def measure_all_reduce(
    hosts: Mapping[str, int], reports: Mapping[str, HostReport], promised_bytes_per_s: float | None
) -> Iterator[CheckRow]:
    """Time an all-reduce over all GPUs of the hosts with reports, or over one process per host without GPUs.

    `hosts` has the slots; `promised_bytes_per_s` is of the network per host, None if unknown. No row for a single rank.
    """
    on_gpus = all(report.num_gpus for report in reports.values())
    ranks = {host: slots if on_gpus else 1 for host, slots in hosts.items() if host in reports}
    first = next(iter(ranks))
    if sum(ranks.values()) < 2:
        return
    is_alone = len(ranks) == 1
    report = reports[first]
    job = {
        "task": "all-reduce",
        "backend": "nccl" if on_gpus else "gloo",
        "master": "127.0.0.1" if is_alone else report.address or first,
        "port": report.spare_port,
        "wait_s": _WAIT_S,
        "timeout_s": _WAIT_S + _SPARE_S,
        "folder": None if is_alone else report.folder,
        "file": f".llmscale-doctor-{secrets.token_hex(8)}",
    }
    answer, failures = _ask_ranks(ranks, job, _WAIT_S + 3 * _SPARE_S)
    if failures:
        yield red(
            "all-reduce",
            f"did not finish: {format_by_host(failures)}",
            "Open all TCP ports between the hosts (firewalld, ufw, security groups), as ranks connect to each other on "
            "any port. Or name the interface: export GLOO_SOCKET_IFNAME=... NCCL_SOCKET_IFNAME=...",
        )
        return
    result = AllReduceResult(**json.loads(answer))
    yield check_all_reduce(result, promised_bytes_per_s)
    if job["folder"]:
        host_of = [host for host, count in ranks.items() for _ in range(count)]
        blind = dict.fromkeys(host for host, sees in zip(host_of, result.sees, strict=True) if not sees)
        yield _check_shared_folder(report.folder, first, list(blind))


def _check_shared_folder(folder: str | None, writer: str, blind: Sequence[str]) -> CheckRow:
    """Return the row for a run folder that the hosts in `blind` do not share."""
    if not blind:
        return green("run folder", f"{folder} is on one shared file system")
    return yellow(
        "run folder",
        f"{folder} is not on one shared file system: a file of {writer} is not there on {format_hosts(blind)}. Each "
        "host keeps its own ranks' part of every checkpoint",
        "To survive the loss of a host, put --run on NFS, Lustre or the like, or in a store (--run s3://...).",
    )


def check_all_reduce(result: AllReduceResult, promised_bytes_per_s: float | None) -> CheckRow:
    """Compare the bus bandwidth with the promised one (bytes/s, one direction)."""
    speed = (
        f"{_format_speed(result.bus_bytes_per_s)} over {result.world_size} ranks on {result.backend} "
        f"({result.num_bytes / 2**20:.0f} MiB in {result.seconds * 1e3:.0f} ms)"
    )
    if promised_bytes_per_s is None:
        return green("all-reduce", speed)
    speed += f"; --interconnect promises {_format_speed(promised_bytes_per_s)}"
    frac = result.bus_bytes_per_s / promised_bytes_per_s
    if frac >= _SLOW_WARN_FRAC:
        return green("all-reduce", speed)
    fix = (
        "Check which interface it uses (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO prints NET/IB or "
        "NET/Socket), and test the link with iperf3."
    )
    return (red if frac < _SLOW_FAIL_FRAC else yellow)("all-reduce", speed, fix)


def _format_speed(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e8:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    return f"{bytes_per_s / 1e6:.2f} MB/s"


def _time_all_reduce(job: Mapping[str, Any]) -> None:
    """Join the other ranks, measure, and print the result on rank 0. Imports torch. Collective."""
    import torch
    import torch.distributed as dist

    # The interface that a run's ranks would use.
    set_network_interface()
    backend = job["backend"]
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=job["wait_s"]))
    rank = dist.get_rank()
    world_size = dist.get_world_size()

    def reduce_once(num_bytes: int) -> float:
        """Return the seconds of one all-reduce on the slowest rank."""
        buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(buffer)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    num_bytes = _FIRST_BYTES
    while reduce_once(num_bytes) < _LONG_S and num_bytes < _MAX_BYTES[backend]:
        num_bytes *= 4
    seconds = statistics.median(reduce_once(num_bytes) for _ in range(_REPEATS))
    sees: list[bool] = [True] * world_size
    if job["folder"]:
        parent = next(path for path in (Path(job["folder"]), *Path(job["folder"]).parents) if path.is_dir())
        file = parent / job["file"]
        dist.all_gather_object(sees, _sees_file(file, rank))
        if rank == 0:
            file.unlink()
    if rank == 0:
        print_answer(json.dumps(asdict(AllReduceResult(backend, world_size, num_bytes, seconds, sees))))
    dist.barrier()
    dist.destroy_process_group()


def _sees_file(file: Path, rank: int) -> bool:
    """Return whether this rank sees a file that rank 0 writes. Collective; rank 0 removes it at the end."""
    import torch.distributed as dist

    if rank == 0:
        file.touch()
    dist.barrier()
    deadline_s = time.monotonic() + _LOOK_S
    while not file.exists() and time.monotonic() < deadline_s:
        # Opening the folder asks a network file system's server again.
        os.listdir(file.parent)
        time.sleep(0.5)
    return file.exists()


# ---------------------------------------------------------------- the numbers of a run's engine


def prove(hosts: Mapping[str, int], flags: Sequence[str], timeout_s: float) -> Report:
    """Check a run on `hosts`, each with its number of ranks; what is wrong on several is tried on one rank, too.

    `timeout_s` is the time of all passes and tries on the same ranks.

    Raises ConfigError for a run that cannot be, and MachineError for ranks without a report.
    """
    job: dict[str, object] = {"flags": list(flags), "tries": None, "is_undivided": False, "timeout_s": timeout_s}
    report = _ask_numbers(hosts, job)
    first = report.first_wrong
    if first is None or report.setting or sum(hosts.values()) == 1 or first.link in ("loss", "gradient"):
        return report
    alone = _ask_numbers({next(iter(hosts)): 1}, {**job, "tries": (), "is_undivided": True})
    tries = (*report.tries, Try(ONE_RANK, "wrong" if alone.first_wrong else "right"))
    if alone.first_wrong is not None:
        tries += _ask_numbers(hosts, {**job, "tries": LAST}).tries
    return replace(report, tries=tries)


def _ask_numbers(hosts: Mapping[str, int], job: Mapping[str, Any]) -> Report:
    # The first host is this machine or, as in `deepspeed`, one that its name reaches.
    if len(hosts) == 1:
        master = "127.0.0.1"
    else:
        master = next(iter(hosts))
    place = {"task": "numbers", "master": master, "port": find_port()}
    answer, failures = _ask_ranks(hosts, {**job, **place}, job["timeout_s"])
    if failures:
        reasons = "; ".join(f"{host}: {reason}" for host, reason in failures.items())
        raise MachineError(
            f"the ranks did not finish the check of their numbers: {reasons}. --timeout gives them more time."
        )
    try:
        return TypeAdapter(Report).validate_json(answer)
    except ValidationError:
        raise MachineError("the ranks did not print a report that this llmscale can read.") from None


def _check_numbers(job: Mapping[str, Any]) -> None:
    """Join the other ranks, check, and print the report on rank 0. Imports torch. Collective."""
    from llmscale.engine.process_group import join_world, leave_world
    from llmscale.numerics.block import read_case
    from llmscale.numerics.check import check_run, undivided

    case = read_case(job["flags"])
    if job["is_undivided"]:
        case = undivided(case)
    world = join_world()
    report = check_run(case, world, None if job["tries"] is None else tuple(job["tries"]))
    if world.is_main:
        print_answer(json.dumps(asdict(report)))
    leave_world()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads may abort the interpreter's own way out.
    os._exit(code)
