"""Every kind of fault in the facts of a pair of hosts gives a red row with its fix; a healthy pair gives none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmscale.cluster.doctor.facts import CheckRow, FileFacts, FolderFacts, ImportFacts, Interface, Route, worst
from llmscale.cluster.doctor.run import SharedFolder, check_plan, check_run_config, check_run_folder
from llmscale.cluster.doctor.software import ClockReading, check_clocks, check_probes, check_reach
from llmscale.cluster.extension_locks import ExtensionLock
from llmscale.cluster.hostfile import Host
from llmscale.cluster.remote import Finished
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.run_config import build_run_config
from llmscale.planning.disk_usage import checkpoints_at_once
from tests.cluster.doctor.host_facts import (
    GIB,
    LOOPBACK,
    NVME_OPS,
    Pair,
    all_rows,
    break_host,
    build_pair,
    change_code,
    change_data,
    change_gpu,
    change_network,
    change_run,
    change_system,
    not_green,
)


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_a_healthy_pair_is_green(num_gpus: int) -> None:
    rows = all_rows(build_pair(num_gpus), slots=max(1, num_gpus), ops=NVME_OPS)
    assert not_green(rows) == []
    assert {"python", "llmscale", "gpus", "interface", "port", "/dev/shm", "ops", "batch", "disk", "data"} <= {
        row.name for row in rows
    }


FAULTS_WITHOUT_GPUS: dict[str, tuple[Callable[[Pair], Pair], str, str, str]] = {
    "another Python": (change_code(python="3.10.4"), "python", "3.10.4 on node-1", "Install the same Python"),
    "another source": (change_code(sha256="b" * 64), "llmscale", "bbbbbbbbbbbb on node-1", "rsync -a --delete"),
    "another torch": (
        change_code(
            libraries={"torch": "2.6.0", "deepspeed": "0.19.8", "mosaicml-streaming": "0.13.0", "numpy": "2.1.3"}
        ),
        "libraries",
        "torch: 2.13.0 on node-0; 2.6.0 on node-1",
        "pip install torch==2.13.0",
    ),
    "no deepspeed": (
        change_code(libraries={"torch": "2.13.0", "deepspeed": None, "mosaicml-streaming": "0.13.0", "numpy": "2.1.3"}),
        "libraries",
        "deepspeed is not installed on node-1",
        "Install the same environment",
    ),
    "another NCCL": (
        change_code(torch_cuda="12.6", nccl="2.20.5"),
        "cuda",
        "NCCL 2.20.5 on node-1",
        "same torch wheel",
    ),
    "import fails": (
        lambda pair: {
            **pair,
            "node-1": replace(pair["node-1"], imports=ImportFacts("OSError: libcudart.so.12", False, 0, 1.0)),
        },
        "imports",
        "libcudart.so.12 on node-1",
        "Repair that environment",
    ),
    "peer does not resolve": (
        change_network(routes={"node-0": Route(None, None), "node-1": Route("127.0.1.1", "127.0.0.1")}),
        "names",
        "node-1 cannot resolve node-0",
        "/etc/hosts on node-1",
    ),
    "peer is loopback": (
        change_network(routes={"node-0": Route("127.0.1.1", "127.0.0.1"), "node-1": Route("127.0.1.1", "127.0.0.1")}),
        "names",
        "on node-1, node-0 resolves to 127.0.1.1",
        "Write node-0's address",
    ),
    "no way to the peer": (
        change_network(routes={"node-0": Route("10.0.0.1", None), "node-1": Route("127.0.1.1", "127.0.0.1")}),
        "names",
        "no route to node-0 (10.0.0.1)",
        "ip link, ip route",
    ),
    "no address": (
        lambda pair: break_host(pair, "node-0", "network", first_address=None),
        "interface",
        "node-0 has only loopback addresses",
        "bring one up",
    ),
    "interface down": (
        change_network(interfaces=(LOOPBACK, Interface("eth0", False, 1500, "10.0.0.2", None))),
        "interface",
        "eth0 (10.0.0.2) is down",
        "ip link set eth0 up",
    ),
    "variable names no interface": (
        change_network(gloo_interface="ib0"),
        "interface",
        "GLOO_SOCKET_IFNAME=ib0, but there is no such interface",
        "Name one of lo, eth0, or unset",
    ),
    "variable names a dead interface": (
        change_network(
            nccl_interface="ib0",
            interfaces=(
                LOOPBACK,
                Interface("eth0", True, 1500, "10.0.0.2", None),
                Interface("ib0", False, 2044, None, None),
            ),
        ),
        "interface",
        "NCCL_SOCKET_IFNAME=ib0, but that is down",
        "ip link set ib0 up",
    ),
    "port taken": (
        lambda pair: break_host(pair, "node-0", "network", port_free=False),
        "port",
        "29500 is in use on node-0",
        "--master_port",
    ),
    "few open files": (change_system(open_files=256), "open files", "256 on node-1", "ulimit -n 65536"),
    "small /dev/shm": (
        change_system(shm_bytes=64 * 2**20, shm_free_bytes=64 * 2**20),
        "/dev/shm",
        "node-1: 64 MiB in total",
        "--shm-size=8g",
    ),
    "full /dev/shm": (
        change_system(shm_free_bytes=10 * 2**20),
        "/dev/shm",
        "10 of 16384 MiB free",
        "remove the files of dead processes",
    ),
    "stale lock": (
        change_system(locks=(ExtensionLock("/cache/async_io/lock", 3600.0, False),)),
        "extension locks",
        "/cache/async_io/lock on node-1",
        "rm /cache/async_io/lock",
    ),
    "no ninja": (
        change_system(built_ops=(), tools={"c++": "/usr/bin/c++", "ninja": None}),
        "ops",
        "missing ninja on node-1",
        "pip install ninja",
    ),
    "no libaio": (change_system(built_ops=(), libaio=False), "ops", "missing libaio.h on node-1", "libaio-dev"),
    "ds_config wrong": (
        lambda pair: {
            host: replace(found, ds=FileFacts("ds.json", ("ds.json: 'a' is not a key. Did you mean 'b'?",), None))
            for host, found in pair.items()
        },
        "ds_config",
        "'a' is not a key.",
        "Did you mean 'b'?",
    ),
    "ds_config differs": (
        lambda pair: {**pair, "node-1": replace(pair["node-1"], ds=FileFacts("ds.json", (), "e" * 64))},
        "ds_config",
        "not the same file on all hosts",
        "Copy one of them",
    ),
    "ds_config on one host only": (
        lambda pair: {
            **pair,
            "node-1": replace(pair["node-1"], ds=FileFacts("ds.json", ("ds_config ds.json does not exist.",), None)),
        },
        "ds_config",
        "on node-1: ds_config ds.json does not exist.",
        "Copy the file of another host to node-1",
    ),
    "run file differs": (
        change_run(config=FileFacts("run.yaml", (), "0" * 64)),
        "run config",
        "not the same file",
        "Copy one of them",
    ),
    "train.py would refuse": (
        change_run(problem="nvme_path /nvme is no folder. Make it on every node."),
        "run config",
        "on node-1: nvme_path /nvme is no folder.",
        "Make it on every node.",
    ),
    "data missing on one host": (
        change_data(problem="Data folder /data/set does not exist. Make it."),
        "data",
        "on node-1: Data folder /data/set does not exist.",
        "rsync -a",
    ),
    "another dataset": (change_data(fingerprint="9" * 64), "data", "999999999999 on node-1", "rsync -a --delete"),
    "run folder not writable": (
        change_run(folder=FolderFacts("/shared/run", "/shared", False, 2000 * GIB, 0, 0)),
        "run folder",
        "/shared is not writable on node-1",
        "chown",
    ),
    "disk too small": (
        lambda pair: break_host(pair, "node-0", "run", folder=FolderFacts("/shared/run", "/shared", True, GIB, 0, 0)),
        "disk",
        "1.00 GiB free for 4 checkpoints of 1.39 GiB each",
        "--keep-last",
    ),
    "a disk hangs": (
        lambda pair: {**pair, "node-1": replace(pair["node-1"], run=None, late={"run": "no answer within 60 s"})},
        "probe",
        "node-1: run: no answer within 60 s",
        "the disk of the data or run folder on node-1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS_WITHOUT_GPUS)
def test_a_fault_is_red_and_names_its_fix(fault: str) -> None:
    plant, name, found, fix = FAULTS_WITHOUT_GPUS[fault]
    rows = [row for row in all_rows(plant(build_pair()), ops=NVME_OPS) if row.status == "fail"]
    assert [row.name for row in rows] == [name]
    assert found in rows[0].found
    assert fix in rows[0].fix


WARNINGS: dict[str, tuple[Callable[[Pair], Pair], str, str]] = {
    "another numpy": (
        change_code(
            libraries={"torch": "2.13.0", "deepspeed": "0.19.8", "mosaicml-streaming": "0.13.0", "numpy": "1.26.4"}
        ),
        "libraries",
        "numpy: 2.1.3 on node-0; 1.26.4 on node-1",
    ),
    "name of another machine": (
        change_network(routes={"node-0": Route("10.0.0.7", "10.0.0.2"), "node-1": Route("127.0.1.1", "127.0.0.1")}),
        "names",
        "on node-1, node-0 resolves to 10.0.0.7",
    ),
    "another MTU": (
        change_network(interfaces=(LOOPBACK, Interface("eth0", True, 9000, "10.0.0.2", None))),
        "mtu",
        "1500 on node-0; 9000 on node-1",
    ),
    "first address is another network's": (
        lambda pair: break_host(
            pair,
            "node-0",
            "network",
            first_address="172.17.0.1",
            interfaces=(
                LOOPBACK,
                Interface("docker0", True, 1500, "172.17.0.1", None),
                Interface("eth0", True, 1500, "10.0.0.1", None),
            ),
        ),
        "master",
        "the first address of node-0 is 172.17.0.1, node-1 reach it as 10.0.0.1",
    ),
    "ops not built": (change_system(built_ops=()), "ops", "not built yet: pin_memory, async_io on node-1"),
    "an idle key": (
        lambda pair: {
            host: replace(found, ds=FileFacts("ds.json", (), "d" * 64, ("aio has no effect without NVMe offload.",)))
            for host, found in pair.items()
        },
        "ds_config",
        "aio has no effect",
    ),
}


@pytest.mark.parametrize("fault", WARNINGS)
def test_a_smaller_fault_is_yellow(fault: str) -> None:
    plant, name, found = WARNINGS[fault]
    rows = not_green(all_rows(plant(build_pair()), ops=NVME_OPS))
    assert {row.status for row in rows} == {"warn"}
    assert rows[0].name == name
    assert found in rows[0].found
    assert rows[0].fix


@pytest.mark.parametrize(
    "lock",
    [ExtensionLock("/cache/x/lock", 3600.0, True), ExtensionLock("/cache/x/lock", 5.0, False)],
    ids=["held", "young"],
)
def test_the_lock_of_a_build_that_runs_is_no_fault(lock: ExtensionLock) -> None:
    assert worst(all_rows(change_system(locks=(lock,))(build_pair()))) == "ok"


def test_a_lock_that_the_other_host_holds_is_no_fault() -> None:
    """Home folders may be shared: node-0 builds, node-1 sees the same file."""
    path = "/home/me/.cache/torch_extensions/x/lock"
    pair = change_system(locks=(ExtensionLock(path, 3600.0, False),))(build_pair())
    pair = break_host(pair, "node-0", "system", locks=(ExtensionLock(path, 3600.0, True),))
    assert worst(all_rows(pair)) == "ok"


def test_a_batch_of_fewer_sequences_than_ranks_is_said_once() -> None:
    pair = build_pair()
    assert not not_green(all_rows(pair, batch=63))
    rows = not_green(all_rows(pair, batch=1))
    assert [row.name for row in rows] == ["batch"]
    text = f"{rows[0].found} {rows[0].fix}"
    assert "global_batch_size 1 has fewer sequences than there are ranks to train on them: 2 ranks." in rows[0].found
    assert "give --global-batch-size 2 or more" in rows[0].fix
    refused = {host: break_host(pair, host, "run", problem=text)[host] for host in pair}
    assert worst(check_run_config(refused, [text])) == "ok"


def test_an_unshared_run_folder_is_a_warning() -> None:
    rows = list(check_run_folder(build_pair(), SharedFolder("/shared", "node-0", None, {"node-1": False})))
    assert [row.status for row in rows] == ["warn"]
    assert "is not there on node-1" in rows[0].found
    assert "NFS" in rows[0].fix


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


def ssh(stderr: str, code: int = 255) -> Finished:
    return Finished(code, "", stderr, 1.0)


@pytest.mark.parametrize(
    ("answer", "found", "fix"),
    [
        (
            ssh("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed."),
            "not the one",
            "-R b",
        ),
        (ssh("No ED25519 host key is known\nHost key verification failed."), "not known here", "ssh-keyscan -H b"),
        (ssh("root@b: Permission denied (publickey)."), "does not accept your key", "ssh-copy-id b"),
        (ssh("ssh: Could not resolve hostname b: Name or service not known"), "does not resolve", "/etc/hosts"),
        (ssh("ssh: connect to host b port 22: Connection refused"), "no ssh server", "systemctl start ssh"),
        (ssh("ssh: connect to host b port 22: No route to host"), "no network path to it", "open port 22"),
        (ssh("ssh: connect to host b port 22: Connection timed out"), "no network path to it", "open port 22"),
        (ssh("kex_exchange_identification: Connection closed by remote host"), "closes the connection", "MaxStartups"),
        (ssh("", 124), "no answer within 1 s", "Log in by hand"),
        (ssh("bash: date: command not found", 127), "`ssh b date` failed", "Log in by hand"),
    ],
)
def test_a_host_that_ssh_does_not_reach(answer: Finished, found: str, fix: str) -> None:
    rows = list(check_reach({"a": Finished(0, "1\n", "", 0.1), "b": answer}))
    assert [row.status for row in rows] == ["ok", "fail"]
    assert rows[0].found.startswith("1 of 2 hosts")
    assert rows[1].found.startswith("b: ")
    assert found in rows[1].found
    assert fix in rows[1].fix


@pytest.mark.parametrize(
    ("offset_s", "uncertainty_s", "status"),
    [(0.1, 0.2, "ok"), (4.0, 3.5, "ok"), (-2.0, 0.2, "warn"), (30.0, 0.2, "fail"), (-30.0, 0.2, "fail")],
)
def test_clocks(offset_s: float, uncertainty_s: float, status: str) -> None:
    rows = list(check_clocks({"a": ClockReading(0.0, 0.1), "b": ClockReading(offset_s, uncertainty_s)}))
    assert worst(rows) == status
    if status != "ok":
        assert f"b is {abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} this machine" in rows[0].found
        assert "set-ntp" in rows[0].fix


@pytest.mark.parametrize(
    ("problem", "fix"),
    [
        ("/env/bin/python: No module named llmscale", "same path on every host"),
        ("the probe is that of another llmscale (2 facts differ)", "same path on every host"),
        ("no answer within 90 s", "stuck disk or driver"),
        ("Segmentation fault", "llmscale.cluster.doctor.diagnose"),
    ],
)
def test_a_probe_that_did_not_run(problem: str, fix: str) -> None:
    (row,) = check_probes({"b": problem})
    assert row.status == "fail"
    assert problem in row.found
    assert fix in row.fix


HOSTS = (Host("node-0", 8), Host("node-1", 8))


def memory_row(model: str, zero: dict[str, object], **run: object) -> CheckRow:
    """Of `model` on two hosts with eight cards of 80 GiB and 512 GiB of host memory."""
    values = {"model": model, "global_batch_size": 64, "micro_batch_size": 4, "steps": 10, **run}
    ds = parse_ds_config({"zero_optimization": zero, "bf16": {"enabled": True}}, "ds.json")
    rows = list(check_plan(HOSTS, build_pair(8), build_run_config(values), ds))
    (row,) = [row for row in rows if row.name == "memory"]
    return row


def test_a_model_that_fits() -> None:
    row = memory_row("gpt2-124m", {"stage": 1})
    assert row.status == "ok"
    assert "of 80.00 GiB on NVIDIA H100 80GB HBM3" in row.found


def test_a_model_that_does_not_fit_and_the_smallest_change_that_does() -> None:
    row = memory_row("gpt3-13b", {"stage": 0})
    assert row.status == "fail"
    assert "of 80.00 GiB on NVIDIA H100 80GB HBM3: parameters" in row.found
    assert "ZeRO stage 1 instead of 0" in row.fix


def test_a_model_that_no_change_makes_fit() -> None:
    row = memory_row("gpt3-175b", {"stage": 1})
    assert row.status == "fail"
    assert "more or larger GPUs" in row.fix


def test_offload_that_the_host_cannot_hold() -> None:
    row = memory_row(
        "gpt3-175b", {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    )
    assert row.status == "fail"
    assert "of host memory" in row.found


def test_hosts_without_gpus_have_no_row() -> None:
    config = build_run_config({"model": "gpt2-124m", "global_batch_size": 64, "steps": 10})
    ds = parse_ds_config({"zero_optimization": {"stage": 1}}, "ds.json")
    assert [row.name for row in check_plan(HOSTS, build_pair(), config, ds)] == ["batch", "disk"]


def test_hosts_of_different_sizes() -> None:
    config = build_run_config({"model": "gpt2-124m", "global_batch_size": 60, "steps": 10})
    ds = parse_ds_config({"zero_optimization": {"stage": 1}}, "ds.json")
    rows = list(check_plan((Host("node-0", 4), Host("node-1", 8)), build_pair(8), config, ds))
    assert [(row.name, row.status) for row in rows] == [("batch", "ok"), ("disk", "ok"), ("memory", "ok")]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 4),
        ({"val_every": 0}, 3),
        ({"keep_last": 4}, 6),
        ({"save_every": 400}, 3),
        ({"save_every": 500}, 2),
        ({"save_every": 0}, 1),
        ({"save_every": 0, "save_every_minutes": 10.0}, 4),
        ({"keep_every": 300}, 7),
        ({"save_every": 250, "keep_every": 250}, 4),
    ],
)
def test_checkpoints_that_lie_on_disk_together(values: dict[str, object], expected: int) -> None:
    """Of a run of 1,000 steps that saves every 100 and keeps two and the best; the new one comes before the
    oldest goes."""
    config = build_run_config({"save_every": 100, **values})
    assert checkpoints_at_once(config, 1000) == expected


def test_space_of_this_runs_own_checkpoints_is_not_counted_twice() -> None:
    """A run that continues replaces them."""
    config = build_run_config({"model": "gpt2-124m", "global_batch_size": 64, "steps": 5000})
    folder = FolderFacts("/shared/run", "/shared", True, 2 * GIB, 4 * GIB, 2)
    pair = break_host(build_pair(), "node-0", "run", folder=folder)
    (row,) = [row for row in check_plan(HOSTS, pair, config, None) if row.name == "disk"]
    assert row.status == "ok"
    assert row.found.startswith("6.00 GiB free for 4 checkpoints of 1.39 GiB each")
