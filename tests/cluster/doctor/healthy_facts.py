"""Facts of hosts on which everything is as it should be, for tests to break one thing at a time."""

from __future__ import annotations

from dataclasses import replace

from llmscale.cluster.doctor.facts import (
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
    return {
        "node-0": build_host("node-0", "10.0.0.1", num_gpus),
        "node-1": build_host("node-1", "10.0.0.2", num_gpus),
    }


def break_host(pair: dict[str, HostFacts], host: str, group: str, **changes: object) -> dict[str, HostFacts]:
    """The pair with some facts of one group of one host replaced."""
    facts = pair[host]
    changed = replace(getattr(facts, group), **changes)
    return {**pair, host: replace(facts, **{group: changed})}  # type: ignore[arg-type]  # a group by its name
