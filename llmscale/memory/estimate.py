"""States and activations put together: what one GPU holds at the peak of each part of a step. No torch.

What PyTorch allocates follows from shapes and from DeepSpeed's code. The allocator's reserve and the CUDA context are
assumptions, named here and kept apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import add
from typing import ClassVar

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.config.batch_plan import ParallelLayout
from llmscale.config.resolve import ResolvedStep
from llmscale.memory.activations import Activations, Moment, OtherBlocks, estimate_activations
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.layers import Pass
from llmscale.memory.states import Added, States
from llmscale.memory.zero_setup import zero_setup
from llmscale.memory.zero_stages import zero_states

#: ASSUMED, not calibrated: the CUDA context, kernels and cuBLAS's work space take 0.5 to 1 GiB that no PyTorch counter
#: shows; NCCL's buffers come on top with every peer.
CONTEXT_BYTES = 2**30

#: ASSUMED: reserved over allocated bytes at the peak. The rules of PyTorch's caching allocator, replayed once over the
#: grid of scripts/bench/memory/memory_grid.py, needed 1.04 in the median and 1.11 at most.
RESERVED_PER_ALLOCATED = 1.10

#: Phases of a step, with their moments in the order of time.
PHASES: dict[str, tuple[str, ...]] = {
    "forward": ("forward", "loss forward"),
    "backward": ("loss backward", "block backward", "end of backward"),
    "step": ("optimizer step",),
}
_NOTHING = Added()
_NO_OTHERS = OtherBlocks()
_NO_STATES = States(
    Breakdown(),
    step=_NOTHING,
    end=_NOTHING,
    gradients=lambda _complete: _NOTHING,
    handing=lambda _complete, _handing: _NOTHING,
)


@dataclass(frozen=True)
class MemoryEstimate:
    """One rank's memory."""

    #: Properties that JSON has beside the fields.
    DERIVED: ClassVar = ("peak_moment", "peak", "allocated_bytes", "reserved_bytes", "context_bytes", "total_bytes")

    moments: Mapping[str, Breakdown]
    """Peak of each part of a step, in the order of time."""
    host_bytes: int
    """Host memory for offloaded tensors, without the process itself."""
    nvme_bytes: int
    """Bytes on disk."""

    @cached_property
    def peak_moment(self) -> str:
        """Name of the moment with the most live bytes."""
        return max(self.moments, key=lambda name: self.moments[name].total_bytes)

    def phase(self, name: str) -> Breakdown:
        """Return a phase's largest moment."""
        return max((self.moments[moment] for moment in PHASES[name]), key=lambda moment: moment.total_bytes)

    @property
    def peak(self) -> Breakdown:
        return self.moments[self.peak_moment]

    @cached_property
    def allocated_bytes(self) -> int:
        """Bytes in tensors at the peak: `torch.cuda.max_memory_allocated`."""
        return self.peak.total_bytes

    @property
    def reserve_bytes(self) -> int:
        """Assumed bytes that the caching allocator holds beyond the tensors."""
        return round(self.allocated_bytes * (RESERVED_PER_ALLOCATED - 1))

    @property
    def reserved_bytes(self) -> int:
        """Estimate of `torch.cuda.max_memory_reserved`."""
        return self.allocated_bytes + self.reserve_bytes

    @property
    def context_bytes(self) -> int:
        """Assumed bytes outside of PyTorch."""
        return CONTEXT_BYTES

    @property
    def total_bytes(self) -> int:
        """Estimate of what `nvidia-smi` shows."""
        return self.reserved_bytes + self.context_bytes


def estimate_memory(
    step: ResolvedStep, capability: ComputeCapability | None = None, *, worst_load: bool = False
) -> MemoryEstimate:
    """Estimate one rank's memory at the peak of each part of a step, on GPUs of that compute capability.

    `capability` None means Ampere or newer. `worst_load`: ranks that divide experts send this one all rows that they
    can; else all have equal loads.
    """
    setup = zero_setup(step, capability)
    # Micro-steps after the second change nothing. At stage 3 all are alike, except for hpZ's copies.
    alike = setup.stage == 3 and setup.zero.zero_hpz_partition_size == 1
    if alike:
        micro_steps = 1
    else:
        micro_steps = min(2, step.plan.gradient_accumulation_steps)
    recomputes = setup.stage == 3 and step.checkpointing != "none"
    states = _states(step.rank_tensors, setup.with_micro_steps(micro_steps), recomputes)
    activations = step_activations(step, capability, worst_load=worst_load)
    return MemoryEstimate(
        moments=find_moments(states, activations),
        host_bytes=math.ceil(states.host_bytes + activations.host_bytes),
        nvme_bytes=math.ceil(states.nvme_bytes),
    )


