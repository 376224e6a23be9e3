"""The timed all-reduce: real ranks on gloo, and the judgement of what they measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llmscale.cluster.doctor.all_reduce import _MODULE, _RESULT_MARK, AllReduceResult, check_all_reduce
from llmscale.cluster.remote import Finished, ask_hosts
from tests.conftest import HANG_S, free_port


def run_ranks(ranks: int, world_size: int, timeout_s: int, folder: Path) -> Finished:
    job = {"backend": "gloo", "master": "127.0.0.1", "port": free_port(), "world_size": world_size}
    request = {**job, "timeout_s": timeout_s, "folder": str(folder), "file": ".mark", "ranks": [*range(ranks)]}
    return ask_hosts(_MODULE, {"localhost": request}, HANG_S)["localhost"]


def test_two_ranks_measure_and_see_one_folder(tmp_path: Path) -> None:
    done = run_ranks(ranks=2, world_size=2, timeout_s=200, folder=tmp_path / "not" / "there")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(_RESULT_MARK)]
    result = AllReduceResult(**json.loads(line.removeprefix(_RESULT_MARK)))
    assert (result.backend, result.world_size, result.sees) == ("gloo", 2, [True, True])
    assert result.num_bytes >= 2**20
    assert result.bus_bytes_per_s == pytest.approx(result.num_bytes / result.seconds)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    done = run_ranks(ranks=1, world_size=2, timeout_s=3, folder=tmp_path)
    assert done.returncode == 1
    assert done.seconds < HANG_S, "the rendezvous waits for half an hour"
    assert "Timed out" in done.describe()


@pytest.mark.parametrize(("frac", "status"), [(0.25, "ok"), (0.15, "warn"), (0.05, "fail")])
def test_the_measured_bandwidth_against_the_promised_one(frac: float, status: str) -> None:
    result = AllReduceResult("gloo", 2, 10**9, 1e9 / (frac * 1.25e9), [True, True])
    row = check_all_reduce(result, 1.25e9)
    assert row.status == status
    assert "promises 1.25 GB/s" in row.found
    assert check_all_reduce(result, None).status == "ok"
