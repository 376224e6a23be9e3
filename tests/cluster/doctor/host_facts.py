"""Facts of hosts on which everything is as it should be, for tests to break one thing at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmscale.cluster.doctor.devices import check_gpus
from llmscale.cluster.doctor.facts import (
    CheckRow,
    CodeFacts,
    DataFacts,
    FileFacts,
    FolderFacts,
    Gpu,
    GpuFacts,
    HostFacts,
    ImportFacts,
    Interface,
    NetworkFacts,
    Route,
    RunFacts,
    SystemFacts,
)
from llmscale.cluster.doctor.network import check_network
from llmscale.cluster.doctor.run import (
    SharedFolder,
    check_data,
    check_ds_config,
    check_plan,
    check_run_config,
    check_run_folder,
)
from llmscale.cluster.doctor.software import check_late, check_software
from llmscale.cluster.doctor.system import check_system
from llmscale.cluster.hostfile import Host
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.run_config import build_run_config

GIB = 2**30
LOOPBACK = Interface("lo", True, 65536, "127.0.0.1", None)


def build_host(name: str = "node-0", address: str = "10.0.0.1", num_gpus: int = 0) -> HostFacts:
    """One of the pair node-0 (10.0.0.1) and node-1 (10.0.0.2); Debian's habit included that a host's own name stands
    for 127.0.1.1."""
    routes = {
        peer: Route("127.0.1.1", "127.0.0.1") if peer == name else Route(other, address)
        for peer, other in (("node-0", "10.0.0.1"), ("node-1", "10.0.0.2"))
    }
    cuda = "12.6" if num_gpus else None
    return HostFacts(
        code=CodeFacts(
            python="3.11.7",
            executable="/env/bin/python",
            package="/code/llmscale",
            sha256="a" * 64,
            libraries={"torch": "2.13.0", "deepspeed": "0.19.8", "mosaicml-streaming": "0.13.0", "numpy": "2.1.3"},
            torch_cuda=cuda,
            nccl="2.27.3" if cuda else None,
        ),
        imports=ImportFacts(None, num_gpus > 0, num_gpus, 3.0),
        gpus=GpuFacts(
            tuple(Gpu(i, "NVIDIA H100 80GB HBM3", 80 * GIB, GIB // 4, (), 0, False) for i in range(num_gpus)),
            "570.1" if num_gpus else None,
            None,
        ),
        network=NetworkFacts(
            hostname=name,
            hostname_address="127.0.1.1",
            first_address=address,
            interfaces=(LOOPBACK, Interface("eth0", True, 1500, address, 10**10)),
            routes=routes,
            gloo_interface=None,
            nccl_interface=None,
            tp_interface=None,
            infiniband_bits_per_s=(),
            port_free=True,
            spare_port=29500,
        ),
        system=SystemFacts(
            open_files=65536,
            memlock_bytes=8 * 2**20,
            shm_bytes=16 * GIB,
            shm_free_bytes=15 * GIB,
            memory_bytes=512 * GIB,
            cpus=64,
            tools={"c++": "/usr/bin/c++", "ninja": "/env/bin/ninja"},
            libaio=True,
            built_ops=("async_io", "pin_memory"),
            locks=(),
            extensions="/home/user/.cache/torch_extensions",
        ),
        ds=FileFacts("ds.json", (), "d" * 64),
        run=RunFacts(
            config=FileFacts("run.yaml", (), "c" * 64),
            data=DataFacts("/data/set", None, "f" * 64, 50257, 1024, 100_000),
            folder=FolderFacts("/shared/run", "/shared", True, 2000 * GIB, 0, 0),
            problem=None,
        ),
        late={},
    )


def build_pair(num_gpus: int = 0) -> dict[str, HostFacts]:
    """Two healthy hosts."""
    return {"node-0": build_host("node-0", "10.0.0.1", num_gpus), "node-1": build_host("node-1", "10.0.0.2", num_gpus)}


def break_host(pair: dict[str, HostFacts], host: str, group: str, **changes: object) -> dict[str, HostFacts]:
    """The pair with some facts of one group of one host replaced."""
    facts = pair[host]
    changed = replace(getattr(facts, group), **changes)
    return {**pair, host: replace(facts, **{group: changed})}  # type: ignore[arg-type]  # a group by its name


NVME_OPS = ("pin_memory", "async_io")
Pair = dict[str, HostFacts]


def all_rows(facts: Pair, *, slots: int = 1, ops: tuple[str, ...] = (), batch: int = 64) -> list[CheckRow]:
    """What the doctor says of facts, as it puts the checks together."""
    hosts = [Host("node-0", slots), Host("node-1", slots)]
    config = build_run_config({"model": "gpt2-124m", "global_batch_size": batch, "micro_batch_size": 1, "steps": 5000})
    ds = parse_ds_config({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, "ds.json")
    return [
        *check_late(facts),
        *check_software(facts),
        *check_gpus(hosts, facts),
        *check_network(facts, "node-0", 29500),
        *check_system(facts, 2 * slots, ops),
        *check_ds_config(facts),
        *check_run_config(facts),
        *check_data(facts),
        *check_plan(hosts, facts, config, ds),
        *check_run_folder(facts, SharedFolder("/shared", "node-0", None, {"node-1": True})),
    ]


def not_green(rows: list[CheckRow]) -> list[CheckRow]:
    return [row for row in rows if row.status != "ok"]


def change_network(**changes: object) -> Callable[[Pair], Pair]:
    return lambda pair: break_host(pair, "node-1", "network", **changes)


def change_code(**changes: object) -> Callable[[Pair], Pair]:
    return lambda pair: break_host(pair, "node-1", "code", **changes)


def change_system(**changes: object) -> Callable[[Pair], Pair]:
    return lambda pair: break_host(pair, "node-1", "system", **changes)


def change_run(**changes: object) -> Callable[[Pair], Pair]:
    return lambda pair: break_host(pair, "node-1", "run", **changes)


def change_data(**changes: object) -> Callable[[Pair], Pair]:
    def change(pair: Pair) -> Pair:
        run = pair["node-1"].run
        assert run is not None and run.data is not None
        return break_host(pair, "node-1", "run", data=replace(run.data, **changes))  # type: ignore[arg-type]

    return change


#: Name of the fault: how to plant it, the row that must be red, words of its finding, words of its fix.


def change_gpu(**changes: object) -> Callable[[Pair], Pair]:
    """Of the second card of node-1."""

    def change(pair: Pair) -> Pair:
        gpus = pair["node-1"].gpus
        assert gpus is not None
        cards: tuple[Gpu, ...] = (gpus.gpus[0], replace(gpus.gpus[1], **changes))  # type: ignore[arg-type]
        return break_host(pair, "node-1", "gpus", gpus=cards)

    return change
