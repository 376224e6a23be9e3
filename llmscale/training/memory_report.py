"""Memory of a run: estimated before step 1, measured after step 2, explained if it runs out. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.config.batch_plan import BatchPlan
from llmscale.engine.device_settings import ALLOCATOR_VARIABLES, EXPANDABLE_SEGMENTS, allocator_settings
from llmscale.errors import LlmscaleError, MachineError
from llmscale.memory.breakdown import describe_breakdown, format_size
from llmscale.memory.estimate import CONTEXT_BYTES, MemoryEstimate, estimate_memory
from llmscale.planning.recommend import find_smallest_change
from llmscale.planning.search import Job, Machines
from llmscale.training.start import Start

if TYPE_CHECKING:
    from llmscale.engine.device_memory import MeasuredMemory

#: Fraction of memory that a change must save at least for a run that the estimate expected to fit.
_MIN_SAVING = 0.1

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class OutOfMemory(MachineError):
    """A rank ran out of memory."""


def estimate_run(run: Start, capability: ComputeCapability | None) -> MemoryEstimate | None:
    """Estimate one rank's memory on a GPU of that compute capability.

    None with Adafactor, whose states are not modelled.
    """
    if not run.resolved.optimizer.steps_shards:
        return None
    return estimate_memory(run.resolved, capability)


def estimate_line(estimate: MemoryEstimate | None, gpu_bytes: int | None) -> str:
    """Return the line printed before step 1. `gpu_bytes` is None on a CPU."""
    if estimate is None:
        return "memory: no estimate. It covers AdamW and Muon"
    where = "per GPU" if gpu_bytes else "if each rank were a GPU"
    line = f"memory: estimated peak {format_size(estimate.allocated_bytes)} {where}, in {estimate.peak_moment} "
    line += f"({describe_breakdown(estimate.peak)})"
    if gpu_bytes is None:
        return f"{line}; nothing to compare it with on a CPU"
    total = f"{format_size(estimate.total_bytes)} of {format_size(gpu_bytes)}"
    return f"{line}; {total} with the allocator's reserve and the CUDA context"


def measured_line(estimate: MemoryEstimate | None, measured: MeasuredMemory) -> str:
    """Return the line printed after the first steps."""
    line = (
        f"memory: measured peak {format_size(measured.allocated_bytes)} allocated, "
        f"{format_size(measured.reserved_bytes)} reserved on the main rank"
    )
    if estimate is None:
        return line
    error = estimate.allocated_bytes / measured.allocated_bytes - 1
    side = "above" if error >= 0 else "below"
    return f"{line}; the estimate of {format_size(estimate.allocated_bytes)} is {abs(error):.1%} {side}"


@contextmanager
def explained_out_of_memory(run: Start) -> Iterator[None]:
    """Turn an out-of-memory error into OutOfMemory with a breakdown and the smallest change that fits."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # torch is imported already when memory runs out.
        from llmscale.engine.device_memory import device_memory_bytes, gpu_capability

        words = explain_out_of_memory(run, str(error), device_memory_bytes(), gpu_capability())
        raise OutOfMemory(words) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise errors of torch's GPU and CPU allocators, of cuBLAS and of Python."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def explain_out_of_memory(
    run: Start, message: str, gpu_bytes: int | None, capability: ComputeCapability | None = None
) -> str:
    """Return three lines: the error, the estimated breakdown, and the smallest change that fits.

    A fourth line names the allocator's setting if the tensors alone would fit.
    """
    rank = os.environ.get("RANK", "0")
    what = " ".join(message.split()) or "MemoryError"
    lines = [f"rank {rank} ran out of memory: {what[:300]}"]
    estimate = estimate_run(run, capability)
    if estimate is None:
        return lines[0]
    lines.append(f"  {estimate_line(estimate, gpu_bytes)}")
    lines.append(f"  {_advice(run, estimate, gpu_bytes, capability)}")
    if gpu_bytes is not None and _is_lost_between_tensors(estimate, gpu_bytes):
        lines.append(
            f"  or first {ALLOCATOR_VARIABLES[0]}={EXPANDABLE_SEGMENTS}: all tensors together would fit, and the "
            "allocator loses less memory between them with it"
        )
    return "\n".join(lines)


def _is_lost_between_tensors(estimate: MemoryEstimate, gpu_bytes: int) -> bool:
    fits = estimate.allocated_bytes + CONTEXT_BYTES <= gpu_bytes
    return fits and "expandable_segments" not in allocator_settings(os.environ)


def _advice(run: Start, estimate: MemoryEstimate, gpu_bytes: int | None, capability: ComputeCapability | None) -> str:
    resolved, plan = run.resolved, run.resolved.plan
    limit = estimate.total_bytes - round(_MIN_SAVING * estimate.reserved_bytes)
    if gpu_bytes is not None:
        limit = min(limit, gpu_bytes)
    machines = _machines(plan, limit, capability)
    job = Job(
        resolved.shape,
        plan.global_batch_size,
        machines,
        optimizer=resolved.optimizer,
        loss_chunk_tokens=resolved.loss.chunk_tokens,
        sequence_parallel_size=plan.ranks.sequence_parallel_size,
        expert_parallel_size=plan.ranks.expert_parallel_size,
    )
    try:
        change = find_smallest_change(resolved.ds, job, resolved.checkpointing, plan.micro_batch_size)
    except LlmscaleError as error:
        return f"no change was found: {error}"
    if change is None:
        return (
            "no smaller micro-batch, recomputation, higher stage or offload to the host is enough: it takes more GPUs, "
            "a shorter seq_len or a smaller model"
        )
    saved = estimate.total_bytes - change.fit.estimate.total_bytes
    return f"the smallest change that fits: {' and '.join(change.words)} ({format_size(saved)} less)"


def _machines(plan: BatchPlan, gpu_bytes: int, capability: ComputeCapability | None) -> Machines:
    ranks_per_node = int(os.environ.get("LOCAL_SIZE", plan.ranks.world_size))
    num_nodes = max(1, plan.ranks.world_size // ranks_per_node)
    return Machines(num_nodes, ranks_per_node, gpu_bytes, capability=capability)
