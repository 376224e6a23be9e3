"""What a run needs against what the hosts have: memory and disk."""

from __future__ import annotations

import pytest

from llmscale.cluster.doctor.host_facts import FolderFacts
from llmscale.cluster.doctor.rows import CheckRow
from llmscale.cluster.doctor.run import check_plan
from llmscale.cluster.hostfile import Host
from llmscale.config.arguments import build_run_config
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.planning.disk_usage import checkpoints_at_once
from tests.cluster.doctor.healthy_facts import GIB, break_host, build_pair

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
    assert "more GPUs" in row.fix


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
        ({}, 3),
        ({"keep_last": 4}, 5),
        ({"save_every": 400}, 3),
        ({"save_every": 500}, 2),
        ({"save_every": 0}, 1),
        ({"save_every": 0, "save_every_minutes": 10.0}, 3),
        ({"keep_every": 300}, 6),
        ({"save_every": 250, "keep_every": 250}, 4),
    ],
)
def test_checkpoints_that_lie_on_disk_together(values: dict[str, object], expected: int) -> None:
    """Of a run of 1,000 steps that saves every 100 and keeps two; the new one comes before the oldest goes."""
    config = build_run_config({"save_every": 100, **values})
    assert checkpoints_at_once(config, 1000) == expected


def test_space_of_this_runs_own_checkpoints_is_not_counted_twice() -> None:
    """A run that continues replaces them."""
    config = build_run_config({"model": "gpt2-124m", "global_batch_size": 64, "steps": 5000})
    folder = FolderFacts("/shared/run", "/shared", True, 2 * GIB, 3 * GIB, 2)
    pair = break_host(build_pair(), "node-0", "run", folder=folder)
    (row,) = [row for row in check_plan(HOSTS, pair, config, None) if row.name == "disk"]
    assert row.status == "ok"
    assert row.found.startswith("5.00 GiB free for 3 checkpoints of 1.39 GiB each")
