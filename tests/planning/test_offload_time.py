from __future__ import annotations

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import build_batch_plan
from llmscale.config.hardware import Cluster, get_gpu
from llmscale.config.interconnect import get_interconnect
from llmscale.config.parallel_layout import ParallelLayout
from llmscale.planning.communication_time import count_traffic
from llmscale.planning.offload_time import HostRates, estimate_offload_s

SHAPE = GPTShape(24, 16, 2048, 50304, 2048, tied=False)
GPU = get_gpu("a100-80gb")
NUM = SHAPE.num_parameters


def seconds(step_of, zero: dict[str, object], host: HostRates | None = None, **sections: object) -> float:
    plan = build_batch_plan(global_batch_size=64, ranks=ParallelLayout(8), seq_len=2048, micro_batch_size=4)
    step = step_of({"bf16": {"enabled": True}, "zero_optimization": zero, **sections}, SHAPE, plan)
    return estimate_offload_s(step, Cluster(GPU, 8, get_interconnect("ib-400g")), count_traffic(step), host)


def test_nothing_offloaded_costs_nothing(step_of) -> None:
    assert seconds(step_of, {"stage": 2}) == 0


def test_adam_on_the_host_is_bound_by_the_nodes_memory(step_of) -> None:
    slow = seconds(step_of, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, HostRates(300e9))
    fast = seconds(step_of, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, HostRates(600e9))
    # All eight ranks share one node: together they step every parameter.
    assert slow - fast == pytest.approx(NUM * 28 / 300e9 - NUM * 28 / 600e9)


def test_eight_gpus_copy_no_faster_than_their_hosts_memory(step_of) -> None:
    zero = {
        "stage": 3,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "cpu"},
    }
    assert seconds(step_of, zero, HostRates(80e9)) == pytest.approx(2 * 2 * NUM / 8 * 2 / (80e9 / 8))


def test_gradients_and_parameters_cross_the_host_link(step_of) -> None:
    time = seconds(step_of, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, HostRates(1e30))
    # Two micro-steps send a shard of gradients each, the step brings the parameters back.
    assert time == pytest.approx(NUM / 8 * (2 * 2 + 2) / GPU.host_link_bytes_per_s)


def test_nvme_reads_and_writes_the_states(step_of) -> None:
    nvme = {"device": "nvme", "nvme_path": "/local_nvme"}
    on_disk = seconds(step_of, {"stage": 3, "offload_optimizer": nvme})
    in_memory = seconds(step_of, {"stage": 3, "offload_optimizer": {"device": "cpu"}})
    assert on_disk - in_memory == pytest.approx(NUM * 24 / 6e9)


def test_parameters_on_the_host_cross_as_often_as_they_are_gathered(step_of) -> None:
    zero = {
        "stage": 3,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "cpu"},
    }
    # Twice in each of two micro-steps, a rank's share of 16-bit parameters.
    time = seconds(step_of, zero, HostRates(1e30))
    assert time == pytest.approx(2 * 2 * NUM / 8 * 2 / GPU.host_link_bytes_per_s)


def test_saved_activations_go_out_and_come_back(step_of) -> None:
    time = seconds(step_of, {"stage": 2}, HostRates(1e30), activation_checkpointing={"cpu_checkpointing": True})
    saved = 4 * 2048 * 2048 * 24 * 2
    assert time == pytest.approx(2 * 2 * saved / GPU.host_link_bytes_per_s)
