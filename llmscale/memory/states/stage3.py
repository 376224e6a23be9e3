"""Stage 3: parameters, gradients and optimizer states are partitioned, and parameters gathered for use. No torch.

Follows deepspeed/runtime/zero/stage3.py, DeepSpeedZeroOptimizer_Stage3, on rank 0, and deepspeed/runtime/swap_tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from llmscale.architecture.layers import ParameterTensor, ParameterTensors
from llmscale.config.optimizers import OptimizerGroup, Part
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.states.stage3_gathers import (
    Gathers,
    allocates_gathered,
    follow_gathers,
    padded_elements,
    persistent_parameters,
    second_copies,
    shard_elements,
)
from llmscale.memory.states.state_memory import (
    BYTES_PER_ELEMENT,
    BackwardInterval,
    HostMemory,
    PeakTracker,
    StateMemory,
    ZeroSetup,
    follow_backward,
    orthogonalising_bytes,
    state_tensor_bytes,
    tensor_bytes,
)

#: Elements of one piece of a gradient's norm under offload (_constant_buffered_norm2).
_NORM_ELEMENTS = 250_000_000

#: Smaller optimizer sub-groups stay in host memory (swap_tensor/utils.py, MIN_AIO_BYTES).
_SMALLEST_SWAP_BYTES = 2**20


def estimate_stage3(tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool) -> StateMemory:
    """Estimate stage 3. `recomputes`: blocks run forward again, and are gathered again, in the backward pass."""
    passes, moments = tensors.architecture.n_layer + 3, follow_gathers(tensors, setup, recomputes)
    persistent = persistent_parameters(tensors.all, setup)
    copies = second_copies(tensors.all, setup)
    # Copies that hpZ has made in earlier micro-steps.
    held = sum(copies[index] for index in copies.keys() - persistent) if setup.accumulates else 0
    gathered = [(moment.live_bytes + held, moment.peak_bytes + held) for moment in moments[passes:]]
    sub_groups = _build_sub_groups(tensors, setup)
    frozen = [shard_elements(tensor, setup) for tensor in tensors.frozen_tensors]
    persistent_bytes = 0
    if allocates_gathered(setup):
        padded = (padded_elements(tensor, setup) for tensor in persistent.values())
        persistent_bytes = sum(tensor_bytes(elements, setup.config.model_dtype) for elements in padded)
    return StateMemory(
        resident=_resident(sub_groups, frozen, setup, persistent_bytes),
        forward=tuple(Breakdown(parameters_bytes=moment.peak_bytes + held) for moment in moments[:passes]),
        backward=_Reduction(setup).follow(tensors, gathered),
        step=_step(sub_groups, setup, persistent_bytes, sum(copies.values())),
        host_bytes=_host_bytes(sub_groups, frozen, setup),
        nvme_bytes=_nvme_bytes(sub_groups, setup),
    )


def count_gathers(tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool) -> tuple[Gathers, Gathers]:
    """Return the all-gathers of a micro-step's forward and backward pass, without persistent parameters."""
    moments = follow_gathers(tensors, setup, recomputes)
    forward = moments[tensors.architecture.n_layer + 3]
    return forward, moments[-1].plus(forward, -1)


