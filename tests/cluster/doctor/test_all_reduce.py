"""The timed all-reduce: real ranks on gloo, and the judgement of what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from llmscale.cluster.doctor.all_reduce import _RESULT_MARK, AllReduceResult, check_all_reduce, explain_failure
from tests.conftest import HANG_S, REPOSITORY, free_port


def run_ranks(ranks: int, world_size: int, timeout_s: int) -> subprocess.CompletedProcess[str]:
    arguments = ["--backend=gloo", "--master=127.0.0.1", f"--port={free_port()}", "--first-rank=0"]
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "llmscale.cluster.doctor.all_reduce",
            *arguments,
            f"--ranks={ranks}",
            f"--world-size={world_size}",
            f"--timeout-s={timeout_s}",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        timeout=HANG_S,
    )


def test_two_ranks_measure() -> None:
    done = run_ranks(ranks=2, world_size=2, timeout_s=200)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(_RESULT_MARK)]
    result = AllReduceResult(**json.loads(line.removeprefix(_RESULT_MARK)))
    assert (result.backend, result.world_size) == ("gloo", 2)
    assert result.num_bytes >= 2**20
    assert result.seconds > 0
    assert result.bus_bytes_per_s == pytest.approx(result.num_bytes / result.seconds)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_not_waited_for() -> None:
    began = time.monotonic()
    done = run_ranks(ranks=1, world_size=2, timeout_s=3)
    assert done.returncode == 1
    assert time.monotonic() - began < HANG_S, "the rendezvous waits for half an hour"
    assert "the ranks did not finish within 3 s" in done.stderr


@pytest.mark.parametrize(("frac", "status"), [(0.9, "ok"), (0.25, "ok"), (0.15, "warn"), (0.05, "fail")])
def test_the_measured_bandwidth_against_the_promised_one(frac: float, status: str) -> None:
    result = AllReduceResult("gloo", 2, 10**9, 1e9 / (frac * 1.25e9))
    row = check_all_reduce(result, 1.25e9)
    assert row.status == status
    assert "promises 1.25 GB/s" in row.found
    assert check_all_reduce(result, None).status == "ok"


def test_ranks_that_do_not_meet() -> None:
    row = explain_failure({"a": "the ranks did not finish within 60 s", "b": "Connection refused"})
    assert row.status == "fail"
    assert "Connection refused on b" in row.found
    assert "firewall" in row.fix
