from __future__ import annotations

from dataclasses import replace

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import build_batch_plan
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.hardware import get_gpu
from llmscale.config.interconnect import get_interconnect
from llmscale.config.parallel_layout import ParallelLayout
from llmscale.planning.communication_time import (
    CommunicationTime,
    Traffic,
    count_traffic,
    estimate_communication,
    ring_bytes_per_s,
)

SHAPE = GPTShape(24, 16, 2048, 50304, 2048, tied=False)
NUM = SHAPE.num_parameters
STAGE_3 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


#: Stage 3 that looks nowhere ahead, that keeps nothing either, and not even biases and norms between steps.
NO_PREFETCH = {"stage3_prefetch_bucket_size": 0}
NOTHING_KEPT = {"stage3_max_reuse_distance": 0, **NO_PREFETCH}
NOTHING_STAYS = {"stage3_param_persistence_threshold": 0, **NOTHING_KEPT}


def traffic(
    step_of,
    stage: int,
    *,
    micro_steps: int = 1,
    checkpointing: CheckpointingMode = "none",
    precision: str = "bf16",
    top: dict | None = None,
    **changes,
):
    plan = build_batch_plan(
        global_batch_size=64 * micro_steps, ranks=ParallelLayout(8), seq_len=2048, micro_batch_size=8
    )
    ds = {precision: {"enabled": True}, "zero_optimization": {"stage": stage}, **(top or {})}
    return count_traffic(step_of(ds, SHAPE, plan, checkpointing, zero=changes))


def passes(found: Traffic) -> float:
    """Passes of a ring over all parameters in 16 bits."""
    return (found.gathered_bytes + found.reduced_bytes) / (2 * NUM)


@pytest.mark.parametrize(
    ("stage", "micro_steps", "expected"),
    [
        (0, 1, 2),  # an all-reduce
        (0, 4, 2),  # at the boundary only
        (1, 1, 3),  # all-reduce and all-gather, as DeepSpeed 0.19.8 is built; the ZeRO paper has 2
        (1, 4, 3),
        (2, 1, 3),
        (2, 4, 2 * 4 + 1),  # every micro-step reduces
    ],
)
def test_volumes_of_stages_below_3(step_of, stage: int, micro_steps: int, expected: float) -> None:
    assert passes(traffic(step_of, stage, micro_steps=micro_steps)) == pytest.approx(expected)


def test_stage_2_without_multi_rank_buckets_is_the_papers_volume(step_of) -> None:
    assert passes(traffic(step_of, 2, use_multi_rank_bucket_allreduce=False)) == pytest.approx(2)


def test_stage_3_gathers_twice_and_scatters_once(step_of) -> None:
    assert passes(traffic(step_of, 3, micro_steps=2, **NOTHING_STAYS)) == pytest.approx(2 * 3)


def test_what_stays_between_steps_is_gathered_behind_each_step(step_of) -> None:
    """Biases and norms, every one by itself; and they are not gathered by the passes."""
    found = traffic(step_of, 3, micro_steps=2, **NOTHING_KEPT)
    vectors = [tensor.elements for tensor in SHAPE.tensors.all if tensor.kind == "vector"]
    assert found.small_collectives == len(vectors)
    assert found.gathered_bytes == 2 * (2 * 2 * (NUM - sum(vectors)) + sum(vectors))


def test_stage_3_does_not_gather_again_what_is_still_live(step_of) -> None:
    # With DeepSpeed's 1e9 and no recomputation, the last 5e8 parameters are still gathered.
    expected = 3 - 5e8 / NUM
    none, full = (traffic(step_of, 3, checkpointing=mode, **NO_PREFETCH) for mode in ("none", "full"))
    assert passes(none) == pytest.approx(expected, abs=0.01)
    assert passes(full) > passes(none)
    assert full.collectives > none.collectives
    kept = traffic(step_of, 3, stage3_max_reuse_distance=10**12)
    assert passes(kept) == pytest.approx(2, abs=0.001)
    assert kept.collectives < none.collectives


def test_stage_3_autocast_travels_in_fp32(step_of) -> None:
    top = {"communication_data_type": "fp32"}
    assert passes(traffic(step_of, 3, precision="torch_autocast", top=top, **NOTHING_STAYS)) == pytest.approx(2 * 3)


