"""A timed all-reduce over all hosts. No torch but in the ranks.

`python -m llmscale.cluster.doctor.all_reduce`, on every host at once, starts one process per rank; rank 0 prints the
result.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from llmscale.cluster.doctor.report import CheckRow, HostReport, format_by_host, green, red, yellow
from llmscale.cluster.hostfile import Host
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


@dataclass(frozen=True)
class AllReduceResult:
    """A timed all-reduce over all hosts."""

    backend: str
    """gloo or nccl."""
    world_size: int
    num_bytes: int
    seconds: float
    """Median time of one all-reduce of num_bytes."""

    @property
    def bus_bytes_per_s(self) -> float:
        """Return the bytes per second of each link in one direction.

        2 (N - 1) / N of the buffer passes each link (NVIDIA's nccl-tests, PERFORMANCE.md).
        """
        return 2 * (self.world_size - 1) / self.world_size * self.num_bytes / self.seconds


def measure_all_reduce(
    hosts: Sequence[Host], reports: Mapping[str, HostReport], promised_bytes_per_s: float | None
) -> CheckRow | None:
    """Time an all-reduce over all GPUs of the hosts with reports, or over one process per host without GPUs.

    `promised_bytes_per_s`: of the network per host; None if unknown. Returns None for a single rank.
    """
    ready = [host for host in hosts if host.name in reports]
    on_gpus = all(report.num_gpus for report in reports.values())
    ranks = {host.name: host.slots if on_gpus else 1 for host in ready}
    world_size, first = sum(ranks.values()), ready[0].name
    if world_size < 2:
        return None
    job = {
        "backend": "nccl" if on_gpus else "gloo",
        "master": (reports[first].address or first) if len(ready) > 1 else "127.0.0.1",
        "port": reports[first].spare_port,
        "world_size": world_size,
        "timeout_s": _TIMEOUT_S,
    }
    requests: dict[str, dict[str, object]] = {}
    begin = 0
    for name, count in ranks.items():
        requests[name] = {**job, "ranks": [*range(begin, begin + count)]}
        begin += count
    answers = ask_hosts(_MODULE, requests, _TIMEOUT_S + 3 * _SPARE_S)
    failed = {name: answer.describe() for name, answer in answers.items() if answer.returncode}
    lines = [line for line in answers[first].stdout.splitlines() if line.startswith(_RESULT_MARK)]
    if failed or not lines:
        return explain_failure(failed or {first: "no result"})
    return check_all_reduce(AllReduceResult(**json.loads(lines[-1].removeprefix(_RESULT_MARK))), promised_bytes_per_s)


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
    if rank == 0:
        print(_RESULT_MARK + json.dumps(asdict(AllReduceResult(backend, world_size, num_bytes, seconds))), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
