"""States and activations put together, moment by moment: what one GPU holds when it holds most. No torch.

What PyTorch allocates is exact arithmetic on shapes and on DeepSpeed's code. What lies between that and the GPU's
whole memory is not: it is assumed, named here, and kept apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.resolve import ResolvedStep
from llmscale.memory.activations.activation_memory import ActivationMemory, estimate_activations
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.states.by_stage import estimate_states
from llmscale.memory.step_peaks import PHASES, find_moments
from llmscale.memory.zero_settings import zero_setup

#: ASSUMED, not calibrated: the CUDA context, kernels and cuBLAS's work space take 0.5 to 1 GiB that no PyTorch counter
#: shows; NCCL's buffers come on top with every peer.
CONTEXT_BYTES = 2**30

#: ASSUMED: reserved over allocated bytes at the peak. The rules of PyTorch's caching allocator, replayed over the
#: grid of scripts/bench/memory/memory_grid.py, need 1.04 in the median and 1.11 at most.
RESERVED_PER_ALLOCATED = 1.10


@dataclass(frozen=True)
class MemoryEstimate:
    """One rank's memory."""

    moments: Mapping[str, Breakdown]
    """Each part of a step at its own peak, in the order of time."""
    host_bytes: int
    """In host memory for what is offloaded, beyond the process itself."""
    nvme_bytes: int
    """On disk."""

    @cached_property
    def peak_moment(self) -> str:
        """The name of the moment with the most live bytes."""
        return max(self.moments, key=lambda name: self.moments[name].total_bytes)

    def phase(self, name: str) -> Breakdown:
        """A phase's largest moment."""
        return max((self.moments[moment] for moment in PHASES[name]), key=lambda moment: moment.total_bytes)

    @property
    def peak(self) -> Breakdown:
        return self.moments[self.peak_moment]

    @cached_property
    def allocated_bytes(self) -> int:
        """In tensors at the peak: what `torch.cuda.max_memory_allocated` shows."""
        return self.peak.total_bytes

    @property
    def reserve_bytes(self) -> int:
        """What the caching allocator holds beyond that, as assumed."""
        return round(self.allocated_bytes * (RESERVED_PER_ALLOCATED - 1))

    @property
    def reserved_bytes(self) -> int:
        """What `torch.cuda.max_memory_reserved` shows."""
        return self.allocated_bytes + self.reserve_bytes

    @property
    def context_bytes(self) -> int:
        """Outside of PyTorch, as assumed."""
        return CONTEXT_BYTES

    @property
    def total_bytes(self) -> int:
        """What `nvidia-smi` shows."""
        return self.reserved_bytes + self.context_bytes


def estimate_memory(step: ResolvedStep, capability: ComputeCapability | None = None) -> MemoryEstimate:
    """Estimate one rank's memory at the peak of each part of a step, on GPUs of that compute capability.

    `capability` None means Ampere or newer. Raises NotRecorded.
    """
    setup = zero_setup(step, capability)
    # Of the accumulation, only whether there is any matters to the states, and not even that at stage 3 but for hpZ's
    # copies; of checkpointing, only stage 3 knows, and only whether blocks run twice.
    sharded = setup.stage == 3
    alike = sharded and setup.zero.zero_hpz_partition_size == 1
    micro_steps = 1 if alike else min(2, step.plan.gradient_accumulation_steps)
    mode: CheckpointingMode = "full" if sharded and step.checkpointing != "none" else "none"
    states = _states(step.shape, setup.with_micro_steps(micro_steps), mode)
    activations = _step_activations(step, capability)
    return MemoryEstimate(
        moments=find_moments(step.shape.architecture, states, activations),
        host_bytes=states.host_bytes + activations.host_bytes,
        nvme_bytes=states.nvme_bytes,
    )


def estimate_least(step: ResolvedStep, capability: ComputeCapability | None = None) -> int:
    """Estimate bytes that are needed whatever DeepSpeed does: activations, and below stage 3 every parameter in 16
    bits."""
    parameters = 0 if step.zero_stage == 3 else 2 * step.shape.num_parameters
    return _step_activations(step, capability).peak_bytes + parameters


def _step_activations(step: ResolvedStep, capability: ComputeCapability | None) -> ActivationMemory:
    return _activations(
        step.shape,
        micro_batch_size=step.plan.micro_batch_size,
        precision=step.precision,
        checkpointing=step.checkpointing,
        cpu_checkpointing=step.engine_config.cpu_checkpointing,
        zero_stage=step.zero_stage,
        capability=capability,
        loss_chunk_tokens=step.loss.chunk_tokens,
    )


#: The rows of one table ask for the same again and again.
_states = lru_cache(maxsize=256)(estimate_states)
_activations = lru_cache(maxsize=256)(estimate_activations)
