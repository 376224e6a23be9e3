"""Tokens per second and MFU of a training run, from its shape, its ds_config and the machines. No torch.

    step = micro-steps x compute + communication + optimizer + offload

with nothing hidden behind anything: what overlap there is went into the fitted constants. Nothing was measured by us
on a GPU. On the 209 published rows that the constants were fitted to (`llmscale.planning.compute_time`), the relative
error of tokens/s has a median of 3 %, a 90th percentile of 8 % and a maximum of 31 %; on a model size that was left
out of the fit, 4 % and 12 %. Beyond the rows (`llmscale.planning.calibration`) it is an extrapolation, and says so:
ZeRO-3 at 175B and 530B parameters on 384 to 2,240 A100s was published as 1.6 to 3.8 times slower. Had the H100 not
been among the rows and been given the A100's efficiency, it would have been called 17 % too fast: so much for GPUs
that are "not calibrated". The estimate is for runs that keep the GPU busy: it knows nothing of data loading, of
launch overhead in micro-batches below 4,096 tokens, nor of what DeepSpeed does slower than FSDP, whose runs the rows
are.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan
from llmscale.config.deepspeed.sections import CheckpointingMode
from llmscale.config.hardware import GPU
from llmscale.config.interconnect import Interconnect
from llmscale.memory.zero_settings import EngineLayout
from llmscale.planning.calibration import beyond_rows, calibration_words, fitted_rows
from llmscale.planning.communication_time import count_traffic, estimate_communication_s
from llmscale.planning.compute_time import estimate_compute_s, kernel_efficiency, memory_bytes_per_s
from llmscale.planning.offload_time import HostRates, estimate_offload_s

#: Of a parameter that an optimizer step writes for the next forward pass, in 16 bits.
_WRITTEN_BYTES = 2


@dataclass(frozen=True)
class Throughput:
    """One optimizer step; its parts add up to step_s."""

    step_s: float
    compute_s: float
    """Forward and backward passes of all micro-steps."""
    communication_s: float
    """Waiting for collectives."""
    optimizer_s: float
    """The optimizer step on the GPU."""
    offload_s: float
    """Copies to and from the host, the optimizer step there, the disk."""
    tokens_per_second: float
    """All GPUs together."""
    mfu: float | None
    """Fraction of the 16-bit peak that the model's own FLOPs reach, as train.py reports it; None for fp32."""
    calibration: str
    """What the estimate rests on, and how far it is from that."""
    beyond: tuple[str, ...]
    """What of the run lies beyond the rows that the model was fitted to; empty: nothing."""


def estimate_throughput(
    shape: GPTShape,
    plan: BatchPlan,
    layout: EngineLayout,
    checkpointing: CheckpointingMode,
    gpu: GPU,
    *,
    gpus_per_node: int,
    interconnect: Interconnect,
) -> Throughput | None:
    """The step of `plan` under `layout`; `gpus_per_node` must divide its world size, or be no smaller.

    None when the GPU's rate in the run's precision is not known.
    """
    micro_step_s = estimate_compute_s(shape, plan.micro_batch_size, layout.precision, checkpointing, gpu)
    if micro_step_s is None:
        return None
    ranks_per_node = min(gpus_per_node, plan.ranks.world_size)
    num_nodes = -(-plan.ranks.world_size // ranks_per_node)
    traffic = count_traffic(shape, layout, checkpointing)
    compute_s = micro_step_s * plan.gradient_accumulation_steps
    communication_s = estimate_communication_s(traffic, gpu, ranks_per_node, num_nodes, interconnect)
    offload_s = estimate_offload_s(shape, plan.micro_batch_size, layout, traffic, gpu, ranks_per_node, HostRates())
    # Stage 0 steps everything on every rank. Muon's matrix products run on the GPU wherever the states lie.
    sharing_ranks = layout.ranks.shard_ranks if layout.zero_stage else 1
    step_flops = layout.optimizer.step_flops(shape.architecture) / sharing_ranks
    optimizer_s = step_flops / (gpu.dense_16bit_flops * kernel_efficiency(gpu).matmul)
    if layout.offload_optimizer.device == "none":
        moved_bytes = layout.optimizer.step_bytes_per_weight(shape.architecture) + _WRITTEN_BYTES
        optimizer_s += shape.num_parameters / sharing_ranks * moved_bytes / memory_bytes_per_s(gpu)
    rows = fitted_rows(gpu)
    step_s = compute_s + communication_s + optimizer_s + offload_s
    tokens_per_second = plan.tokens_per_step / step_s
    mfu = tokens_per_second * shape.flops_per_token / (plan.ranks.world_size * gpu.dense_16bit_flops)
    return Throughput(
        step_s=step_s,
        compute_s=compute_s,
        communication_s=communication_s,
        optimizer_s=optimizer_s,
        offload_s=offload_s,
        tokens_per_second=tokens_per_second,
        mfu=None if layout.precision == "fp32" else mfu,
        calibration=calibration_words(rows, shape, layout) if rows else kernel_efficiency(gpu).source,
        beyond=tuple(beyond_rows(rows, shape, layout)) if rows else (gpu.name,),
    )
