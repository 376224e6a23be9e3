"""Tokens per second and MFU of a training run, from its shape, its ds_config and the machines. No torch.

    step = micro-steps x compute + what communication adds + optimizer + offload

Nothing was measured by us on a GPU. The constants (llmscale.planning.kernels, llmscale.planning.communication_time)
were fitted to 209 published rows of MosaicML's llm-foundry, on which the relative error of tokens/s has a median of
2.4 %, a 90th percentile of 7.1 % and a maximum of 31 %.

Of 51 other published runs, from 9 sources and none of them used for the fit, the error has a median of 8 % and a 90th
percentile of 20 % (tests/planning/published_runs.py has the rule by which they count, published_runs.csv the runs).
It is 3 to 8 % for IBM's, torchtitan's and the Kempner Institute's FSDP and for llm.c, 12 to 18 % for OLMo-core,
TinyLlama, Hugging Face and FlashAttention's paper, and 25 to 43 % for Lambda's, whose micro-batches have 4,096
tokens; the median is 12 % without IBM's 16 runs and 13 % with one vote for every source, mostly too fast. How
communication and arithmetic overlap cannot be told from the rows, whose networks are fast: that it is the square root
of the sum of squares was chosen among three forms with those runs in view (added, their median error is 15 %; hidden
as long as possible, 11 %). Runs beyond the rows are marked (`llmscale.planning.calibration`): ZeRO-3 of 2021 at 175B
and 530B parameters on 384 to 2,240 A100s was 1.5 to 2.8 times slower than this says.

The estimate is for runs that keep the GPU busy: it knows nothing of data loading, of launch overhead in micro-batches
below 4,096 tokens, nor of what DeepSpeed does slower than FSDP, whose runs the rows are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llmscale.config.hardware import GPU, Cluster
from llmscale.config.resolve import ResolvedStep
from llmscale.memory.zero_settings import BYTES_PER_ELEMENT
from llmscale.planning.calibration import calibrate
from llmscale.planning.communication_time import CommunicationTime, Traffic, count_traffic, estimate_communication
from llmscale.planning.compute_time import OWN_KERNELS, estimate_compute_s
from llmscale.planning.kernels import Kernels, kernel_efficiency, memory_bytes_per_s
from llmscale.planning.offload_time import estimate_offload_s

#: Of a parameter that an optimizer step writes for the next forward pass, and of a gradient, in 16 bits.
_WRITTEN_BYTES = 2


@dataclass(frozen=True)
class Throughput:
    """One optimizer step; its parts add up to step_s."""

    step_s: float
    compute_s: float
    """Forward and backward passes of all micro-steps."""
    communication_s: float
    """What exchanging with other ranks adds, beyond what is hidden behind the arithmetic."""
    optimizer_s: float
    """The optimizer step on the GPU, and the sum of gradients over micro-steps."""
    offload_s: float
    """Copies to and from the host, the optimizer step there, the disk."""
    tokens_per_second: float
    """All GPUs together, with blocks that run eagerly."""
    mfu: float | None
    """Fraction of the 16-bit peak that the model's own FLOPs reach, as train.py reports it; None for fp32."""
    compiled_tokens_per_second: float
    """The same with compiled blocks (train.py's --compile)."""
    calibration: str
    """The three that follow in one line."""
    rests_on: str
    """The rows that the model was fitted to, or whose efficiency is assumed."""
    beyond: tuple[str, ...]
    """What of the run lies beyond those rows; empty: nothing."""
    error: str
    """How far off the estimate is known to be, there or within them."""


