"""States and activations put together: what one GPU holds at the peak of each part of a step. No torch.

What PyTorch allocates follows from shapes and from DeepSpeed's code. The allocator's reserve and the CUDA context are
assumptions, named here and kept apart.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.hf_config import HFModel
from llmscale.architecture.layers import Architecture, ParameterTensors
from llmscale.config.batch_plan import ParallelLayout
from llmscale.config.resolve import ResolvedStep
from llmscale.memory.activations.activation_memory import (
    ActivationMemory,
    BlockActivations,
    estimate_activations,
)
from llmscale.memory.activations.recorded import Moment
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.states.stage3 import estimate_stage3
from llmscale.memory.states.stages012 import (
    estimate_bf16_optimizer,
    estimate_stage0,
    estimate_stage12,
    uses_bf16_optimizer,
)
from llmscale.memory.states.state_memory import StateMemory, ZeroSetup, zero_setup

#: ASSUMED, not calibrated: the CUDA context, kernels and cuBLAS's work space take 0.5 to 1 GiB that no PyTorch counter
#: shows; NCCL's buffers come on top with every peer.
CONTEXT_BYTES = 2**30

#: ASSUMED: reserved over allocated bytes at the peak. The rules of PyTorch's caching allocator, replayed over the
#: grid of scripts/bench/memory/memory_grid.py, need 1.04 in the median and 1.11 at most.
RESERVED_PER_ALLOCATED = 1.10

#: Phases of a step, with their moments in the order of time.
PHASES: dict[str, tuple[str, ...]] = {
    "forward": ("forward", "loss forward"),
    "backward": ("loss backward", "block backward", "end of backward"),
    "step": ("optimizer step",),
}


@dataclass(frozen=True)
class MemoryEstimate:
    """One rank's memory."""

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
    can; else all have equal loads. Raises NotRecorded.
    """
    setup = zero_setup(step, capability)
    # Micro-steps after the second change nothing. At stage 3 all are alike, except for hpZ's copies.
    alike = setup.stage == 3 and setup.zero.zero_hpz_partition_size == 1
    micro_steps = 1 if alike else min(2, step.plan.gradient_accumulation_steps)
    recomputes = setup.stage == 3 and step.checkpointing != "none"
    states = _states(step.rank_tensors, setup.with_micro_steps(micro_steps), recomputes)
    activations = _step_activations(step, capability, worst_load)
    return MemoryEstimate(
        moments=find_moments(step.rank_tensors.architecture, states, activations),
        host_bytes=states.host_bytes + activations.host_bytes,
        nvme_bytes=states.nvme_bytes,
    )


def estimate_least(step: ResolvedStep, capability: ComputeCapability | None = None) -> int:
    """Estimate a lower bound: activations, and below stage 3 every parameter in 16 bits."""
    parameters = 0 if step.zero_stage == 3 else 2 * step.rank_tensors.architecture.num_parameters
    return _step_activations(step, capability).peak_bytes + parameters


def estimate_states(tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool = False) -> StateMemory:
    """Estimate what DeepSpeed 0.19.8 allocates beside activations; autocast's 16-bit copies count as activations.

    Follows DeepSpeed's bookkeeping over the list of parameters, allocation by allocation. `recomputes` matters at stage
    3, where recomputation gathers the parameters once more.
    """
    if setup.stage == 0:
        return estimate_stage0(tensors, setup)
    if setup.stage == 3:
        return estimate_stage3(tensors, setup, recomputes)
    return estimate_bf16_optimizer(tensors, setup) if uses_bf16_optimizer(setup) else estimate_stage12(tensors, setup)


def _step_activations(
    step: ResolvedStep, capability: ComputeCapability | None, worst_load: bool = False
) -> ActivationMemory:
    split, divided = step.plan.ranks.sequence_parallel_size, step.plan.ranks.expert_parallel_size
    return _activations(
        step.shape,
        micro_batch_size=step.plan.micro_batch_size,
        precision=step.precision,
        checkpointing=step.checkpointing,
        cpu_checkpointing=step.engine_config.cpu_checkpointing,
        zero_stage=step.zero_stage,
        capability=capability,
        loss_chunk_tokens=step.loss.chunk_tokens,
        router_loss=step.loss.has_router_loss,
        ranks=ParallelLayout(math.lcm(split, divided), split, divided),
        worst_load=worst_load,
    )


#: The rows of one table ask for the same again and again.
_states = lru_cache(maxsize=256)(estimate_states)
_activations = lru_cache(maxsize=256)(estimate_activations)


@dataclass(frozen=True)
class HFStates:
    """One rank's memory for a transformers model, without activations."""

    estimate: MemoryEstimate
    begin_of_backward_bytes: int
    """Bytes allocated when the activations are at their largest, with the gradients and buffers of that moment."""

    def room_bytes(self, gpu_bytes: int) -> int:
        """Return what a GPU has left for activations, logits and loss after reserve and context; may be negative."""
        return int((gpu_bytes - CONTEXT_BYTES) / RESERVED_PER_ALLOCATED) - self.begin_of_backward_bytes


