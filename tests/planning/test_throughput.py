from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan, build_batch_plan
from llmscale.config.hardware import Cluster, get_gpu
from llmscale.config.interconnect import get_interconnect
from llmscale.config.optimizers import ADAMW, MUON, OptimizerSpec
from llmscale.config.parallel_layout import ParallelLayout
from llmscale.planning.calibration import nearest_rows
from llmscale.planning.compute_time import OWN_KERNELS
from llmscale.planning.kernels import Kernels
from llmscale.planning.throughput import Throughput, estimate_step
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
    found = estimate_step(
        step_of(STAGE_3, shape, plan, "full" if row["recompute"] == "1" else "none"),
        Cluster(get_gpu(row["gpu"]), 8, nearest_rows(get_gpu(row["gpu"])).network),
        Kernels("flash-1", loss_chunk_tokens=None),
        traffic,
    )
    assert found is not None
    return found.tokens_per_second / gpus


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
    step_of, ds: dict[str, object], *, gpu: str = "h100-80gb", world_size: int = 16, kernels: Kernels = OWN_KERNELS
) -> Throughput:
    """Without accumulation on 64 GPUs."""
    shape = GPTShape(24, 16, 2048, 50304, 2048)
    plan = build_batch_plan(global_batch_size=512, ranks=ParallelLayout(world_size), seq_len=2048, micro_batch_size=8)
    cluster = Cluster(get_gpu(gpu), 8, get_interconnect("ib-400g"))
    found = estimate_step(step_of(ds, shape, plan), cluster, kernels)
    assert found is not None
    return found


def test_the_parts_add_up_and_agree(step_of) -> None:
    found = estimate(step_of, BF16 | {"zero_optimization": {"stage": 1}})
    parts = found.compute_s + found.communication_s + found.optimizer_s + found.offload_s
    assert found.step_s == pytest.approx(parts)
    assert found.tokens_per_second * found.step_s == pytest.approx(512 * 2048)
    flops = GPTShape(24, 16, 2048, 50304, 2048).flops_per_token
    assert found.mfu == pytest.approx(found.tokens_per_second * flops / (16 * 989e12))


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
    found = estimate(step_of, ds)
    assert found.optimizer_s == 0 and found.offload_s > 0


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
    found = estimate_step(step_of(STAGE_3, shape, plan, "selective"), cluster)
    assert found is not None
    saved_s = 1 / found.tokens_per_second - 1 / found.compiled_tokens_per_second
    assert 8 * saved_s == pytest.approx(1 / 5762 - 1 / 6667, rel=0.1)


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_kernels_are_what_the_compiled_rate_says(step_of, stage: int) -> None:
    ds = BF16 | {"zero_optimization": {"stage": stage}}
    eager, compiled = estimate(step_of, ds), estimate(step_of, ds, kernels=Kernels(compiled_blocks=True))
    assert eager.compiled_tokens_per_second == pytest.approx(compiled.tokens_per_second)
    assert eager.compiled_tokens_per_second > 1.05 * eager.tokens_per_second


def test_muons_products_are_shared_by_the_ranks_that_share_the_states(step_of) -> None:
    """On the GPU under offload too; AdamW has none."""
    shape = GPTShape(*MPT["1b"], 50368, 2048)
    plan = build_batch_plan(global_batch_size=16, ranks=ParallelLayout(16), seq_len=2048, micro_batch_size=1)

    def optimizer_s(stage: int, optimizer: OptimizerSpec, **zero: object) -> float:
        ds = BF16 | {"zero_optimization": {"stage": stage, **zero}}
        cluster = Cluster(get_gpu("h100-80gb"), 8, get_interconnect("ib-400g"))
        found = estimate_step(step_of(ds, shape, plan, optimizer=optimizer), cluster)
        assert found is not None
        return found.optimizer_s

    products = optimizer_s(2, MUON, offload_optimizer={"device": "cpu"})
    assert products > 0 == optimizer_s(2, ADAMW, offload_optimizer={"device": "cpu"})
    assert optimizer_s(0, MUON) == pytest.approx(16 * optimizer_s(2, MUON))
    # Four bytes less of a matrix's element are read and written.
    assert products < optimizer_s(2, MUON) < products + optimizer_s(2, ADAMW)
