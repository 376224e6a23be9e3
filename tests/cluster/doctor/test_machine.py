"""Checks of this machine: each fault that can be planted here gives its red row."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

import pytest

from llmscale.cluster.doctor import machine
from llmscale.cluster.doctor.machine import (
    check_cores,
    check_gpus,
    check_imports,
    check_network,
    check_shared_memory,
    check_software,
    host_memory_bytes,
)
from llmscale.cluster.doctor.report import CheckRow, ProbeRequest
from llmscale.cluster.launch import ranks
from llmscale.cluster.launch.ranks import list_gpus


def reds(rows: Iterable[CheckRow]) -> list[CheckRow]:
    return [row for row in rows if row.status == "fail"]


def values(rows: Iterable[CheckRow]) -> dict[str, str]:
    return {row.what: row.found for row in rows if row.what}


def test_versions_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    software = list(check_software())
    assert reds(software) == []
    assert values(software)["torch"] == torch.__version__
    monkeypatch.setattr(machine, "library_versions", lambda: {"deepspeed": None, "numpy": None})
    (row,) = reds(check_software())
    assert row.found == "deepspeed is not installed"


def test_imports_that_fail_or_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_IMPORT_CODE", "raise OSError('libcudart.so.12')")
    (row,) = check_imports([], 300)
    assert "libcudart.so.12" in row.found
    monkeypatch.setattr(machine, "_IMPORT_CODE", "import time; time.sleep(600)")
    (row,) = check_imports([], 0.5)
    assert "no answer within" in row.found


def test_a_torchvision_of_another_torch_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before, after = machine._IMPORT_CODE.split("import torch, deepspeed\nimport llmscale.training.open_session\n")
    monkeypatch.setattr(machine, "_IMPORT_CODE", f"{before}import torch\n{after}")
    (row,) = reds(check_imports([], 300))
    assert "operator torchvision::nms does not exist" in row.found
    assert row.fix.startswith("pip uninstall torchvision")


def fake_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


TWO_GPUS = """echo "0, NVIDIA H100 80GB HBM3, 81559, 512, 570.124.06"
echo "1, NVIDIA H100 80GB HBM3, 81559, 40000, 570.124.06" """


def test_gpus_as_nvidia_smi_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, TWO_GPUS, monkeypatch)
    gpus, problem = list_gpus(300)
    assert problem is None
    assert [(gpu.index, gpu.memory_bytes, gpu.used_bytes) for gpu in gpus] == [
        (0, 81559 * 2**20, 512 * 2**20),
        (1, 81559 * 2**20, 40000 * 2**20),
    ]
    findings = list(check_gpus(gpus, None, 4))
    assert [row.found for row in reds(findings)] == ["2 GPUs for 4 slots", "GPU 1 in use, up to 39.1 GiB"]
    assert values(findings)["kind"] == "NVIDIA H100 80GB HBM3 80 GiB"


def test_a_torch_that_does_not_see_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, TWO_GPUS, monkeypatch)
    monkeypatch.setattr(machine, "_IMPORT_CODE", "print('gpus 0')")
    (row,) = reds(check_imports(list_gpus(300)[0], 300))
    assert "torch" in row.found and row.name == "gpus"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ('echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18', "version mismatch"),
        ("exec sleep 600", "no answer within"),
    ],
)
def test_a_driver_that_fails(script: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, script, monkeypatch)
    (row,) = reds(check_gpus(*list_gpus(0.5 if "sleep" in script else 300), 1))
    assert problem in row.found


def test_cores_are_those_that_ranks_are_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {0: 0, 1: 0, 2: 0, 8: 0, 3: 1, 4: 1, 5: 1, 9: 1}
    for module in (machine, ranks):
        monkeypatch.setattr(module, "allowed_cpus", lambda: nodes)
    assert check_cores(2).found == "rank 0: 0-2,8 (NUMA node 0); rank 1: 3-5,9 (NUMA node 1)"
    assert check_cores(1).found == "1 rank on 8, not bound"
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert check_cores(2).found == "ranks are not bound: OMP_PROC_BIND is set"


def test_no_nvidia_smi_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus(1) == ([], None)
    assert reds(check_gpus([], None, 4)) == []


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (None, "node-1 does not resolve"),
        ("127.0.1.1", "node-1 resolves to 127.0.1.1, which is this host itself"),
        ("255.255.255.255", "there is no route to node-1"),
    ],
)
def test_names_that_lead_nowhere(address: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(_: str) -> str:
        if address is None:
            raise OSError
        return address

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    (row,) = reds(check_network(ProbeRequest(hosts={"node-0": 1, "node-1": 1}, host="node-0", port=0)))
    assert message in row.found


def test_an_interface_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth97")
    (row,) = reds(check_network(ProbeRequest(hosts={"here": 1}, host="here", port=0)))
    assert "GLOO_SOCKET_IFNAME is 'eth97'" in row.found and "lo" in row.fix


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (row,) = reds(check_network(ProbeRequest(hosts={"here": 1}, host="here", port=port)))
    assert f"{port} is in use on here" in row.found


def test_a_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_shared_memory().status == "ok"
    monkeypatch.setattr(machine, "_SHM_BYTES", 2**60)
    assert "--shm-size=8g" in check_shared_memory().fix


def test_memory_of_this_machine() -> None:
    assert 2**28 < host_memory_bytes() < 2**50
