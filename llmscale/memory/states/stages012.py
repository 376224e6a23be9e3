"""Stages 0, 1 and 2: every rank has all parameters; stages 1 and 2 partition flat groups of them. No torch.

Stages 1 and 2 follow DeepSpeedZeroOptimizer (deepspeed/runtime/zero/stage_1_and_2.py) on rank 0, and stage 1 in bf16
with sums in fp32 BF16_Optimizer (deepspeed/runtime/bf16_optimizer.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from llmscale.architecture.layers import ParameterTensor, ParameterTensors
from llmscale.config.deepspeed.schema import Dtype
from llmscale.config.optimizers import OptimizerGroup, Part
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.states.state_memory import (
    HostMemory,
    PeakTracker,
    StateMemory,
    ZeroSetup,
    follow_backward,
    frozen_bytes,
    orthogonalising_bytes,
    state_tensor_bytes,
    tensor_bytes,
)

#: Elements at which the engine closes a bucket of gradients (deepspeed/runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE).
ALLREDUCE_ELEMENTS = 500_000_000

#: DeepSpeedZeroOptimizer.nccl_start_alignment_factor, in elements.
_START_ALIGNMENT = 2


def estimate_stage0(tensors: ParameterTensors, setup: ZeroSetup) -> StateMemory:
    """Estimate stage 0: no wrapper in fp32 and under autocast, FP16_UnfusedOptimizer in 16 bit.

    torch's AdamW is not FusedAdam (engine.py, _configure_optimizer and _configure_fp16_optimizer).
    """
    dtype = setup.config.model_dtype
    low = sum(tensor_bytes(tensor.elements, dtype) for tensor in tensors.trainable)
    full = sum(tensor_bytes(tensor.elements, "fp32") for tensor in tensors.trainable)
    master = full if dtype != "fp32" else 0
    group_of = setup.optimizer.group_of
    states = sum(state_tensor_bytes(group_of(tensor.kind), tensor.elements) for tensor in tensors.trainable)
    # llmscale.engine.deepspeed_patches sums in fp32 until the last micro-step, then casts to the parameters' type.
    sums_in_fp32 = setup.accumulates and setup.config.grad_accum_dtype == "fp32" and dtype != "fp32"
    tracker = PeakTracker()
    if setup.accumulates:
        tracker.allocate("gradients", full if sums_in_fp32 else low)
    forward = tracker.now.breakdown

    def take(tensor: ParameterTensor) -> None:
        if setup.accumulates:  # added in place to the earlier gradient
            tracker.free("gradients", tensor_bytes(tensor.elements, dtype))

    def end() -> None:
        for tensor in tensors.trainable if sums_in_fp32 else ():
            tracker.allocate("gradients", tensor_bytes(tensor.elements, dtype))
            tracker.free("gradients", tensor_bytes(tensor.elements, "fp32"))
        _allreduce_in_buckets([tensor.elements for tensor in tensors.trainable], dtype, setup, tracker)

    backward = follow_backward(tensors, tracker, dtype, take, end)
    # FP16_UnfusedOptimizer.step: gradients in fp32 beside those in 16 bit until the end of the step.
    tracker.allocate("temporaries", master)
    for group, members in setup.optimizer.group_tensors(tensors.trainable):
        uncut = ((tensor, ()) for tensor in members)
        tracker.allocate_briefly("temporaries", orthogonalising_bytes(group, uncut, from_host=False))
    return StateMemory(
        resident=Breakdown(parameters_bytes=low + frozen_bytes(tensors, dtype), optimizer_bytes=states + master),
        forward=(forward,) * (tensors.architecture.n_layer + 3),
        backward=backward,
        step=tracker.take_peak().breakdown,
    )


def _allreduce_in_buckets(sizes: Sequence[int], dtype: Dtype, setup: ZeroSetup, tracker: PeakTracker) -> None:
    """DeepSpeedEngine.allreduce_no_retain: several gradients are copied into a flat tensor, and cast if needed."""
    communication = setup.config.communication_data_type
    elements = count = 0
    for position, size in enumerate(sizes):
        elements, count = elements + size, count + 1
        if elements > ALLREDUCE_ELEMENTS or position == len(sizes) - 1:
            flat = tensor_bytes(elements, dtype) if count > 1 else 0
            cast = tensor_bytes(elements, communication) if communication != dtype else 0
            tracker.allocate_briefly("buckets", flat + cast)
            elements = count = 0


@dataclass(frozen=True)
class _FlatGroup:
    """One of the optimizer's groups: its parameters end to end, cut into equal partitions."""

    optimizer: OptimizerGroup
    tensors: tuple[ParameterTensor, ...]
    """Parameters in the order of the flat tensor."""
    offsets: dict[int, int]
    """First element of each parameter, by its index."""
    elements: int
    """Elements of the flat tensor, padded so that every partition begins aligned."""
    ranks: int

    @cached_property
    def partition(self) -> int:
        """Elements that one rank owns."""
        return self.elements // self.ranks

    @property
    def state_bytes(self) -> int:
        """Bytes of rank 0's fp32 copy of its partition, made even of fp32, and of the optimizer's states."""
        return tensor_bytes(self.partition, "fp32") + state_tensor_bytes(self.optimizer, self.partition)

    def own_elements(self, tensor: ParameterTensor) -> int:
        """Return the elements of a parameter that rank 0 owns."""
        return max(0, min(tensor.elements, self.partition - self.offsets[tensor.index]))

    @cached_property
    def own_tensors(self) -> tuple[ParameterTensor, ...]:
        """Parameters of which rank 0 owns a part."""
        return tuple(tensor for tensor in self.tensors if self.own_elements(tensor))

    def parts(self, tensor: ParameterTensor) -> Iterator[Part]:
        """Yield the ranks' parts of a parameter."""
        begin = offset = self.offsets[tensor.index]
        end = begin + tensor.elements
        while offset < end:
            rank = offset // self.partition
            length = min(end, (rank + 1) * self.partition) - offset
            yield Part(rank, offset - begin, length)
            offset += length

    def orthogonalising_bytes(self, *, from_host: bool = False) -> int:
        """Return what Muon's step of this group takes beside its states."""
        parts = ((tensor, tuple(self.parts(tensor))) for tensor in self.tensors)
        return orthogonalising_bytes(self.optimizer, parts, from_host=from_host)


