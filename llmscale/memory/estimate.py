"""States and activations put together, moment by moment: what one GPU holds when it holds most. No torch.

What PyTorch allocates is exact arithmetic on shapes and on DeepSpeed's code. What lies between that and the GPU's
whole memory is not: it is assumed, named here, and kept apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import DsConfig
from llmscale.config.deepspeed.sections import CheckpointingMode
from llmscale.config.loss_settings import CHUNK_TOKENS
from llmscale.memory.activations.activation_memory import estimate_activations
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.states.by_stage import estimate_states
from llmscale.memory.step_peaks import PHASES, find_moments
from llmscale.memory.zero_settings import EngineLayout

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


def estimate_memory(
    shape: GPTShape,
    micro_batch_size: int,
    layout: EngineLayout,
    checkpointing: CheckpointingMode,
    capability: ComputeCapability | None = None,
    loss_chunk_tokens: int = CHUNK_TOKENS,
) -> MemoryEstimate:
    """Every moment of a step on one rank, at its own peak. `capability` is its GPU's; None: of an Ampere or newer
    one. Raises NotRecorded."""
    # Of the accumulation, only whether there is any matters to the states, and not even that at stage 3 but for hpZ's
    # copies; of checkpointing, only stage 3 knows, and only whether blocks run twice.
    sharded = layout.zero_stage == 3
    alike = sharded and layout.zero_hpz_partition_size == 1
    steps = 1 if alike else min(2, layout.gradient_accumulation_steps)
    mode: CheckpointingMode = "full" if sharded and checkpointing != "none" else "none"
    states = _states(shape, replace(layout, gradient_accumulation_steps=steps), mode)
    activations = _activations(
        shape,
        micro_batch_size=micro_batch_size,
        precision=layout.precision,
        checkpointing=checkpointing,
        cpu_checkpointing=layout.cpu_checkpointing,
        zero_stage=layout.zero_stage,
        capability=capability,
        loss_chunk_tokens=loss_chunk_tokens,
    )
    return MemoryEstimate(
        moments=find_moments(shape.architecture, states, activations),
        host_bytes=states.host_bytes + activations.host_bytes,
        nvme_bytes=states.nvme_bytes,
    )


def estimate_least(
    shape: GPTShape,
    micro_batch_size: int,
    ds: DsConfig,
    checkpointing: CheckpointingMode,
    capability: ComputeCapability | None = None,
    loss_chunk_tokens: int = CHUNK_TOKENS,
) -> int:
    """Bytes that are needed whatever DeepSpeed does: activations, and below stage 3 every parameter in 16 bit."""
    activations = _activations(
        shape,
        micro_batch_size=micro_batch_size,
        precision=ds.precision,
        checkpointing=checkpointing,
        cpu_checkpointing=ds.cpu_checkpointing,
        zero_stage=ds.zero_stage,
        capability=capability,
        loss_chunk_tokens=loss_chunk_tokens,
    )
    return activations.peak_bytes + (0 if ds.zero_stage == 3 else 2 * shape.num_parameters)


#: The rows of one table ask for the same again and again.
_states = lru_cache(maxsize=256)(estimate_states)
_activations = lru_cache(maxsize=256)(estimate_activations)
