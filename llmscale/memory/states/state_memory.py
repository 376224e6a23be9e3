"""Inputs and results of the estimate of DeepSpeed's memory, and what its stages share. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.architecture.layers import ParameterTensor, ParameterTensors
from llmscale.config.deepspeed.schema import Dtype, ResolvedDsConfig, ResolvedZero
from llmscale.config.optimizers import OptimizerGroup, OptimizerSpec, Part, matrices_of, plan_rounds
from llmscale.config.resolve import ResolvedStep
from llmscale.memory.breakdown import ALLOCATION_BYTES, Breakdown, allocated_bytes

BYTES_PER_ELEMENT: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@lru_cache(maxsize=4096)
def tensor_bytes(elements: int, dtype: Dtype) -> int:
    """Return the bytes that a tensor takes on the GPU."""
    return allocated_bytes(elements, BYTES_PER_ELEMENT[dtype])


def state_tensor_bytes(group: OptimizerGroup, elements: int) -> int:
    """Return the bytes of the optimizer's states of one tensor on the GPU, without the fp32 master weights."""
    return len(group.states) * tensor_bytes(elements, "fp32") + len(group.scalars) * ALLOCATION_BYTES


@dataclass(frozen=True)
class ZeroSetup:
    """Settings that determine DeepSpeed's memory, apart from the list of parameters."""

    config: ResolvedDsConfig
    shard_ranks: int
    """Ranks that ZeRO divides model states over."""
    optimizer: OptimizerSpec
    expert_parallel_size: int = 1
    """Ranks that divide the experts of a block."""

    @property
    def zero(self) -> ResolvedZero:
        return self.config.zero

    @property
    def stage(self) -> int:
        return self.config.zero.stage

    def ranks_of(self, tensor: ParameterTensor) -> int:
        """Return the ranks that ZeRO divides the states of a parameter over."""
        return self.shard_ranks // (self.expert_parallel_size if tensor.parameter.is_stacked else 1)

    def groups(self, tensors: ParameterTensors) -> list[tuple[OptimizerGroup, list[ParameterTensor]]]:
        """Return the optimizer's groups of trained parameters; divided experts have groups of their own at the end."""
        groups = [(group, list(members)) for group, members in self.optimizer.group_tensors(tensors.trainable)]
        if self.expert_parallel_size == 1:
            return groups
        divided = [
            (group, [tensor for tensor in members if tensor.parameter.is_stacked == is_stacked])
            for is_stacked in (False, True)
            for group, members in groups
        ]
        return [(group, members) for group, members in divided if members]

    @property
    def accumulates(self) -> bool:
        """True when a step has several micro-steps."""
        return self.config.gradient_accumulation_steps > 1

    @property
    def offloads_optimizer(self) -> bool:
        return self.config.zero.offload_optimizer.device != "none"

    def with_micro_steps(self, steps: int) -> ZeroSetup:
        """Return the setup with `steps` micro-steps, and without settings on which no model state depends.

        Rows that differ only in these are then estimated once.
        """
        batch = {"gradient_accumulation_steps": steps, "train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}
        return replace(self, config=self.config.model_copy(update={**batch, "activation_checkpointing": None}))


def zero_setup(step: ResolvedStep, capability: ComputeCapability | None = None) -> ZeroSetup:
    """Return the setup of a step on GPUs of that compute capability; None means Ampere or newer."""
    ranks = step.plan.ranks
    optimizer = step.optimizer.on_gpu(capability)
    return ZeroSetup(step.engine_config, ranks.world_size, optimizer, ranks.expert_parallel_size)


Kind = Literal["parameters", "gradients", "buckets", "temporaries"]


class Peak(NamedTuple):
    """Largest addition to the resident memory in some time."""

    total_bytes: int
    by_kind: Mapping[Kind, int]

    @property
    def breakdown(self) -> Breakdown:
        return Breakdown(**{f"{kind}_bytes": num_bytes for kind, num_bytes in self.by_kind.items()})


def _total(peak: Peak) -> int:
    return peak.total_bytes


class BackwardInterval(NamedTuple):
    """Memory from the moment one layer's gradients are ready until the next layer's are."""

    parameters_done: int
    """Parameters with gradients when the interval begins; a tied table counts from the head's gradient on."""
    ready: Peak
    """Peak while DeepSpeed takes the gradients that begin the interval."""
    after: Peak
    """Peak from then until the next gradients are ready."""

    def largest(self, other: BackwardInterval) -> BackwardInterval:
        """Return the larger peaks of an interval in two micro-steps."""
        ready, after = max(self.ready, other.ready, key=_total), max(self.after, other.after, key=_total)
        return BackwardInterval(self.parameters_done, ready, after)


@dataclass(frozen=True)
class StateMemory:
    """One rank's memory without activations, in the last micro-step of a step after the first."""

    resident: Breakdown
    """Memory on the GPU between steps."""
    forward: tuple[Breakdown, ...]
    """Additions in the forward pass: embeddings, each block, final norm and weights of the head, logits and loss.

    Includes what earlier micro-steps have left. n_layer + 3 entries.
    """
    backward: tuple[BackwardInterval, ...]
    """Additions in the backward pass, in the order of time."""
    step: Breakdown
    """Largest addition in the optimizer step."""
    host_bytes: int = 0
    """Bytes in this rank's host memory."""
    nvme_bytes: int = 0
    """Bytes of this rank on disk."""

    @property
    def forward_peak(self) -> Breakdown:
        return max(self.forward, key=lambda added: added.total_bytes)

    @property
    def backward_peak(self) -> Breakdown:
        peaks = (peak for interval in self.backward for peak in (interval.ready, interval.after))
        return max(peaks, key=lambda peak: peak.total_bytes).breakdown

    @cached_property
    def parameters_done(self) -> list[int]:
        """`parameters_done` of each interval."""
        return [interval.parameters_done for interval in self.backward]

    @cached_property
    def ready_bytes(self) -> list[int]:
        """Largest total of each interval."""
        return [max(interval.ready.total_bytes, interval.after.total_bytes) for interval in self.backward]

    @cached_property
    def after_bytes(self) -> list[int]:
        """Largest total of each interval after DeepSpeed has taken the gradients."""
        return [interval.after.total_bytes for interval in self.backward]


def frozen_bytes(tensors: ParameterTensors, dtype: Dtype) -> int:
    """Return the bytes of the frozen parameters, each complete in a tensor of its own."""
    return sum(tensor_bytes(tensor.elements, dtype) for tensor in tensors.frozen_tensors)


class PeakTracker:
    """Adds up allocations and releases by category, and remembers the peak since the last `take_peak`."""

    def __init__(self) -> None:
        self._live: dict[Kind, int] = {"parameters": 0, "gradients": 0, "buckets": 0, "temporaries": 0}
        self._total_bytes = self._peak_bytes = 0
        self._at_peak: dict[Kind, int] | None = None
        """Live bytes at the peak; None while nothing has been freed since."""

    def allocate(self, kind: Kind, num_bytes: int) -> None:
        self._live[kind] += num_bytes
        self._total_bytes += num_bytes
        if self._total_bytes > self._peak_bytes:
            self._at_peak, self._peak_bytes = None, self._total_bytes

    def free(self, kind: Kind, num_bytes: int) -> None:
        if self._at_peak is None:
            self._at_peak = self._live.copy()
        self._live[kind] -= num_bytes
        self._total_bytes -= num_bytes

    def allocate_briefly(self, kind: Kind, num_bytes: int) -> None:
        """Allocate and free."""
        self.allocate(kind, num_bytes)
        self.free(kind, num_bytes)

    @property
    def now(self) -> Peak:
        return Peak(self._total_bytes, self._live.copy())

    def take_peak(self) -> Peak:
        """Return the peak since the last call, and start the next one at the present memory."""
        peak = Peak(self._peak_bytes, self._live.copy() if self._at_peak is None else self._at_peak)
        self._at_peak, self._peak_bytes = None, self._total_bytes
        return peak


def follow_backward(
    tensors: ParameterTensors,
    tracker: PeakTracker,
    dtype: Dtype,
    take: Callable[[ParameterTensor], None],
    end: Callable[[], None],
    gathered: Sequence[tuple[int, int]] = (),
) -> tuple[BackwardInterval, ...]:
    """Add the gradients of type `dtype` in order, pass each to `take`, and call `end` after the last.

    A tied table's gradient from the head waits for the look-up's, which is added to it in place. Frozen parameters have
    no gradients, and count as done where they would. `gathered`: bytes of
    gathered parameters at the beginning of each interval, and their peak in it; stage 3 alone has them.
    """
    intervals: list[BackwardInterval] = []
    frozen = set(tensors.frozen_tensors)
    table_bytes = 0 if tensors.table in frozen else tensor_bytes(tensors.table.elements, dtype)
    # The empty layer is a tied head, whose gradient waits for the look-up's.
    layers = [*([()] if tensors.tied else []), *tensors.gradient_order]
    done = held = 0
    tracker.take_peak()
    ready = tracker.now
    for position, layer in enumerate(layers):
        trained = [tensor for tensor in layer if tensor not in frozen] if frozen else layer
        if position == 0 and tensors.tied:
            tracker.allocate("gradients", table_bytes)
        if gathered:
            tracker.allocate_briefly("parameters", gathered[position][1] - held)
        intervals.append(BackwardInterval(done, ready, tracker.take_peak()))
        if gathered:
            tracker.free("parameters", held)
            held = gathered[position + 1][0]
            tracker.allocate("parameters", held)
            tracker.take_peak()
        if layer == (tensors.table,) and tensors.tied:
            tracker.allocate_briefly("gradients", table_bytes)
        else:
            done += sum(tensor.elements for tensor in layer) if layer else tensors.table.elements
            tracker.allocate("gradients", sum(tensor_bytes(tensor.elements, dtype) for tensor in trained))
        # Stage 3's own linear layer completes the weight first.
        for tensor in sorted(trained, key=lambda tensor: tensor.index) if gathered else trained:
            take(tensor)
        if position == len(layers) - 1:
            end()
        ready = tracker.take_peak()
    if gathered:
        tracker.allocate_briefly("parameters", gathered[-1][1] - held)
    return (*intervals, BackwardInterval(done, ready, tracker.take_peak()))


def orthogonalising_bytes(
    group: OptimizerGroup, tensors: Iterable[tuple[ParameterTensor, Sequence[Part]]], *, from_host: bool
) -> int:
    """Return the peak of Muon's step on rank 0 beside the states; 0 for a group that is not orthogonalised.

    Follows llmscale/engine/optimizers.py. `tensors` come with the parts that the ranks have of them. from_host: they
    are offloaded, and are copied to the GPU.
    """
    if not group.is_orthogonalised:
        return 0

    def newton_schulz(rows: int, columns: int) -> int:
        # Two iterates and a square of the smaller side.
        square = tensor_bytes(min(rows, columns) ** 2, group.products_dtype)
        return 2 * tensor_bytes(rows * columns, group.products_dtype) + square

    cut, most = [], 0
    for tensor, parts in tensors:
        for _, matrix in matrices_of(tensor.parameter.matrix_rows, tensor.parameter.columns, parts):
            if matrix.is_cut:
                cut.append(matrix)
            elif not matrix.parts or matrix.parts[0].rank == 0:
                copied = tensor_bytes(matrix.elements, "fp32") if from_host else 0
                most = max(most, copied + newton_schulz(matrix.rows, matrix.columns))
    for owned in plan_rounds(cut):
        # Rank 0 sends its parts of all matrices of the round, and receives the one that it orthogonalises.
        sent = (part.length for part in (cut[index].part_of(0) for index in owned.values()) if part)
        round_bytes = tensor_bytes(sum(sent), "fp32")
        if 0 in owned:
            own = cut[owned[0]]
            round_bytes += tensor_bytes(own.elements, "fp32") + newton_schulz(own.rows, own.columns)
        most = max(most, round_bytes)
    return most


@dataclass
class HostMemory:
    """Adds up tensors in host memory."""

    pin_memory: bool
    num_bytes: int = 0

    def pinned(self, elements: int, dtype: Dtype) -> None:
        """Add a buffer that DeepSpeed page-locks when `pin_memory` is true.

        PyTorch allocates page-locked memory in powers of two (aten/src/ATen/core/CachingHostAllocator.h).
        """
        num_bytes = elements * BYTES_PER_ELEMENT[dtype]
        self.num_bytes += 1 << (num_bytes - 1).bit_length() if self.pin_memory and num_bytes else num_bytes

    def pageable(self, elements: int, dtype: Dtype) -> None:
        """Add ordinary memory."""
        self.num_bytes += elements * BYTES_PER_ELEMENT[dtype]