def _build_flat_groups(tensors: ParameterTensors, setup: ZeroSetup) -> tuple[_FlatGroup, ...]:
    """Lay out each group, without the up to 16 bytes that `parameter_alignment` leaves between parameters."""
    found = []
    for group, order in setup.groups(tensors):
        ranks = setup.ranks_of(order[0])
        if setup.zero.round_robin_gradients:
            order = [tensor for start in range(min(ranks, len(order))) for tensor in order[start::ranks]]
        offsets, end = {}, 0
        for tensor in order:
            offsets[tensor.index] = end
            end += tensor.elements
        multiple = _START_ALIGNMENT * ranks
        found.append(_FlatGroup(group, tuple(order), offsets, math.ceil(end / multiple) * multiple, ranks))
    return tuple(found)


def uses_bf16_optimizer(setup: ZeroSetup) -> bool:
    """Return True where DeepSpeed chooses BF16_Optimizer (DeepSpeedEngine._do_optimizer_sanity_check)."""
    config = setup.config
    in_bf16 = config.precision == "bf16" and config.grad_accum_dtype == "fp32"
    return setup.stage == 1 and in_bf16 and not setup.offloads_optimizer


def estimate_bf16_optimizer(tensors: ParameterTensors, setup: ZeroSetup) -> StateMemory:
    """Estimate BF16_Optimizer, which keeps the sums of all gradients in fp32 between steps.

    Gradients in bf16 are added to them at the end of the backward pass, or at once with immediate_grad_update.
    """
    groups = _build_flat_groups(tensors, setup)
    immediate = setup.config.immediate_grad_update
    keeps = setup.accumulates and not immediate
    tracker = PeakTracker()
    if keeps:  # cleared to zero and not freed
        tracker.allocate("gradients", sum(tensor_bytes(tensor.elements, "bf16") for tensor in tensors.trainable))
    forward = tracker.now.breakdown

    def add(tensor: ParameterTensor) -> None:
        """_update_hp_grad: add through an fp32 copy."""
        tracker.allocate_briefly("temporaries", tensor_bytes(tensor.elements, "fp32"))

    def take(tensor: ParameterTensor) -> None:
        if immediate:
            add(tensor)
        if immediate or keeps:
            tracker.free("gradients", tensor_bytes(tensor.elements, "bf16"))

    def end() -> None:
        for tensor in () if immediate else tensors.trainable:
            add(tensor)
        # Groups of divided experts are reduced among other ranks.
        for ranks in dict.fromkeys(group.ranks for group in groups):
            alike = [group.elements for group in groups if group.ranks == ranks]
            _allreduce_in_buckets(alike, "fp32", setup, tracker)

    backward = follow_backward(tensors, tracker, "bf16", take, end)
    for group in groups:
        tracker.allocate_briefly("temporaries", group.orthogonalising_bytes())
    parameters = sum(tensor_bytes(group.elements, "bf16") for group in groups)
    return StateMemory(
        resident=Breakdown(
            parameters_bytes=parameters + frozen_bytes(tensors, "bf16"),
            gradients_bytes=sum(tensor_bytes(group.elements, "fp32") for group in groups),
            optimizer_bytes=sum(group.state_bytes for group in groups),
        ),
        forward=(forward,) * (tensors.architecture.n_layer + 3),
        backward=backward,
        step=tracker.take_peak().breakdown,
    )