def test_stage_3_gathers_what_its_prefetcher_has_seen_once(step_of) -> None:
    def gathered(bucket: int, **changes: int) -> float:
        changes = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": bucket, **changes}
        return passes(traffic(step_of, 3, **changes)) - 1

    assert gathered(NUM, stage3_max_live_parameters=10 * NUM) == pytest.approx(1, abs=0.01)
    # Nine modules a block and five more: the larger a bucket than what one module has on average, the more is seen.
    average = NUM // (24 * 9 + 5)
    rates = [
        gathered(bucket, stage3_max_live_parameters=10 * NUM) for bucket in (average // 2, 2 * average, 8 * average)
    ]
    assert 2.001 > rates[0] > rates[1] > rates[2] > 1
    # It runs ahead no further than parameters may live.
    assert gathered(NUM, stage3_max_live_parameters=NUM // 4) == pytest.approx(1.75, abs=0.05)


def test_stage_3_gathers_a_tied_embedding_for_the_head_too(step_of) -> None:
    tied = replace(SHAPE, tied=True)
    plan = build_batch_plan(global_batch_size=8, ranks=ParallelLayout(8), seq_len=2048, micro_batch_size=1)
    step = step_of(STAGE_3, tied, plan, zero=NOTHING_STAYS)
    table = 50304 * 2048
    assert count_traffic(step).gathered_bytes == 2 * 2 * (tied.num_parameters + table)


def test_stage_3_gathers_compiled_blocks_as_a_whole_and_eager_ones_by_matrix(step_of) -> None:
    plan = build_batch_plan(global_batch_size=8, ranks=ParallelLayout(8), seq_len=2048, micro_batch_size=1)
    step = step_of(STAGE_3, SHAPE, plan, zero={**NOTHING_STAYS, "reduce_bucket_size": NUM})
    eager, compiled = (count_traffic(step, compiled_blocks=compiled) for compiled in (False, True))
    # Of four linear layers and two norms a block, two embeddings, the final norm and the head, what each has; in two
    # passes, and one reduction.
    assert (eager.collectives, compiled.collectives) == (2 * (24 * 6 + 4) + 1, 2 * (24 + 4) + 1)
    assert eager.gathered_bytes == compiled.gathered_bytes


def test_stage_3_gathers_tensors_together_until_they_fill_a_bucket(step_of) -> None:
    plan = build_batch_plan(global_batch_size=8, ranks=ParallelLayout(8), seq_len=2048, micro_batch_size=1)

    def calls(bucket: int, compiled: bool) -> int:
        zero = {"reduce_bucket_size": NUM, "stage3_prefetch_bucket_size": bucket}
        return count_traffic(step_of(STAGE_3, SHAPE, plan, zero=zero), compiled_blocks=compiled).collectives

    # A block's four matrices have 12.6M, 4.2M, 16.8M and 16.8M elements, an embedding and the head 103M.
    for compiled in (False, True):
        assert calls(1, compiled) > calls(10_000_000, compiled) > calls(50_000_000, compiled)
    assert calls(1, compiled=True) < calls(1, compiled=False)


def test_one_rank_has_nothing_to_say() -> None:
    found = estimate_communication(Traffic(1e9, 1e9, 10), get_gpu("h100-80gb"), 1, 1, get_interconnect("ib-400g"))
    assert found == CommunicationTime(0, 0, 0)


def test_inside_a_node_the_link_counts() -> None:
    gpu = get_gpu("h100-80gb")
    assert ring_bytes_per_s(gpu, 8, 1, get_interconnect("ethernet-10g")) == gpu.link_bytes_per_s


@pytest.mark.parametrize(
    ("network", "gpus_per_node", "expected"),
    [
        ("ib-400g", 8, 400e9),  # eight adapters together, just below NVLink
        ("ib-800g", 8, 450e9),  # NVLink is the slower one
        ("ib-400g", 1, 50e9),
        ("ethernet-25g", 8, 3.125e9),
    ],
)
def test_between_nodes_all_adapters_of_a_node_count(network: str, gpus_per_node: int, expected: float) -> None:
    rate = ring_bytes_per_s(get_gpu("h100-80gb"), gpus_per_node, 4, get_interconnect(network))
    assert rate == pytest.approx(expected)


def test_latency_grows_with_the_ranks() -> None:
    """NCCL's own figures for a ring: 3.4 us a step in a node, 14 and the network's latency across."""
    gpu, network = get_gpu("h100-80gb"), get_interconnect("ethernet-25g")
    few = estimate_communication(Traffic(0, 0, 1000), gpu, 8, 2, network)
    many = estimate_communication(Traffic(0, 0, 1000), gpu, 8, 5, network)
    assert few.waiting_s == pytest.approx(0.66 * 1000 * (14 * 3.4e-6 + 64e-6))
    assert many.waiting_s == pytest.approx(0.66 * 1000 * (35 * 3.4e-6 + 4 * 64e-6))
    assert few.wire_s == few.copies_s == 0


def test_copies_are_through_the_gpus_own_memory() -> None:
    network = get_interconnect("ib-400g")
    slow, fast = (
        estimate_communication(Traffic(1e9, 1e9, 1), get_gpu(gpu), 8, 2, network) for gpu in ("h100-80gb", "h200")
    )
    assert slow.copies_s / fast.copies_s == pytest.approx(4.8 / 3.35)
    assert slow.wire_s == fast.wire_s


def test_hpz_gathers_once_a_step_from_all_ranks_and_else_within_the_group(step_of) -> None:
    plain = traffic(step_of, 3, micro_steps=4, **NOTHING_STAYS)
    hpz = traffic(step_of, 3, micro_steps=4, **NOTHING_STAYS, zero_hpz_partition_size=4)
    assert hpz.gathered_bytes == 2 * NUM
    assert hpz.group_gathered_bytes + hpz.gathered_bytes == plain.gathered_bytes
    assert hpz.group_collectives + hpz.collectives == plain.collectives
    assert hpz.group_bytes_per_rank == pytest.approx(hpz.group_gathered_bytes * 3 / 4)


def test_hpz_pays_within_nodes_and_not_across_them(step_of) -> None:
    gpu, network = get_gpu("h100-80gb"), get_interconnect("ethernet-25g")
    changes = {"micro_steps": 4, **NOTHING_STAYS}

    def waited_s(group: int) -> float:
        found = traffic(step_of, 3, zero_hpz_partition_size=group, **changes)
        return estimate_communication(found, gpu, 4, 2, network).wire_s

    assert waited_s(4) < 0.7 * waited_s(1)
    assert waited_s(8) == pytest.approx(waited_s(1), rel=0.01)