class _Reduction:
    """Gradients on their way through the bucket into the sums of the shards."""

    def __init__(self, setup: ZeroSetup) -> None:
        self.setup, self.zero = setup, setup.zero
        self.dtype, self.sum_dtype = setup.config.model_dtype, setup.config.grad_accum_dtype
        self.communication = setup.config.communication_data_type
        self.tracker = PeakTracker()
        self.bucket: list[ParameterTensor] = []
        self.bucket_elements = self.unbucketed_bytes = self.unbucketed_casts = 0

    def follow(self, tensors: ParameterTensors, gathered: Sequence[tuple[int, int]]) -> tuple[BackwardInterval, ...]:
        """Run the backward pass beside the gathered parameters of each interval."""
        return follow_backward(tensors, self.tracker, self.dtype, self._take, self._flush, gathered)

    def _take(self, tensor: ParameterTensor) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: copy into the bucket, which is reduced first when full."""
        size, gradient = self.zero.reduce_bucket_size, tensor_bytes(tensor.elements, self.dtype)
        if self.bucket_elements + tensor.elements > size:
            self._flush()
        if self.zero.contiguous_gradients and self.bucket_elements + tensor.elements <= size:
            self.tracker.free("gradients", gradient)
        else:
            self.unbucketed_bytes += gradient
            if self.communication != self.dtype:
                self.unbucketed_casts += tensor_bytes(tensor.elements, self.communication)
        self.bucket.append(tensor)
        self.bucket_elements += tensor.elements

    def _flush(self) -> None:
        """__reduce_and_partition_ipg_grads."""
        if not self.bucket:
            return
        fits = self.zero.contiguous_gradients and self.bucket_elements <= self.zero.reduce_bucket_size
        if fits and not self.zero.reduce_scatter:
            # __avg_scatter_contiguous_grads: copies of the bucket, scaled and in the type of the sums.
            scaled = tensor_bytes(self.bucket_elements, self.communication) if self.setup.shard_ranks > 1 else 0
            cast = tensor_bytes(self.bucket_elements, self.sum_dtype) if self.communication != self.sum_dtype else 0
            self.tracker.allocate_briefly("buckets", scaled + cast)
        else:
            self._reduce_scatter()
        self.tracker.free("gradients", self.unbucketed_bytes)
        self.bucket, self.bucket_elements, self.unbucketed_bytes, self.unbucketed_casts = [], 0, 0, 0

    def _reduce_scatter(self) -> None:
        """__avg_scatter_grads and reduce_scatter_coalesced: padded pieces of all gradients in one flat tensor.

        A single gradient that divides evenly needs no flat tensor. Each piece is cast to the type of the sums.
        """
        tracker, shards = self.tracker, [shard_elements(tensor, self.setup) for tensor in self.bucket]
        padded = sum(padded_elements(tensor, self.setup) for tensor in self.bucket)
        needs_copy = len(shards) > 1 or self.bucket[0].elements != padded
        flat = tensor_bytes(padded, self.communication) if needs_copy else 0
        flat += self.unbucketed_casts
        tracker.allocate("buckets", flat)
        if self.communication != self.sum_dtype:
            pieces = sum(tensor_bytes(shard, self.sum_dtype) for shard in shards)
            tracker.allocate("buckets", pieces)
            tracker.free("buckets", flat)
            flat = pieces
        if self.setup.offloads_optimizer:
            # partition_grads: the sum of a parameter's gradient visits the GPU, where its norm is taken in fp64.
            norm = tensor_bytes(2 * min(max(shards), _NORM_ELEMENTS), "fp32")
            cast = tensor_bytes(max(shards), "fp32") if self.sum_dtype != "fp32" else 0
            tracker.allocate_briefly("temporaries", tensor_bytes(max(shards), self.sum_dtype) + max(norm, cast))
        tracker.free("buckets", flat)


@dataclass(frozen=True)
class _SubGroup:
    """Parameters of one group that are stepped together."""

    group_index: int
    group: OptimizerGroup
    tensors: tuple[ParameterTensor, ...]
    shards: tuple[int, ...]
    """Elements that a rank has of each parameter."""

    @cached_property
    def elements(self) -> int:
        return sum(self.shards)

    @property
    def is_swapped(self) -> bool:
        """OptimizerSwapper.is_swappable_tensor."""
        return self.elements * BYTES_PER_ELEMENT["fp32"] >= _SMALLEST_SWAP_BYTES

    def orthogonalising_bytes(self, setup: ZeroSetup) -> int:
        """Return what Muon's step of this sub-group takes beside its states."""
        from_host, own = setup.offloads_optimizer, zip(self.tensors, self.shards, strict=True)
        parts = (_parts(tensor.elements, shard, setup.ranks_of(tensor)) for tensor, shard in own)
        return orthogonalising_bytes(self.group, zip(self.tensors, parts, strict=True), from_host=from_host)