def estimate_hf_states(model: HFModel, setup: ZeroSetup) -> HFStates:
    """Estimate parameters, gradients, optimizer states, buffers and temporaries of a transformers model."""
    states = estimate_states(ParameterTensors(model.architecture), setup)
    moments = {
        "forward": states.resident + states.forward_peak,
        "backward": states.resident + states.backward_peak,
        "optimizer step": states.resident + states.step,
    }
    begin = states.resident.total_bytes + states.ready_bytes[0]
    return HFStates(MemoryEstimate(moments, states.host_bytes, states.nvme_bytes), begin)


def find_moments(model: Architecture, states: StateMemory, activations: ActivationMemory) -> dict[str, Breakdown]:
    """Return the peak of each part of a step by name.

    A peak is where the sum of states and activations is largest, which is seldom where either of them is.
    """
    backward = _Backward(model, states, activations)
    added = {
        "forward": _blocks_forward(states, activations),
        "loss forward": _loss_forward(states, activations),
        "loss backward": backward.loss(),
        "block backward": backward.blocks(),
        "end of backward": backward.end(),
        "optimizer step": states.step,
    }
    return {name: states.resident + addition for name, addition in added.items()}


def _blocks_forward(states: StateMemory, activations: ActivationMemory) -> Breakdown:
    """Return the peak of the block with the largest sum: with ZeRO-3 not always the last."""
    blocks = range(activations.n_layer)
    before = [activations.before_block_bytes(block, forward=True) for block in blocks]
    held = [before[block] + activations.blocks[block].forward_peak_bytes for block in blocks]
    block = max(blocks, key=lambda block: states.forward[1 + block].total_bytes + held[block])
    casts = activations.casts_bytes(block + 1, forward=True)
    return states.forward[1 + block] + Breakdown(parameters_bytes=casts, activations_bytes=held[block] - casts)


def _loss_forward(states: StateMemory, activations: ActivationMemory) -> Breakdown:
    """Return the larger peak of gathering the head's weights and of computing the loss."""
    block_casts = activations.casts_bytes(activations.n_layer, forward=True)
    before = activations.before_block_bytes(activations.n_layer, forward=True)
    norm, head_cast = activations.saved_final_norm_bytes, activations.head_cast_bytes
    held = Breakdown(parameters_bytes=block_casts, activations_bytes=before - block_casts + norm)
    logits = Breakdown(
        parameters_bytes=head_cast, logits_bytes=activations.logits_forward_peak_bytes - norm - head_cast
    )
    return _largest([states.forward[-2] + held, states.forward[-1] + held + logits])


#: First interval, last interval, moment, and whether it is a hand-over of gradients to DeepSpeed.
_Span = tuple[int, int, Moment, bool]