def estimate_step(
    step: ResolvedStep,
    cluster: Cluster,
    kernels: Kernels = OWN_KERNELS,
    traffic: Traffic | None = None,
) -> Throughput | None:
    """Estimate the time of an optimizer step; None when the GPU's rate in the run's precision is not known.

    `cluster.gpus_per_node` must divide the world size, or be no smaller. `traffic` replaces what DeepSpeed exchanges.
    """
    plan, gpu = step.plan, cluster.gpu
    micro_step_s = _micro_step_s(step, gpu, kernels)
    if micro_step_s is None:
        return None
    compiled_traffic = traffic or count_traffic(step, compiled_blocks=True)
    if traffic is None:
        traffic = compiled_traffic if kernels.compiled_blocks else count_traffic(step)
    ranks_per_node = min(cluster.gpus_per_node, plan.ranks.world_size)
    cluster = replace(cluster, gpus_per_node=ranks_per_node)
    num_nodes = -(-plan.ranks.world_size // ranks_per_node)
    machines = (gpu, ranks_per_node, num_nodes, cluster.interconnect)
    compute_s = micro_step_s * plan.gradient_accumulation_steps
    communication_s = _exposed_s(compute_s, estimate_communication(traffic, *machines), traffic, step)
    offload_s = estimate_offload_s(step, cluster, traffic)
    optimizer_s = _optimizer_s(step, gpu)
    step_s = compute_s + communication_s + optimizer_s + offload_s
    compiled_micro_step_s = _micro_step_s(step, gpu, replace(kernels, compiled_blocks=True))
    assert compiled_micro_step_s is not None
    compiled_compute_s = compiled_micro_step_s * plan.gradient_accumulation_steps
    compiled_communication = estimate_communication(compiled_traffic, *machines)
    compiled_s = compiled_compute_s + _exposed_s(compiled_compute_s, compiled_communication, compiled_traffic, step)
    compiled_s += optimizer_s + offload_s
    calibration = calibrate(step, cluster)
    tokens_per_second = plan.tokens_per_step / step_s
    mfu = tokens_per_second * step.shape.flops_per_token / (plan.ranks.world_size * gpu.dense_16bit_flops)
    return Throughput(
        step_s=step_s,
        compute_s=compute_s,
        communication_s=communication_s,
        optimizer_s=optimizer_s,
        offload_s=offload_s,
        tokens_per_second=tokens_per_second,
        mfu=None if step.precision == "fp32" else mfu,
        compiled_tokens_per_second=plan.tokens_per_step / compiled_s,
        calibration=calibration.words,
        rests_on=calibration.rests_on,
        beyond=calibration.beyond,
        error=calibration.error,
    )


def _micro_step_s(step: ResolvedStep, gpu: GPU, kernels: Kernels) -> float | None:
    return estimate_compute_s(step.shape, step.plan.micro_batch_size, step.precision, step.checkpointing, gpu, kernels)


def _exposed_s(compute_s: float, communication: CommunicationTime, traffic: Traffic, step: ResolvedStep) -> float:
    """What exchanging adds to the arithmetic.

    What DeepSpeed runs beside the arithmetic (overlap_comm: at stage 3 everything, below it the reductions) is neither
    hidden as long as the arithmetic lasts nor added to it, but in between: the square root of the sum of squares.
    """
    busy_s = compute_s + communication.copies_s + communication.waiting_s
    beside_s = 0.0
    if step.engine_config.zero.overlap_comm:
        reduced = traffic.reduced_bytes / max(1.0, traffic.gathered_bytes + traffic.reduced_bytes)
        beside_s = communication.wire_s * (1.0 if step.zero_stage == 3 else reduced)
    return math.hypot(busy_s, beside_s) + communication.wire_s - beside_s - compute_s


def _optimizer_s(step: ResolvedStep, gpu: GPU) -> float:
    shape, micro_steps = step.shape, step.plan.gradient_accumulation_steps
    # Stage 0 steps everything on every rank. Muon's matrix products run on the GPU wherever the states lie.
    sharing_ranks = step.plan.ranks.shard_ranks if step.zero_stage else 1
    step_flops = step.optimizer.step_flops(shape.architecture) / sharing_ranks
    seconds = step_flops / (gpu.dense_16bit_flops * kernel_efficiency(gpu).matmul)
    moved_bytes = 0.0
    if step.engine_config.zero.offload_optimizer.device == "none":
        moved_bytes = step.optimizer.step_bytes_per_weight(shape.architecture) + _WRITTEN_BYTES
    moved_bytes *= shape.num_parameters / sharing_ranks
    if step.zero_stage < 2 and micro_steps > 1:
        # Below stage 2 every rank sums whole gradients: the new one is read, the sum is read and written.
        summed_bytes = _WRITTEN_BYTES + 2 * BYTES_PER_ELEMENT[step.engine_config.grad_accum_dtype]
        moved_bytes += micro_steps * summed_bytes * shape.num_parameters
    return seconds + moved_bytes / memory_bytes_per_s(gpu)