def estimate_least(step: ResolvedStep, capability: ComputeCapability | None = None) -> int:
    """Estimate a lower bound: activations, parameters in 16 bits, and states where ZeRO divides them."""
    zero = step.engine_config.zero
    ranks = step.plan.ranks.world_size
    least: float = max(one.total_bytes for one in find_moments(_NO_STATES, step_activations(step, capability)).values())
    if zero.stage < 3:
        least += 2 * step.rank_tensors.architecture.num_parameters
    elif zero.offload_param.device == "none":
        least += 2 * step.shape.num_parameters / ranks
    if zero.stage and zero.offload_optimizer.device == "none":
        least += step.stored_optimizer.state_bytes(step.shape.architecture) / ranks
    return math.floor(least)


def step_activations(
    step: ResolvedStep, capability: ComputeCapability | None = None, *, worst_load: bool = False
) -> Activations:
    """Return the activations of a micro-step on GPUs of that compute capability."""
    split = step.plan.ranks.sequence_parallel_size
    divided = step.plan.ranks.expert_parallel_size
    micro_batch = Pass(
        step.shape,
        step.plan.micro_batch_size,
        step.precision,
        is_stage3=step.zero_stage == 3,
        ranks=ParallelLayout(math.lcm(split, divided), split, divided),
        chunk_tokens=step.loss.chunk_tokens,
        loss_kernel=step.loss.kernel,
        router_loss=step.loss.has_router_loss,
        trains_head=not step.tensors.is_frozen(f"{'wte' if step.shape.tied else 'head'}.weight"),
        trains_table=not step.tensors.is_frozen("wte.weight"),
        frozen_patterns=step.optimizer.frozen,
        checkpointing=step.checkpointing,
        capability=capability,
        worst_load=worst_load,
    )
    return estimate_activations(micro_batch, step.checkpointing, cpu_checkpointing=step.engine_config.cpu_checkpointing)


#: The rows of one table ask for the same again and again.
_states = lru_cache(maxsize=256)(zero_states)


def find_moments(states: States, activations: Activations) -> dict[str, Breakdown]:
    """Return the peak of each part of a step by name.

    A peak is where the sum of states and activations is largest, which is seldom where either of them is. Blocks are
    followed until none that is left can be larger.
    """
    peaks = {name: (-math.inf, Moment(name), _NOTHING, _NO_OTHERS) for names in PHASES.values() for name in names}

    def compare(moment: Moment, added: Added, others: OtherBlocks = _NO_OTHERS) -> None:
        total = moment.total_bytes + others.saved + others.casts + sum(added)
        if total > peaks[moment.name][0]:
            peaks[moment.name] = total, moment, added, others

    for most, moment in activations.forward_blocks():
        if most + states.most_in_forward <= peaks["forward"][0]:
            break
        compare(moment, states.in_forward(moment.place, is_settled=moment.is_settled))
    for moment in activations.ends:
        is_forward = moment.place >= 0
        compare(
            moment,
            states.in_forward(moment.place) if is_forward else states.in_backward(moment.complete, moment.handing),
        )
    most_added = states.most_in_block(activations.largest_handing)
    for most, others, block in activations.backward_blocks():
        if most + most_added <= peaks["block backward"][0]:
            break
        additions, added_bytes = states.in_block(others.complete, block.handed)
        totals = list(map(add, block.backward_bytes, added_bytes))
        largest = totals.index(max(totals))
        compare(block.backward[largest], additions[largest], others)
    compare(Moment("end of backward", activations=activations.saved[0]), states.end)
    compare(Moment("optimizer step"), states.step)
    return {
        name: states.resident + _as_breakdown(moment, others) + added.breakdown
        for name, (_, moment, added, others) in peaks.items()
    }


def _as_breakdown(moment: Moment, others: OtherBlocks) -> Breakdown:
    return Breakdown(
        parameters_bytes=math.ceil(moment.casts + others.casts),
        activations_bytes=math.ceil(moment.activations + others.saved),
        logits_bytes=math.ceil(moment.logits),
        temporaries_bytes=math.ceil(moment.temporaries),
    )
