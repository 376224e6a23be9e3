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

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan
from llmscale.config.deepspeed.sections import CheckpointingMode
from llmscale.config.hardware import GPU
from llmscale.config.interconnect import Interconnect
from llmscale.memory.zero_settings import BYTES_PER_ELEMENT, EngineLayout
from llmscale.planning.calibration import calibrate
from llmscale.planning.communication_time import CommunicationTime, Traffic, count_traffic, estimate_communication
from llmscale.planning.compute_time import OWN_KERNELS, estimate_compute_s
from llmscale.planning.kernels import Kernels, kernel_efficiency, memory_bytes_per_s
from llmscale.planning.offload_time import HostRates, estimate_offload_s

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


def estimate_throughput(
    shape: GPTShape,
    plan: BatchPlan,
    layout: EngineLayout,
    checkpointing: CheckpointingMode,
    gpu: GPU,
    *,
    gpus_per_node: int,
    interconnect: Interconnect,
    kernels: Kernels = OWN_KERNELS,
) -> Throughput | None:
    """The step of `plan` under `layout`; `gpus_per_node` must divide its world size, or be no smaller.

    None when the GPU's rate in the run's precision is not known.
    """
    compiled_traffic = count_traffic(shape, layout, checkpointing, compiled_blocks=True)
    traffic = compiled_traffic if kernels.compiled_blocks else count_traffic(shape, layout, checkpointing)
    return estimate_step(
        *(shape, plan, layout, checkpointing, gpu, traffic, compiled_traffic),
        gpus_per_node=gpus_per_node,
        interconnect=interconnect,
        kernels=kernels,
    )


def estimate_step(
    shape: GPTShape,
    plan: BatchPlan,
    layout: EngineLayout,
    checkpointing: CheckpointingMode,
    gpu: GPU,
    traffic: Traffic,
    compiled_traffic: Traffic,
    *,
    gpus_per_node: int,
    interconnect: Interconnect,
    kernels: Kernels,
) -> Throughput | None:
    """`estimate_throughput` with traffic that was counted elsewhere: of `kernels`, and of compiled blocks."""
    micro_step_s = estimate_compute_s(shape, plan.micro_batch_size, layout.precision, checkpointing, gpu, kernels)
    if micro_step_s is None:
        return None
    ranks_per_node = min(gpus_per_node, plan.ranks.world_size)
    num_nodes = -(-plan.ranks.world_size // ranks_per_node)
    compute_s = micro_step_s * plan.gradient_accumulation_steps
    machines = (gpu, ranks_per_node, num_nodes, interconnect)
    communication_s = _exposed_s(compute_s, estimate_communication(traffic, *machines), traffic, layout)
    offload_s = estimate_offload_s(shape, plan.micro_batch_size, layout, traffic, gpu, ranks_per_node, HostRates())
    optimizer_s = _optimizer_s(shape, plan, layout, gpu)
    step_s = compute_s + communication_s + optimizer_s + offload_s
    compiled_compute_s = _compiled_compute_s(shape, plan, layout, checkpointing, gpu, kernels)
    compiled_communication = estimate_communication(compiled_traffic, *machines)
    compiled_s = compiled_compute_s + _exposed_s(compiled_compute_s, compiled_communication, compiled_traffic, layout)
    compiled_s += optimizer_s + offload_s
    calibration = calibrate(shape, plan, layout, gpu, gpus_per_node=ranks_per_node, interconnect=interconnect)
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
        compiled_tokens_per_second=plan.tokens_per_step / compiled_s,
        calibration=calibration.words,
        rests_on=calibration.rests_on,
        beyond=calibration.beyond,
        error=calibration.error,
    )


def _compiled_compute_s(
    shape: GPTShape,
    plan: BatchPlan,
    layout: EngineLayout,
    checkpointing: CheckpointingMode,
    gpu: GPU,
    kernels: Kernels,
) -> float:
    compiled = replace(kernels, compiled_blocks=True)
    seconds = estimate_compute_s(shape, plan.micro_batch_size, layout.precision, checkpointing, gpu, compiled)
    assert seconds is not None
    return seconds * plan.gradient_accumulation_steps


def _exposed_s(compute_s: float, communication: CommunicationTime, traffic: Traffic, layout: EngineLayout) -> float:
    """What exchanging adds to the arithmetic.

    What DeepSpeed runs beside the arithmetic (overlap_comm: at stage 3 everything, below it the reductions) is neither
    hidden as long as the arithmetic lasts nor added to it, but in between: the square root of the sum of squares.
    """
    busy_s = compute_s + communication.copies_s + communication.waiting_s
    beside_s = 0.0
    if layout.overlap_comm:
        reduced = traffic.reduced_bytes / max(1.0, traffic.gathered_bytes + traffic.reduced_bytes)
        beside_s = communication.wire_s * (1.0 if layout.zero_stage == 3 else reduced)
    return math.hypot(busy_s, beside_s) + communication.wire_s - beside_s - compute_s


def _optimizer_s(shape: GPTShape, plan: BatchPlan, layout: EngineLayout, gpu: GPU) -> float:
    # Stage 0 steps everything on every rank. Muon's matrix products run on the GPU wherever the states lie.
    sharing_ranks = layout.ranks.shard_ranks if layout.zero_stage else 1
    step_flops = layout.optimizer.step_flops(shape.architecture) / sharing_ranks
    seconds = step_flops / (gpu.dense_16bit_flops * kernel_efficiency(gpu).matmul)
    moved_bytes = 0.0
    if layout.offload_optimizer.device == "none":
        moved_bytes = layout.optimizer.step_bytes_per_weight(shape.architecture) + _WRITTEN_BYTES
    moved_bytes *= shape.num_parameters / sharing_ranks
    if layout.zero_stage < 2 and plan.gradient_accumulation_steps > 1:
        # Below stage 2 every rank sums whole gradients: the new one is read, the sum is read and written.
        summed_bytes = _WRITTEN_BYTES + 2 * BYTES_PER_ELEMENT[layout.grad_accum_dtype]
        moved_bytes += plan.gradient_accumulation_steps * summed_bytes * shape.num_parameters
    return seconds + moved_bytes / memory_bytes_per_s(gpu)