def estimate_stage12(tensors: ParameterTensors, setup: ZeroSetup) -> StateMemory:
    """Estimate DeepSpeedZeroOptimizer with partition_grads false (stage 1) or true (stage 2)."""
    walk = _Walk(tensors, setup)
    forward = walk.tracker.now.breakdown
    backward = follow_backward(tensors, walk.tracker, walk.dtype, walk.take, walk.end)
    if walk.offload and walk.accumulates:
        # Earlier micro-steps keep gradients that are larger than the bucket longer.
        earlier = _Walk(tensors, setup, is_last=False)
        others = follow_backward(tensors, earlier.tracker, earlier.dtype, earlier.take, earlier.end)
        backward = tuple(mine.largest(other) for mine, other in zip(backward, others, strict=True))
    parameters = sum(tensor_bytes(group.elements, walk.dtype) for group in walk.groups)
    parameters += frozen_bytes(tensors, walk.dtype)
    if setup.offloads_optimizer:
        # temp_grad_buffer_for_gpu_offload: as large as the largest parameter.
        buffer = tensor_bytes(max(tensor.elements for tensor in tensors.trainable), walk.dtype)
        resident = Breakdown(parameters_bytes=parameters, buckets_bytes=buffer)
    else:
        states = sum(group.state_bytes for group in walk.groups)
        resident = Breakdown(parameters_bytes=parameters, optimizer_bytes=states)
    return StateMemory(
        resident=resident,
        forward=(forward,) * (tensors.architecture.n_layer + 3),
        backward=backward,
        step=walk.step(),
        host_bytes=walk.host_bytes() if setup.offloads_optimizer else 0,
    )


