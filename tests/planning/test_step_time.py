"""Step times against published runs, their parts, and the traffic of every ZeRO stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan, ParallelLayout, build_batch_plan
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.hardware import Cluster, custom_gpu, get_gpu, get_interconnect
from llmscale.config.optimizers import ADAMW, MUON, OptimizerSpec
from llmscale.config.resolve import ResolvedStep, resolve_step
from llmscale.planning.kernels import KernelSettings
from llmscale.planning.step_time import (
    OWN_KERNELS,
    CommunicationTime,
    HostRates,
    Throughput,
    Traffic,
    compute_parts,
    count_traffic,
    estimate_communication,
    estimate_compute_s,
    estimate_dispatch_s,
    estimate_exchange_s,
    estimate_offload_s,
    estimate_step,
    ring_bytes_per_s,
    token_work,
)
from tests.planning.published_runs import MODELS, fsdp_traffic, read_rows

#: MPT's shapes: n_layer, n_head, n_embd.
MPT = {
    "125m": (12, 12, 768),
    "350m": (24, 16, 1024),
    "760m": (24, 12, 1536),
    "1b": (24, 16, 2048),
    "3b": (32, 20, 2560),
    "7b": (32, 32, 4096),
    "13b": (40, 40, 5120),
    "30b": (48, 56, 7168),
    "70b": (80, 64, 8192),
}
BF16 = {"bf16": {"enabled": True}}
STAGE_3 = BF16 | {"zero_optimization": {"stage": 3}}


def fitted_to() -> list[dict[str, str]]:
    return read_rows("llm_foundry_rows.csv")


def predict(row: dict[str, str], step_of) -> float:
    """Tokens per second and GPU of a row of the fit. FULL_SHARD gathers twice, SHARD_GRAD_OP once; mixed precision
    DEFAULT reduces in fp32, PURE in bf16."""
    gpus, micro, steps = int(row["gpus"]), int(row["micro_batch_size"]), int(row["accumulation"])
    shape = GPTShape(*MPT[row["model"]], 50368, int(row["seq_len"]))
    plan = build_batch_plan(
        global_batch_size=gpus * micro * steps,
        ranks=ParallelLayout(gpus),
        seq_len=shape.seq_len,
        micro_batch_size=micro,
    )
    traffic = fsdp_traffic(
        shape,
        gathers=steps * (2 if row["sharding"] == "FULL_SHARD" else 1),
        scatters=steps,
        gradient_bytes=4 if row["mixed_precision"] == "DEFAULT" else 2,
    )
    throughput = estimate_step(
        step_of(STAGE_3, shape, plan, "full" if row["recompute"] == "1" else "none"),
        Cluster(get_gpu(row["gpu"]), 8, get_interconnect("roce-200g" if row["gpu"].startswith("a100") else "ib-400g")),
        KernelSettings("flash-1", loss_chunk_tokens=None),
        traffic,
    )
    assert throughput is not None
    return throughput.tokens_per_second / gpus


def test_error_on_the_rows_of_the_fit_is_as_documented(step_of) -> None:
    rows = fitted_to()
    errors = np.array([predict(row, step_of) / float(row["tokens_per_second_per_gpu"]) - 1 for row in rows])
    assert len(rows) == 209
    assert np.median(abs(errors)) < 0.025
    assert np.quantile(abs(errors), 0.9) < 0.075
    assert abs(errors).max() < 0.32
    assert abs(np.median(errors)) < 0.02


@pytest.mark.parametrize("gpu", ["a100-40gb", "a100-80gb", "h100-80gb"])
def test_no_card_is_flattered(step_of, gpu: str) -> None:
    rows = [row for row in fitted_to() if row["gpu"] == gpu]
    errors = [predict(row, step_of) / float(row["tokens_per_second_per_gpu"]) - 1 for row in rows]
    assert abs(float(np.median(errors))) < 0.03


def estimate(
    step_of,
    ds: dict[str, object],
    *,
    gpu: str = "h100-80gb",
    world_size: int = 16,
    kernels: KernelSettings = OWN_KERNELS,
) -> Throughput:
    """Without accumulation on 64 GPUs."""
    shape = GPTShape(24, 16, 2048, 50304, 2048)
    plan = build_batch_plan(global_batch_size=512, ranks=ParallelLayout(world_size), seq_len=2048, micro_batch_size=8)
    cluster = Cluster(get_gpu(gpu), 8, get_interconnect("ib-400g"))
    throughput = estimate_step(step_of(ds, shape, plan), cluster, kernels)
    assert throughput is not None
    return throughput


def test_the_parts_add_up_and_agree(step_of) -> None:
    throughput = estimate(step_of, BF16 | {"zero_optimization": {"stage": 1}})
    parts = throughput.compute_s + throughput.communication_s + throughput.optimizer_s + throughput.offload_s
    assert throughput.step_s == pytest.approx(parts)
    assert throughput.tokens_per_second * throughput.step_s == pytest.approx(512 * 2048)
    flops = GPTShape(24, 16, 2048, 50304, 2048).flops_per_token
    assert throughput.mfu == pytest.approx(throughput.tokens_per_second * flops / (16 * 989e12))


def test_stage_2_waits_longer_than_stage_1_when_accumulating(step_of) -> None:
    one = estimate(step_of, BF16 | {"zero_optimization": {"stage": 1}})
    two = estimate(step_of, BF16 | {"zero_optimization": {"stage": 2}})
    assert two.communication_s > 2 * one.communication_s
    assert two.compute_s == one.compute_s


def test_stage_0_steps_every_parameter_on_every_gpu(step_of) -> None:
    zero = estimate(step_of, BF16 | {"zero_optimization": {"stage": 0}}, world_size=64)
    one = estimate(step_of, BF16 | {"zero_optimization": {"stage": 1}}, world_size=64)
    assert zero.optimizer_s == pytest.approx(64 * one.optimizer_s)


def test_below_stage_2_whole_gradients_are_summed_every_micro_step(step_of) -> None:
    one, two = (estimate(step_of, BF16 | {"zero_optimization": {"stage": stage}}) for stage in (1, 2))
    elements = GPTShape(24, 16, 2048, 50304, 2048).num_parameters
    assert one.optimizer_s - two.optimizer_s == pytest.approx(4 * 10 * elements / 3.35e12)


def test_offload_moves_the_step_to_the_host(step_of) -> None:
    ds = BF16 | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    throughput = estimate(step_of, ds)
    assert throughput.optimizer_s == 0 and throughput.offload_s > 0


def test_fp32_has_no_mfu_and_an_unknown_rate_no_estimate(step_of) -> None:
    ds: dict[str, object] = {"zero_optimization": {"stage": 1}}
    assert estimate(step_of, ds).mfu is None
    shape = GPTShape(2, 2, 128, 512, 128)
    plan = BatchPlan(8, 1, 1, ParallelLayout(8), 128)
    cluster = Cluster(get_gpu("a10g"), 8, get_interconnect("ib-400g"))
    assert estimate_step(step_of(ds, shape, plan), cluster) is None


def test_fewer_ranks_than_a_node_has_gpus_stay_inside_it(step_of) -> None:
    few, many = (estimate(step_of, BF16 | {"zero_optimization": {"stage": 1}}, world_size=n) for n in (2, 16))
    volume = GPTShape(24, 16, 2048, 50304, 2048).num_parameters * 2 * 3 / 2
    # Both ranks' links at 80 % of their rate, and 6.7 passes of all that is exchanged through memory.
    assert few.communication_s == pytest.approx(volume / 450e9 / 0.8 + 6.7 * 2 * volume / 3.35e12, rel=0.01)
    assert few.communication_s < many.communication_s


def test_stage_3_hides_its_wire_behind_the_arithmetic_and_stage_2_does_not(step_of) -> None:
    ds = BF16 | {"zero_optimization": {"stage": 3}}
    alone = BF16 | {"zero_optimization": {"stage": 3, "overlap_comm": False}}
    assert estimate(step_of, ds).communication_s < estimate(step_of, alone).communication_s


def test_compiled_blocks_save_what_torchtitans_saved(step_of) -> None:
    """14 % of a step of Llama 3 8B, recomputing what lies between products, on its GPUs of 2.4 TB/s."""
    shape = GPTShape(seq_len=8192, **MODELS["llama3-8b"])
    plan = build_batch_plan(global_batch_size=16, ranks=ParallelLayout(8), seq_len=8192, micro_batch_size=2)
    gpu = replace(get_gpu("h100-80gb"), memory_bytes_per_s=2.4e12)
    cluster = Cluster(gpu, 8, get_interconnect("ib-400g"))
    throughput = estimate_step(step_of(STAGE_3, shape, plan, "selective"), cluster)
    assert throughput is not None
    saved_s = 1 / throughput.tokens_per_second - 1 / throughput.compiled_tokens_per_second
    assert 8 * saved_s == pytest.approx(1 / 5762 - 1 / 6667, rel=0.1)


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_kernels_are_what_the_compiled_rate_says(step_of, stage: int) -> None:
    ds = BF16 | {"zero_optimization": {"stage": stage}}
    eager, compiled = estimate(step_of, ds), estimate(step_of, ds, kernels=KernelSettings(compiled_blocks=True))
    assert eager.compiled_tokens_per_second == pytest.approx(compiled.tokens_per_second)
    assert eager.compiled_tokens_per_second > 1.05 * eager.tokens_per_second


def test_muons_products_are_shared_by_the_ranks_that_share_the_states(step_of) -> None:
    """On the GPU under offload too; AdamW has none."""
    shape = GPTShape(*MPT["1b"], 50368, 2048)
    plan = build_batch_plan(global_batch_size=16, ranks=ParallelLayout(16), seq_len=2048, micro_batch_size=1)

    def optimizer_s(stage: int, optimizer: OptimizerSpec, **zero: object) -> float:
        ds = BF16 | {"zero_optimization": {"stage": stage, **zero}}
        cluster = Cluster(get_gpu("h100-80gb"), 8, get_interconnect("ib-400g"))
        throughput = estimate_step(step_of(ds, shape, plan, optimizer=optimizer), cluster)
        assert throughput is not None
        return throughput.optimizer_s

    products = optimizer_s(2, MUON, offload_optimizer={"device": "cpu"})
    assert products > 0 == optimizer_s(2, ADAMW, offload_optimizer={"device": "cpu"})
    assert optimizer_s(0, MUON) == pytest.approx(16 * optimizer_s(2, MUON))
    # Four bytes less of a matrix's element are read and written.
    assert products < optimizer_s(2, MUON) < products + optimizer_s(2, ADAMW)


WIDE = GPTShape(32, 32, 4096, 50304, 2048)


def compute_seconds(checkpointing: CheckpointingMode = "none", gpu: str = "a100-80gb", micro: int = 4) -> float:
    seconds = estimate_compute_s(WIDE, micro, "bf16", checkpointing, get_gpu(gpu))
    assert seconds is not None
    return seconds


def test_never_faster_than_the_peak_rate() -> None:
    ideal = WIDE.flops_per_token * 4 * WIDE.seq_len / 312e12
    assert ideal < compute_seconds() < 2.5 * ideal


def test_time_grows_with_the_micro_batch() -> None:
    assert compute_seconds(micro=8) == pytest.approx(2 * compute_seconds(micro=4))


def test_full_recomputation_costs_a_forward_pass_and_selective_much_less() -> None:
    none, selective, full = compute_seconds("none"), compute_seconds("selective"), compute_seconds("full")
    # The output head is not recomputed, so it stays just below 4/3.
    assert 1.28 < full / none < 4 / 3
    assert 1.0 < selective / none < 1.1


def test_a_narrow_model_spends_more_on_memory_traffic() -> None:
    narrow = GPTShape(12, 12, 768, 50304, 2048)
    time = estimate_compute_s(narrow, 8, "bf16", "none", get_gpu("a100-80gb"))
    assert time is not None
    narrow_rate = narrow.flops_per_token * 8 * 2048 / time
    wide_rate = WIDE.flops_per_token * 8 * 2048 / compute_seconds(micro=8)
    assert narrow_rate < 0.85 * wide_rate


def test_fp32_runs_at_the_fp32_rate() -> None:
    slow = estimate_compute_s(WIDE, 4, "fp32", "none", get_gpu("a100-80gb"))
    assert slow is not None and slow > 8 * compute_seconds()


def test_a_gpu_of_unknown_bandwidth_is_as_balanced_as_an_a100() -> None:
    assert estimate_compute_s(WIDE, 4, "bf16", "none", custom_gpu(80, 312)) == pytest.approx(compute_seconds())


def test_compiled_blocks_and_a_newer_attention_take_less_time() -> None:
    def long(kernels: KernelSettings) -> float:
        shape = GPTShape(32, 32, 4096, 50304, 16_384)
        seconds = estimate_compute_s(shape, 1, "bf16", "none", get_gpu("a100-80gb"), kernels)
        assert seconds is not None
        return seconds

    assert long(KernelSettings()) < 0.9 * long(KernelSettings("flash-1"))
    assert long(KernelSettings(compiled_blocks=True)) < 0.97 * long(KernelSettings())


def test_a_mask_costs_the_newer_attention_unless_its_blocks_are_skipped() -> None:
    plain = GPTShape(32, 32, 4096, 50304, 16_384)
    windowed, documents = replace(plain, sliding_window=4096), replace(plain, document_end=0)

    def seconds(shape: GPTShape, **of_attention: Any) -> float:
        parts = compute_parts(replace(shape, **of_attention), 1, "bf16", "none", get_gpu("h100-80gb"))
        assert parts is not None
        return parts.attention_s

    for masked in (windowed, documents):
        assert seconds(masked, attention_kernel="sdpa") > 1.3 * seconds(plain)
    # Documents may fill the sequence. A window of a quarter leaves 7 of 16 pairs, and the blocks at its edge.
    assert seconds(documents) / seconds(plain) == pytest.approx(1.155, abs=0.01)
    assert 7 / 16 < seconds(windowed) / seconds(documents) < 0.46
    mixed = seconds(windowed, window_pattern="LG")
    assert mixed == pytest.approx((seconds(windowed) + seconds(documents)) / 2, rel=0.01)


SHAPE = GPTShape(24, 16, 2048, 50304, 2048, tied=False)
NUM = SHAPE.num_parameters


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


def passes(counted: Traffic) -> float:
    """Passes of a ring over all parameters in 16 bits."""
    return (counted.gathered_bytes + counted.reduced_bytes) / (2 * NUM)


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
    counted = traffic(step_of, 3, micro_steps=2, **NOTHING_KEPT)
    vectors = [tensor.elements for tensor in SHAPE.tensors.all if tensor.kind == "vector"]
    assert counted.small_collectives == len(vectors)
    assert counted.gathered_bytes == 2 * (2 * 2 * (NUM - sum(vectors)) + sum(vectors))


def test_stage_3_does_not_gather_again_what_is_still_live(step_of) -> None:
    # With DeepSpeed's 1e9 and no recomputation, the last 5e8 parameters are still gathered.
    expected = 3 - 5e8 / NUM
    none, full = (traffic(step_of, 3, checkpointing=mode, **NO_PREFETCH) for mode in ("none", "full"))
    assert passes(none) == pytest.approx(expected, abs=0.01)
    assert passes(full) > passes(none)
    assert full.collectives > none.collectives
    unreleased = traffic(step_of, 3, stage3_max_reuse_distance=10**12)
    assert passes(unreleased) == pytest.approx(2, abs=0.001)
    assert unreleased.collectives < none.collectives


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
    time = estimate_communication(Traffic(1e9, 1e9, 10), get_gpu("h100-80gb"), 1, 1, get_interconnect("ib-400g"))
    assert time == CommunicationTime(0, 0, 0)


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
    gpu = get_gpu("h100-80gb")
    assert ring_bytes_per_s(gpu, gpus_per_node, 4, get_interconnect(network)) == pytest.approx(expected)
    assert ring_bytes_per_s(gpu, gpus_per_node, 1, get_interconnect(network)) == gpu.link_bytes_per_s
    # A GPU that is alone in its node does not use its link.
    slow_link = replace(gpu, link_bytes_per_s=1e9)
    assert ring_bytes_per_s(slow_link, gpus_per_node, 4, get_interconnect(network)) == (
        expected if gpus_per_node == 1 else 1e9
    )


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
        counted = traffic(step_of, 3, zero_hpz_partition_size=group, **changes)
        return estimate_communication(counted, gpu, 4, 2, network).wire_s

    assert waited_s(4) < 0.7 * waited_s(1)
    assert waited_s(8) == pytest.approx(waited_s(1), rel=0.01)


GPU = get_gpu("a100-80gb")


def offload_seconds(step_of, zero: dict[str, object], host: HostRates | None = None, **sections: object) -> float:
    plan = build_batch_plan(global_batch_size=64, ranks=ParallelLayout(8), seq_len=2048, micro_batch_size=4)
    step = step_of({"bf16": {"enabled": True}, "zero_optimization": zero, **sections}, SHAPE, plan)
    return estimate_offload_s(step, Cluster(GPU, 8, get_interconnect("ib-400g")), count_traffic(step), host)


def test_nothing_offloaded_costs_nothing(step_of) -> None:
    assert offload_seconds(step_of, {"stage": 2}) == 0


def test_adam_on_the_host_is_bound_by_the_nodes_memory(step_of) -> None:
    slow = offload_seconds(step_of, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, HostRates(300e9))
    fast = offload_seconds(step_of, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, HostRates(600e9))
    # All eight ranks share one node: together they step every parameter.
    assert slow - fast == pytest.approx(NUM * 28 / 300e9 - NUM * 28 / 600e9)


def test_gradients_and_parameters_cross_the_host_link(step_of) -> None:
    time = offload_seconds(step_of, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, HostRates(1e30))
    # Two micro-steps send a shard of gradients each, the step brings the parameters back.
    assert time == pytest.approx(NUM / 8 * (2 * 2 + 2) / GPU.host_link_bytes_per_s)


def test_nvme_reads_and_writes_the_states(step_of) -> None:
    nvme = {"device": "nvme", "nvme_path": "/local_nvme"}
    on_disk = offload_seconds(step_of, {"stage": 3, "offload_optimizer": nvme})
    in_memory = offload_seconds(step_of, {"stage": 3, "offload_optimizer": {"device": "cpu"}})
    assert on_disk - in_memory == pytest.approx(NUM * 24 / 6e9)


def test_parameters_on_the_host_cross_as_often_as_they_are_gathered(step_of) -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, **NOTHING_STAYS}
    # Twice in each of two micro-steps, a rank's share of 16-bit parameters.
    time = offload_seconds(step_of, zero, HostRates(1e30))
    assert time == pytest.approx(2 * 2 * NUM / 8 * 2 / GPU.host_link_bytes_per_s)
    # Eight GPUs copy no faster than their host's memory.
    assert offload_seconds(step_of, zero, HostRates(80e9)) == pytest.approx(2 * 2 * NUM / 8 * 2 / (80e9 / 8))


def test_saved_activations_go_out_and_come_back(step_of) -> None:
    time = offload_seconds(step_of, {"stage": 2}, HostRates(1e30), activation_checkpointing={"cpu_checkpointing": True})
    saved = 4 * 2048 * 2048 * 24 * 2
    assert time == pytest.approx(2 * 2 * saved / GPU.host_link_bytes_per_s)


def divided_step(size: int, mode: CheckpointingMode = "none", n_kv_head: int = 8, steps: int = 1) -> ResolvedStep:
    """Return a step of Llama 3 8B where `size` of 16 ranks divide each sequence of 16,384 tokens."""
    shape = GPTShape(seq_len=16384, **{**MODELS["llama3-8b"], "n_kv_head": n_kv_head})
    ranks = ParallelLayout(16, size)
    batch = ranks.data_parallel_size * steps
    plan = build_batch_plan(global_batch_size=batch, ranks=ranks, seq_len=shape.seq_len, micro_batch_size=1)
    return resolve_step(parse_ds_config(STAGE_3, "test"), shape, plan, mode)


def test_divided_sequences_exchange_tokens_for_heads_within_a_node() -> None:
    """A rank of four sends 3/4 of 4,096 tokens' 32 + 2 x 8 heads of 128 before attention, and of 32 heads after it."""
    gpu, network = get_gpu("h100-80gb"), get_interconnect("ib-400g")
    sent = 4096 * (32 + 8 + 8 + 32) * 128 * 2
    a_block = sent * 3 / 4 / (0.8 * 450e9) + 4 * sent / 3.35e12 + 0.66 * 2 * 3 * 3.4e-6
    # 32 blocks, forwards and backwards.
    assert estimate_exchange_s(divided_step(4), gpu, 8, network) == pytest.approx(32 * 2 * a_block)
    assert estimate_exchange_s(divided_step(4, steps=2), gpu, 8, network) == pytest.approx(2 * 32 * 2 * a_block)
    for mode in ("selective", "full"):
        assert estimate_exchange_s(divided_step(4, mode), gpu, 8, network) == pytest.approx(32 * 3 * a_block)
    assert estimate_exchange_s(divided_step(1), gpu, 8, network) == 0