class _Backward:
    """States and activations followed through the same backward pass."""

    def __init__(self, model: Architecture, states: StateMemory, activations: ActivationMemory) -> None:
        self._model, self._states, self._activations = model, states, activations
        self._intervals, self._done = states.backward, states.parameters_done
        self._last = len(self._intervals) - 1

    def _at(self, done: int) -> int:
        """Return the first interval that begins with `done` gradients, or the last one with fewer."""
        place = bisect_left(self._done, done)
        return place if place <= self._last and self._done[place] == done else max(0, place - 1)

    def _beginning_with(self, done: int) -> int:
        """Return the interval that begins with these gradients: autocast hands over a weight's before a bias's."""
        return min(bisect_left(self._done, done), self._last)

    def _peak(self, place: int) -> Breakdown:
        interval = self._intervals[place]
        return max(interval.ready, interval.after, key=lambda peak: peak.total_bytes).breakdown

    def loss(self) -> Breakdown:
        """From the loss to the final norm."""
        model, activations = self._model, self._activations
        casts = activations.casts_bytes(activations.n_layer)
        held = activations.before_block_bytes(activations.n_layer) - casts
        table = model.token_embedding.elements if model.is_tied else 0
        found = []
        for moment in activations.head_backward:
            place = self._at(table + moment.gradient_parameters) if moment.gradient_parameters else 0
            found.append(self._in_head(self._intervals[place].after.breakdown, moment))
        for moment in activations.head_handovers:
            place = self._beginning_with(table + moment.gradient_parameters)
            found.append(self._in_head(self._peak(place), moment))
        return Breakdown(parameters_bytes=casts, activations_bytes=held) + _largest(found)

    def _in_head(self, states: Breakdown, moment: Moment) -> Breakdown:
        """Add a moment of the head's backward pass, without what the blocks have saved.

        The token table's gradient is in both parts.
        """
        table = min(self._activations.head_gradient_bytes, states.gradients_bytes)
        norm = min(self._activations.saved_final_norm_bytes, moment.activations_bytes)
        return states + Breakdown(
            parameters_bytes=moment.casts_bytes,
            gradients_bytes=-table,
            activations_bytes=norm,
            logits_bytes=moment.activations_bytes - norm + moment.temporaries_bytes,
        )

    def blocks(self) -> Breakdown:
        """From the last block to the first, whose activations are freed while gradients appear."""
        model, activations, states = self._model, self._activations, self._states
        # Blocks in the order of an upper bound.
        spans: dict[int, tuple[int, list[_Span]]] = {}
        bounds, done = [], model.head_gradients
        begin = self._at(done)
        for block in reversed(range(model.n_layer)):
            kind, before = activations.blocks[block], activations.before_block_bytes(block)
            if id(kind) not in spans:
                spans[id(kind)] = begin, list(self._spans(kind, begin, done))
            first, done = begin, done + model.elements_of(block)
            begin = self._at(done)
            largest = max(moment.total_bytes for _, _, moment, _ in spans[id(kind)][1])
            bounds.append((max(states.ready_bytes[first : begin + 1]) + before + largest, -block, first, before))
        best_bytes, best = -1, (0, Moment(), Breakdown())
        for bound, order, first, before in sorted(bounds, reverse=True):
            if bound <= best_bytes:
                break
            began, of_kind = spans[id(activations.blocks[-order])]
            shift = first - began
            for low, high, moment, is_ready in of_kind:
                sizes = states.ready_bytes if is_ready else states.after_bytes
                place = max(range(low + shift, high + shift + 1), key=sizes.__getitem__)
                total = sizes[place] + before + moment.total_bytes
                if total > best_bytes:
                    interval = self._peak(place) if is_ready else self._intervals[place].after.breakdown
                    best_bytes, best = total, (-order, moment, interval)
        block, moment, peak = best
        casts = activations.casts_bytes(block)
        return peak + Breakdown(
            parameters_bytes=casts + moment.casts_bytes,
            activations_bytes=activations.before_block_bytes(block) - casts + moment.activations_bytes,
            temporaries_bytes=moment.temporaries_bytes,
        )

    def _spans(self, kind: BlockActivations, begin: int, done: int) -> Iterator[_Span]:
        """Yield the moments of a block whose backward pass begins in interval `begin`, when `done` gradients exist.

        Only moments with the largest activations are recorded. Between two of them no more is held than at the later
        one, which therefore meets the states of all intervals between.
        """
        before = begin - 1
        for moment in kind.backward:
            last = self._at(done + moment.gradient_parameters)
            yield min(before + 1, last), last, moment, False
            before = last
        for moment in kind.handovers:
            place = self._beginning_with(done + moment.gradient_parameters)
            yield place, place, moment, True

    def end(self) -> Breakdown:
        """Embeddings, and DeepSpeed's work after the last gradient.

        The table's gradient from the head is in both parts. The look-up's counts as activations until both are added.
        """
        model, activations = self._model, self._activations
        found = [self._peak(self._last) + Breakdown(activations_bytes=activations.saved_embedding_bytes)]
        before = model.head_gradients + sum(map(model.elements_of, range(model.n_layer)))
        moments = [
            (moment, self._intervals[self._at(before + moment.gradient_parameters)].after.breakdown)
            for moment in activations.embedding_backward
            if before + moment.gradient_parameters < model.num_parameters
        ]
        for moment in activations.embedding_handovers:
            place = self._beginning_with(before + moment.gradient_parameters)
            moments += [(moment, self._peak(place))] if place != self._last else []
        for moment, states in moments:
            table = min(activations.head_gradient_bytes, states.gradients_bytes, moment.temporaries_bytes)
            found.append(
                states
                + Breakdown(
                    gradients_bytes=-table,
                    activations_bytes=moment.activations_bytes,
                    temporaries_bytes=moment.temporaries_bytes,
                )
            )
        return _largest(found)


def _largest(found: list[Breakdown]) -> Breakdown:
    return max(found, key=lambda added: added.total_bytes)