class _Walk:
    """A micro-step, by default the last one, and the optimizer step; methods name DeepSpeed's functions."""

    def __init__(self, tensors: ParameterTensors, setup: ZeroSetup, is_last: bool = True) -> None:
        config, zero, self.is_last = setup.config, setup.zero, is_last
        self.tensors, self.setup, self.zero = tensors, setup, zero
        self.groups = _build_flat_groups(tensors, setup)
        self.group_of = {tensor.index: group for group in self.groups for tensor in group.tensors}
        self.dtype = config.model_dtype
        self.offload = setup.offloads_optimizer
        self.accumulates = setup.accumulates and setup.stage == 2
        self.contiguous = zero.contiguous_gradients or self.offload
        # _use_compact_grad_partition_buffer: sums in fp32 of gradients in 16 bit, in one flat buffer per group.
        self.compact = config.grad_accum_dtype == "fp32" and self.dtype != "fp32"
        # Stage 1 keeps gradients in another type as `param.grad_accum`.
        self.as_attribute = setup.stage == 1 and config.grad_accum_dtype != self.dtype
        self.reduced_dtype: Dtype = config.grad_accum_dtype if self.as_attribute else self.dtype
        self.communication_dtype = config.communication_data_type
        self.casts = self.communication_dtype != self.reduced_dtype
        self.tracker = PeakTracker()
        self.bucket: list[ParameterTensor] = []
        self.bucket_elements = self.bucket_bytes = self.partition_bytes = 0
        self.has_compact: set[int] = set()
        """Groups by identity whose compact buffer exists."""
        self.own: dict[int, int] = {}
        """Bytes of gradients that have a storage, by index of the parameter."""
        self.reduced_before: list[ParameterTensor] = []
        """Other ranks' gradients that the next reduction frees: overlap_comm without contiguous gradients."""
        self.accumulated = self.accumulates and not self.compact and not self.offload
        """True when the sums of earlier micro-steps are in a buffer of their own."""
        # Earlier micro-steps leave gradients and the bucket at stage 1, partitions at stage 2.
        if setup.accumulates and setup.stage == 1:
            self.own = {t.index: tensor_bytes(t.elements, self.reduced_dtype) for t in tensors.trainable}
            self.tracker.allocate("gradients", sum(self.own.values()))
            self._setup_buckets()
        elif self.accumulated:
            self.tracker.allocate("gradients", self._own_gradient_bytes())
        elif self.accumulates:
            self._make_compact(tensors.trainable)

    def _own_gradient_bytes(self) -> int:
        """Return the bytes of the uncut gradients of all parameters of which rank 0 owns a part."""
        sizes = [tensor.elements for group in self.groups for tensor in group.own_tensors]
        if self.contiguous:
            return tensor_bytes(sum(sizes), self.dtype)
        return sum(tensor_bytes(elements, self.dtype) for elements in sizes)

    def _setup_buckets(self) -> None:
        """setup_buckets: one bucket, two with overlap_comm."""
        if self.contiguous and not self.bucket_bytes:
            self.bucket_bytes = tensor_bytes(self.zero.reduce_bucket_size, self.reduced_dtype)
            self.bucket_bytes *= 2 if self.zero.overlap_comm else 1
            self.tracker.allocate("buckets", self.bucket_bytes)

    def take(self, tensor: ParameterTensor) -> None:
        """process_gradients: the gradient is complete, and may be added to an earlier one or cast."""
        self._setup_buckets()
        kept = tensor_bytes(tensor.elements, self.reduced_dtype)
        if self.as_attribute:
            self.tracker.allocate("gradients", kept)
            self.tracker.free("gradients", tensor_bytes(tensor.elements, self.dtype))
        if tensor.index in self.own:
            self.tracker.free("gradients", kept)
        self.own[tensor.index] = kept
        if self.setup.stage == 2 or self.zero.overlap_comm:
            self._reduce(tensor)

    def _reduce(self, tensor: ParameterTensor) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: copy into the bucket, which is reduced first when full.

        A parameter larger than the bucket is reduced in place.
        """
        if self.bucket_elements + tensor.elements > self.zero.reduce_bucket_size:
            self._flush()
        if self.contiguous:
            if tensor.elements <= self.zero.reduce_bucket_size:
                self.tracker.free("gradients", self.own.pop(tensor.index))
            elif self.offload:
                self.tracker.allocate_briefly("gradients", self.own[tensor.index])  # replaced by a clone
        self.bucket.append(tensor)
        self.bucket_elements += tensor.elements

    def _flush(self) -> None:
        """reduce_ipg_grads."""
        if not self.bucket:
            return
        parts = [part for tensor in self.bucket for part in self.group_of[tensor.index].parts(tensor)]
        elements, needs_copy = self.bucket_elements, len(self.bucket) > 1
        if not self.contiguous:  # buffered_reduce_fallback: all gradients in a flat tensor
            self._free_reduced_before()
        elif not self.zero.reduce_scatter:  # gradient_reduction_w_predivide: the bucket itself
            needs_copy = False
        else:
            # average_tensor and allreduce_and_scatter: neighbouring parts of one owner are one slice. Slices go
            # together up to the bucket's size, those of one owner without use_multi_rank_bucket_allreduce.
            self._make_compact(self.bucket)
            elements, needs_copy = self._largest_chunk(parts)
        # allreduce_bucket: copy into a flat tensor, cast for the communication, add rank 0's parts to its sums.
        flat = tensor_bytes(elements, self.reduced_dtype) if needs_copy else 0
        cast = tensor_bytes(elements, self.communication_dtype) if self.casts else 0
        self.tracker.allocate("buckets", flat + cast)
        if self.casts:
            self.tracker.free("buckets", flat)
        self._make_compact(self.bucket)
        if self.compact and self.communication_dtype != "fp32":
            own = max((part.length for part in parts if part.rank == 0), default=0)
            self.tracker.allocate_briefly("temporaries", tensor_bytes(own, "fp32"))
        self.tracker.free("buckets", cast if self.casts else flat)
        for tensor in self.bucket:
            self._release(tensor)
        self.bucket, self.bucket_elements = [], 0

    def _largest_chunk(self, parts: list[Part]) -> tuple[int, bool]:
        """Return the elements of the largest chunk that needs a flat tensor, or else of the largest; True if one does.

        A chunk of a single slice needs no flat tensor.
        """
        slices: list[tuple[int, int]] = []
        for part in parts:
            merges = slices and slices[-1][0] == part.rank and not (self.compact and part.rank == 0)
            slices.append((part.rank, part.length + (slices.pop()[1] if merges else 0)))
        together = [[length for _, length in slices]]
        if not self.zero.use_multi_rank_bucket_allreduce:
            owners = {rank for rank, _ in slices}
            together = [[length for rank, length in slices if rank == owner] for owner in owners]
        chunks: list[tuple[bool, int]] = []
        for lengths in together:
            count = elements = 0
            for length in lengths:
                count, elements = count + 1, elements + length
                if elements > self.zero.reduce_bucket_size:
                    chunks.append((count > 1, elements))
                    count = elements = 0
            chunks.append((count > 1, elements))
        needs_copy, largest = max(chunks)
        return largest, needs_copy

    def _make_compact(self, tensors: Sequence[ParameterTensor]) -> None:
        """_build_compact_grad_partition_buffer: at a group's first gradient of which rank 0 owns a part."""
        for tensor in tensors if self.compact else ():
            group = self.group_of[tensor.index]
            if id(group) not in self.has_compact and group.own_elements(tensor):
                self.has_compact.add(id(group))
                self.tracker.allocate("gradients", tensor_bytes(group.partition, "fp32"))

    def _release(self, tensor: ParameterTensor) -> None:
        """Free a reduced gradient, unless it stays until the end of the backward pass."""
        own_elements = self.group_of[tensor.index].own_elements(tensor)
        if own_elements and self.contiguous:
            if self.offload:
                if not self.is_last:  # freed by the epilogue
                    return
                # The norm's fp64 copy, then an fp32 copy on its way to the host.
                self.tracker.allocate_briefly("temporaries", tensor_bytes(2 * own_elements, "fp32"))
            elif not self.compact:
                if not self.partition_bytes:  # copy_grads_in_partition
                    self.partition_bytes = self._own_gradient_bytes()
                    self.tracker.allocate("gradients", self.partition_bytes)
            elif not self.as_attribute:
                return
        elif own_elements or self.setup.stage == 1:
            return
        elif self.zero.overlap_comm and not self.contiguous:
            self.reduced_before.append(tensor)
            return
        self.tracker.free("gradients", self.own.pop(tensor.index, 0))

    def _free_reduced_before(self) -> None:
        """_clear_previous_reduced_grads."""
        for tensor in self.reduced_before:
            self.tracker.free("gradients", self.own.pop(tensor.index, 0))
        self.reduced_before = []

    def end(self) -> None:
        """reduce_gradients and independent_gradient_partition_epilogue."""
        if self.setup.stage == 1 and not self.zero.overlap_comm:
            for _, members in self.setup.groups(self.tensors):
                for tensor in members:
                    self._reduce(tensor)
        self._flush()
        self._free_reduced_before()
        if not self.compact and not self.offload:  # get_all_grad_tensors: rank 0's gradients, added to earlier ones
            kept = self.partition_bytes
            if not self.contiguous:
                kept = sum(self.own.pop(t.index, 0) for group in self.groups for t in group.own_tensors)
            self.tracker.free("gradients", kept if self.accumulated else 0)
        others = (t.elements for group in self.groups for t in group.tensors if not group.own_elements(t))
        if self.as_attribute and any(elements <= self.zero.reduce_bucket_size for elements in others):
            return  # other ranks' gradients still are views of the bucket
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        """Free all gradients, and the bucket with the last one that is a view of it."""
        self.tracker.free("buckets", self.bucket_bytes)
        self.tracker.free("gradients", sum(self.own.values()))
        self.bucket_bytes = 0
        self.own.clear()

    def step(self) -> Breakdown:
        """step: the norm, then group by group flattening, the fp32 copy of the gradients and the update."""
        tracker = self.tracker
        tracker.take_peak()
        for group in self.groups if not self.offload else ():
            norm = 2 * max((group.own_elements(tensor) for tensor in group.own_tensors), default=0)
            tracker.allocate_briefly("temporaries", tensor_bytes(norm, "fp32"))
        for position, group in enumerate(self.groups):
            if position == len(self.groups) - 1 and not self.offload:
                self._clear_gradients()
            flat = 0 if self.compact or self.offload else tensor_bytes(group.partition, self.dtype)
            cast = 0 if not flat or self.dtype == "fp32" else tensor_bytes(group.partition, "fp32")
            tracker.allocate_briefly("temporaries", flat + cast)
            # The cast replaces the flat tensor.
            update = group.orthogonalising_bytes(from_host=self.offload)
            tracker.allocate_briefly("temporaries", (cast or flat) + update)
        return tracker.take_peak().breakdown

    def host_bytes(self) -> int:
        """Return rank 0's host memory: master weights, gradients, new parameters, states, the largest parameter.

        At stage 2 the sums of gradients too, for each parameter of which the rank owns a part.
        """
        host = HostMemory(self.zero.offload_optimizer.pin_memory)
        for group in self.groups:
            host.pinned(group.partition, "fp32")
            host.pinned(group.partition, "fp32")
            host.pinned(group.partition, self.dtype)
            host.pageable(len(group.optimizer.states) * group.partition, "fp32")
            if self.setup.stage == 2 and self.setup.accumulates and not self.compact:
                for tensor in group.own_tensors:
                    host.pinned(tensor.elements, self.dtype)
        host.pinned(max(tensor.elements for tensor in self.tensors.trainable), self.dtype)
        return host.num_bytes
