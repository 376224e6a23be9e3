"""A timed all-reduce over all hosts, whose ranks also find out whether they share a folder. No torch but in the ranks.

`python -m llmscale.cluster.doctor.all_reduce`, on every host at once, starts one process per rank; rank 0 prints the
result.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from llmscale.cluster.doctor.report import CheckRow, HostReport, format_by_host, format_hosts, green, red, yellow
from llmscale.cluster.remote import ask_hosts, read_request
from llmscale.engine.network import set_network_interface
from llmscale.untrusted.interpreter import module_command

#: Bandwidth below these fractions of the promised one is red and yellow: the all-reduce takes another path.
_SLOW_FAIL_FRAC, _SLOW_WARN_FRAC = 0.1, 0.2
_TIMEOUT_S = 60
#: Seconds after the limit until the kernel kills the ranks, if they have not ended themselves.
_SPARE_S = 5
#: Precedes the JSON of the result.
_RESULT_MARK = "llmscale-all-reduce "
_MODULE = "llmscale.cluster.doctor.all_reduce"
#: Holds the job of a rank, in JSON.
_JOB_VARIABLE = "LLMSCALE_ALL_REDUCE"
#: Buffers grow until one all-reduce takes this long, or up to these sizes.
_LONG_S = 0.25
_MAX_BYTES = {"gloo": 64 * 2**20, "nccl": 1024 * 2**20}
_FIRST_BYTES = 2**20
_REPEATS = 3
#: Time for a network file system to show a new file to another host.
_LOOK_S = 5.0


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
    job = {
        "backend": "nccl" if on_gpus else "gloo",
        "master": (reports[first].address or first) if len(ranks) > 1 else "127.0.0.1",
        "port": reports[first].spare_port,
        "world_size": sum(ranks.values()),
        "timeout_s": _TIMEOUT_S,
        "folder": reports[first].folder if len(ranks) > 1 else None,
        "file": f".llmscale-doctor-{secrets.token_hex(8)}",
    }
    host_of = [host for host, count in ranks.items() for _ in range(count)]
    requests = {host: {**job, "ranks": [r for r, at in enumerate(host_of) if at == host]} for host in ranks}
    answers = ask_hosts(_MODULE, requests, _TIMEOUT_S + 3 * _SPARE_S)
    failed = {host: answer.describe() for host, answer in answers.items() if answer.returncode}
    lines = [line for line in answers[first].stdout.splitlines() if line.startswith(_RESULT_MARK)]
    if failed or not lines:
        yield explain_failure(failed or {first: "no result"})
        return
    result = AllReduceResult(**json.loads(lines[-1].removeprefix(_RESULT_MARK)))
    yield check_all_reduce(result, promised_bytes_per_s)
    if job["folder"]:
        blind = dict.fromkeys(host for host, sees in zip(host_of, result.sees, strict=True) if not sees)
        yield check_shared_folder(reports[first].folder, first, blind)


def check_shared_folder(folder: str | None, writer: str, blind: Iterable[str]) -> CheckRow:
    """Return the row for a run folder that the hosts in `blind` do not share."""
    if not (hosts := format_hosts(blind)):
        return green("run folder", f"{folder} is on one shared file system")
    return yellow(
        "run folder",
        f"{folder} is not on one shared file system: a file of {writer} is not there on {hosts}. Each host keeps its "
        "own ranks' part of every checkpoint",
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
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2f} MB/s"


def explain_failure(reasons: Mapping[str, str]) -> CheckRow:
    """Return the row for ranks that did not meet or did not finish; `reasons` has the last line of each host."""
    return red(
        "all-reduce",
        f"did not finish: {format_by_host(reasons)}",
        "Open all TCP ports between the hosts (firewalld, ufw, security groups), as ranks connect to each other on "
        "any port. Or name the interface: export GLOO_SOCKET_IFNAME=... NCCL_SOCKET_IFNAME=...",
    )


def main() -> int:
    """Start this host's ranks of the all-reduce, or be one of them (its variable is set)."""
    if _JOB_VARIABLE in os.environ:
        job = json.loads(os.environ[_JOB_VARIABLE])
        # The kernel ends a rank that hangs outside of Python, also if its parent was killed.
        signal.alarm(job["timeout_s"] + _SPARE_S)
        _time_all_reduce(job)
        return 0
    request = read_request()
    jobs = [{**request, "rank": rank} for rank in request["ranks"]]
    ranks = [
        subprocess.Popen(module_command(_MODULE), env={**os.environ, _JOB_VARIABLE: json.dumps(job)}) for job in jobs
    ]
    return int(any([rank.wait() for rank in ranks]))


def _time_all_reduce(job: Mapping[str, Any]) -> None:
    """Join the other ranks, measure, and print the result on rank 0. Imports torch. Collective."""
    import torch
    import torch.distributed as dist

    # The interface that a run's ranks would use.
    os.environ["MASTER_ADDR"] = job["master"]
    set_network_interface()
    backend, world_size, rank, device = job["backend"], job["world_size"], job["rank"], torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank - job["ranks"][0])
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"tcp://{job['master']}:{job['port']}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=job["timeout_s"]),
    )

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
        result = AllReduceResult(backend, world_size, num_bytes, seconds, sees)
        print(_RESULT_MARK + json.dumps(asdict(result)), flush=True)
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


if __name__ == "__main__":
    sys.exit(main())
