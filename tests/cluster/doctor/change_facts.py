"""One thing wrong with the second host of a healthy pair, and what the doctor says of a pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmscale.cluster.doctor.devices import check_gpus
from llmscale.cluster.doctor.host_facts import Gpu, HostFacts
from llmscale.cluster.doctor.network import check_network
from llmscale.cluster.doctor.rows import CheckRow
from llmscale.cluster.doctor.run import (
    SharedFolder,
    check_data,
    check_ds_config,
    check_plan,
    check_run_config,
    check_run_folder,
)
from llmscale.cluster.doctor.software import (
    check_late,
    check_software,
)
from llmscale.cluster.doctor.system import check_system
from llmscale.cluster.hostfile import Host
from llmscale.config.arguments import build_run_config
from llmscale.config.deepspeed.resolve import parse_ds_config
from tests.cluster.doctor.healthy_facts import break_host

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
