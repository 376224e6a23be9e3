"""The timed all-reduce: real ranks on gloo, and the judgement of what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmscale.cluster.doctor.network import (
    RESULT_MARK,
    AllReduceResult,
    check_all_reduce,
    explain_failed_all_reduce,
    promised_bytes_per_s,
)
from tests.cluster.doctor.host_facts import break_host, build_host, build_pair
from tests.conftest import HANG_S, free_port

REPOSITORY = Path(__file__).resolve().parents[3]


def run_ranks(ranks: int, world_size: int, timeout_s: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "llmscale.cluster.doctor.network", "--backend", "gloo", "--master", "127.0.0.1"),
            *("--port", str(free_port()), "--first-rank", "0", "--ranks", str(ranks)),
            *("--world-size", str(world_size), "--timeout-s", str(timeout_s)),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        timeout=HANG_S,
    )


def test_two_ranks_measure() -> None:
    done = run_ranks(ranks=2, world_size=2, timeout_s=200)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(RESULT_MARK)]
    result = AllReduceResult(**json.loads(line.removeprefix(RESULT_MARK)))
    assert (result.backend, result.world_size) == ("gloo", 2)
    assert result.num_bytes >= 2**20
    assert 0 < result.latency_s < result.seconds
    assert result.bus_bytes_per_s == pytest.approx(result.num_bytes / result.seconds)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_not_waited_for() -> None:
    began = time.monotonic()
    done = run_ranks(ranks=1, world_size=2, timeout_s=3)
    assert done.returncode == 1
    assert time.monotonic() - began < 100, "the rendezvous waits for half an hour"
    assert "the ranks did not finish within 3 s" in done.stderr


def result_of(bytes_per_s: float, backend: str = "gloo", world_size: int = 2) -> AllReduceResult:
    """Whose bus bandwidth is `bytes_per_s`."""
    return AllReduceResult(backend, world_size, 10**9, 2 * (world_size - 1) / world_size * 1e9 / bytes_per_s, 1e-4)


@pytest.mark.parametrize(("frac", "status"), [(0.9, "ok"), (0.25, "ok"), (0.15, "warn"), (0.05, "fail")])
def test_the_measured_bandwidth_against_what_the_links_promise(frac: float, status: str) -> None:
    row = check_all_reduce(result_of(frac * 1.25e9), 1.25e9)
    assert row.status == status
    assert "the links promise 1.25 GB/s" in row.found
    if status != "ok":
        assert "iperf3" in row.fix


def test_nccl_on_the_wrong_network_is_found() -> None:
    row = check_all_reduce(result_of(1.1e9, "nccl", 16), 50e9)
    assert row.status == "fail"
    assert "1.10 GB/s over 16 ranks on nccl" in row.found
    assert "NCCL_DEBUG=INFO" in row.fix


def test_an_unknown_link_is_only_measured() -> None:
    assert check_all_reduce(result_of(1e6), None).status == "ok"


def test_what_links_promise() -> None:
    pair = build_pair()
    assert promised_bytes_per_s(pair, "gloo") == 1.25e9
    slow = break_host(pair, "node-1", "network", interfaces=())
    assert promised_bytes_per_s(slow, "gloo") == 1.25e9, "a host whose driver says nothing is left out"
    rails = {
        host: break_host(pair, host, "network", infiniband_bits_per_s=(400 * 10**9, 400 * 10**9))[host] for host in pair
    }
    assert promised_bytes_per_s(rails, "nccl") == 100e9
    assert promised_bytes_per_s({"node-0": build_host(num_gpus=2)}, "nccl") == 450e9, "NVLink of the hardware table"
    assert promised_bytes_per_s({"node-0": build_host()}, "gloo") is None


def test_ranks_that_do_not_meet() -> None:
    row = explain_failed_all_reduce({"a": "the ranks did not finish within 60 s", "b": "Connection refused"}, 29500)
    assert row.status == "fail"
    assert "Connection refused on b" in row.found
    assert "firewall" in row.fix