@lru_cache(maxsize=256)
def _parts(elements: int, shard: int, ranks: int) -> tuple[Part, ...]:
    """Cut a parameter into equal parts; the last one may be shorter, or empty."""
    holders = range(min(ranks, -(-elements // shard)))
    return tuple(Part(rank, rank * shard, min(shard, elements - rank * shard)) for rank in holders)


def _build_sub_groups(tensors: ParameterTensors, setup: ZeroSetup) -> list[_SubGroup]:
    """Close a sub-group when a rank's part of it has reached `sub_group_size` (_create_fp16_sub_groups)."""
    found: list[_SubGroup] = []
    for index, (group, members) in enumerate(setup.groups(tensors)):
        begin = total = 0
        shards = [shard_elements(tensor, setup) for tensor in members]
        for end, shard in enumerate(shards, start=1):
            total += shard
            if total >= setup.zero.sub_group_size or end == len(members):
                found.append(_SubGroup(index, group, tuple(members[begin:end]), tuple(shards[begin:end])))
                begin, total = end, 0
    return found


def _resident(
    sub_groups: Sequence[_SubGroup], frozen: Sequence[int], setup: ZeroSetup, persistent_bytes: int
) -> Breakdown:
    """Return the shards, persistent parameters, sums of gradients, master weights (even of fp32), states, bucket.

    frozen: elements of the shards of frozen parameters, which have tensors of their own.
    """
    config, zero = setup.config, setup.zero
    sizes = [sub_group.elements for sub_group in sub_groups]
    optimizer = gradients = 0
    if not setup.offloads_optimizer:
        states = (state_tensor_bytes(sub_group.group, sub_group.elements) for sub_group in sub_groups)
        optimizer = sum(states) + sum(tensor_bytes(elements, "fp32") for elements in sizes)
        gradients = tensor_bytes(sum(sizes), config.grad_accum_dtype)
    shards = 0
    if zero.offload_param.device == "none":
        shards = sum(tensor_bytes(elements, config.model_dtype) for elements in (sum(sizes), *frozen))
    bucket = tensor_bytes(zero.reduce_bucket_size, config.communication_data_type) if zero.contiguous_gradients else 0
    return Breakdown(
        parameters_bytes=shards + persistent_bytes,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        buckets_bytes=bucket,
    )


def _step(sub_groups: Sequence[_SubGroup], setup: ZeroSetup, persistent_bytes: int, copies_bytes: int) -> Breakdown:
    """Return the peak of `step`: the norm in fp64, then each sub-group's flattened gradients and their fp32 copy.

    Persistent parameters are released until the end of the step, when hpZ's copies are freed. In fp16 the check for
    overflows copies all gradients.
    """
    tracker, sum_dtype, offload = PeakTracker(), setup.config.grad_accum_dtype, setup.offloads_optimizer
    if not offload:
        tracker.free("parameters", persistent_bytes)
        tracker.allocate("parameters", copies_bytes)
        everything = sum(sub_group.elements for sub_group in sub_groups)
        overflow = tensor_bytes(everything, sum_dtype) + tensor_bytes(everything, "fp16") // 2
        norm = tensor_bytes(2 * max(shard for sub_group in sub_groups for shard in sub_group.shards), "fp32")
        tracker.allocate_briefly("temporaries", max(norm, overflow if setup.config.precision == "fp16" else 0))
    for sub_group in sub_groups:
        update = sub_group.orthogonalising_bytes(setup)
        if not offload:
            update += tensor_bytes(sub_group.elements, sum_dtype) if len(sub_group.shards) > 1 else 0
            update += tensor_bytes(sub_group.elements, "fp32") if sum_dtype != "fp32" else 0
        tracker.allocate_briefly("temporaries", update)
    return tracker.take_peak().breakdown


def _host_bytes(sub_groups: Sequence[_SubGroup], frozen: Sequence[int], setup: ZeroSetup) -> int:
    """Return one rank's host memory."""
    states, parameters, dtype = setup.zero.offload_optimizer, setup.zero.offload_param, setup.config.model_dtype
    host = HostMemory(pin_memory=True)
    rooms, on_disk = _split_host_and_disk(sub_groups, setup)
    if parameters.device != "none":
        # _create_param_groups_fp16_flat_cpu_memory: page-locked, whatever the config says.
        for elements in rooms.values():
            host.pinned(elements, dtype)
    if parameters.device == "nvme":
        # AsyncPartitionedParameterSwapper: its buffers, and room for the largest sub-group on disk.
        host.pageable(parameters.buffer_count * parameters.buffer_size + max(on_disk, default=0), dtype)
    host.pin_memory = parameters.pin_memory
    for elements in frozen if parameters.device != "none" else ():
        host.pinned(elements, dtype)
    host.pin_memory = states.pin_memory
    if states.device != "none":
        # grad_partitions_flat_buffer in _setup_for_real_optimizer.
        host.pinned(sum(sub_group.elements for sub_group in sub_groups), setup.config.grad_accum_dtype)
    if states.device == "nvme":
        # SwapBufferManager of the OptimizerSwapper.
        host.pageable(states.buffer_count * max(sub_group.elements for sub_group in sub_groups), "fp32")
    for sub_group in sub_groups:
        # _create_fp32_partitions and initialize_optimizer_states.
        if states.device == "cpu" or (states.device == "nvme" and not sub_group.is_swapped):
            host.pageable((1 + len(sub_group.group.states)) * sub_group.elements, "fp32")
            host.pinned(sub_group.elements, "fp32")
    return host.num_bytes


def _nvme_bytes(sub_groups: Sequence[_SubGroup], setup: ZeroSetup) -> int:
    """Return one rank's bytes in files: the optimizer's with the gradient, which the step reads too."""
    swapped = [sub_group for sub_group in sub_groups if sub_group.is_swapped]
    states = sum((group.group.state_bytes + BYTES_PER_ELEMENT["fp32"]) * group.elements for group in swapped)
    on_disk = sum(_split_host_and_disk(sub_groups, setup)[1]) * BYTES_PER_ELEMENT[setup.config.model_dtype]
    in_files = setup.zero.offload_optimizer.device == "nvme", setup.zero.offload_param.device == "nvme"
    return in_files[0] * states + in_files[1] * on_disk


def _split_host_and_disk(sub_groups: Sequence[_SubGroup], setup: ZeroSetup) -> tuple[dict[int, int], list[int]]:
    """Return the elements of each group with room in host memory, and those of each sub-group beyond it.

    Groups share `max_in_cpu` in their order (_create_fp16_partitions_with_defragmentation).
    """
    left, rooms, on_disk = setup.zero.offload_param.max_in_cpu, {}, []
    for index in sorted({sub_group.group_index for sub_group in sub_groups}):
        sizes = [sub_group.elements for sub_group in sub_groups if sub_group.group_index == index]
        in_host = setup.zero.offload_param.device == "cpu"
        rooms[index] = sum(sizes) if in_host else max(0, min(sum(sizes), left))
        left -= sum(sizes)
        on_disk += [size for size, end in zip(sizes, accumulate(sizes), strict=True) if end > rooms[index]]
    return rooms, on_disk
