"""Every fault of GPUs gives a red row with its fix."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.doctor.change_facts import (
    Pair,
    all_rows,
    change_gpu,
)
from tests.cluster.doctor.healthy_facts import GIB, break_host, build_pair

FAULTS_WITH_GPUS: dict[str, tuple[Callable[[Pair], Pair], str, str, str]] = {
    "a card is missing": (
        lambda pair: break_host(pair, "node-1", "gpus", gpus=pair["node-1"].gpus.gpus[:1]),  # type: ignore[union-attr]
        "gpus",
        "node-1: 1 GPUs for 2 slots",
        "node-1 slots=1",
    ),
    "no driver": (
        lambda pair: break_host(pair, "node-1", "gpus", gpus=(), driver=None),
        "gpus",
        "node-1: 0 GPUs for 2 slots",
        "Install the NVIDIA driver",
    ),
    "driver does not answer": (
        lambda pair: break_host(pair, "node-1", "gpus", gpus=(), problem="Driver/library version mismatch"),
        "gpus",
        "Driver/library version mismatch",
        "reboot after a driver update",
    ),
    "card in use": (
        change_gpu(used_bytes=30 * GIB, processes=(4711,)),
        "gpus free",
        "node-1: GPU 1 in use by process 4711, up to 30.0 GiB",
        "kill 4711",
    ),
    "memory errors": (change_gpu(uncorrected_errors=3), "ecc", "GPU 1 had 3 uncorrected", "--gpu-reset -i 1"),
    "rows to remap": (change_gpu(needs_reset=True), "ecc", "waiting to be remapped", "reboot"),
    "torch without CUDA": (
        lambda pair: break_host(break_host(pair, "node-1", "code", torch_cuda=None), "node-0", "code", torch_cuda=None),
        "torch sees gpus",
        "built without CUDA",
        "pip install torch",
    ),
    "driver too old": (
        lambda pair: break_host(pair, "node-1", "imports", cuda_available=False),
        "torch sees gpus",
        "torch for CUDA 12.6 finds no GPU with driver 570.1",
        "Update the driver on node-1",
    ),
    "memory cannot be locked": (
        lambda pair: break_host(pair, "node-1", "network", infiniband_bits_per_s=(400 * 10**9,)),
        "locked memory",
        "8 MiB on node-1",
        "ulimit -l unlimited",
    ),
}


@pytest.mark.parametrize("fault", FAULTS_WITH_GPUS)
def test_a_fault_of_gpu_hosts_is_red_and_names_its_fix(fault: str) -> None:
    plant, name, found, fix = FAULTS_WITH_GPUS[fault]
    rows = [row for row in all_rows(plant(build_pair(2)), slots=2) if row.status == "fail"]
    assert {row.name for row in rows} == {name}
    assert found in rows[0].found
    assert fix in rows[0].fix


#: What does not stop a run, but is worth a word.