def test_divided_sequences_exchange_between_nodes_over_the_network() -> None:
    """Of eight ranks on two nodes of four, three get their parts over NVLink and four over the network."""
    gpu, network = get_gpu("h100-80gb"), get_interconnect("ib-400g")
    sent = 2048 * (32 + 8 + 8 + 32) * 128 * 2
    wire_s = sent * 3 / 8 / 450e9 + sent * 4 / 8 / 50e9
    waiting_s = 2 * 3 * 3.4e-6 + 2 * 4 * (14e-6 + 2e-6)
    a_block = wire_s / 0.8 + 0.66 * waiting_s + 4 * sent / 3.35e12
    assert estimate_exchange_s(divided_step(8), gpu, 4, network) == pytest.approx(32 * 2 * a_block)
    assert estimate_exchange_s(divided_step(8), gpu, 8, network) < 32 * 2 * a_block / 3
    # Two key-value heads are sent as often as there are ranks.
    shared, repeated = (estimate_exchange_s(divided_step(8, n_kv_head=heads), gpu, 4, network) for heads in (8, 2))
    assert shared == repeated


def test_divided_experts_exchange_rows_within_and_between_nodes_and_gather_their_own_alone() -> None:
    shape = replace(GPTShape(*MPT["1b"], 50368, 2048), bias=False, mlp_bias=False, num_experts=8)
    gpu, network = get_gpu("h100-80gb"), get_interconnect("ib-400g")

    def step(size: int, mode: CheckpointingMode = "none") -> ResolvedStep:
        plan = build_batch_plan(
            global_batch_size=32, ranks=ParallelLayout(16, 1, size), seq_len=2048, micro_batch_size=2
        )
        return resolve_step(parse_ds_config(STAGE_3, "test"), shape, plan, mode)

    within, across = (estimate_dispatch_s(step(8), gpu, per_node, network) for per_node in (8, 4))
    assert estimate_dispatch_s(step(1), gpu, 8, network) == 0 < within < across
    # Rows of two experts of a token go out and come back, forwards and backwards, 7 of 8 to other GPUs.
    sent = 2 * 2 * 2 * 2048 * 2 * 2048 * 2 * 7 / 8
    wire_s = 24 * sent / (0.8 * gpu.link_bytes_per_s)
    assert wire_s < within < 1.5 * wire_s
    assert estimate_dispatch_s(step(8, "full"), gpu, 8, network) == pytest.approx(1.5 * within)
    experts = sum(tensor.elements for tensor in shape.tensors.all if tensor.parameter.is_stacked)
    undivided, part = count_traffic(step(1)), count_traffic(step(8))
    assert undivided.reduced_bytes - part.reduced_bytes == pytest.approx(experts * 7 / 8 * 2, rel=0.01)
    assert part.gathered_bytes < undivided.gathered_bytes / 2


@pytest.mark.parametrize(
    ("norm_placement", "checkpointing", "passes"),
    [
        ("pre", "none", 1),
        ("pre", "selective", 1),
        ("pre", "full", 0),
        ("post", "none", 1),
        ("post", "selective", 2),
        ("post", "full", 1),
    ],
)
def test_what_tiles_of_the_mlp_compute_once_more(
    norm_placement: Any, checkpointing: CheckpointingMode, passes: int
) -> None:
    """tests/engine/test_activation_checkpointing.py counts what the engine computes."""
    plain = GPTShape(3, 4, 64, 300, 32, norm_placement=norm_placement)
    tiled = replace(plain, mlp_tile_tokens=16)
    work = [token_work(shape, 32, "bf16", checkpointing, OWN_KERNELS).matmul_flops for shape in (plain, tiled)]
    weights = 2 * 64 * 4 * 64
    assert work[1] - work[0] == passes * 3 * 2 * weights
