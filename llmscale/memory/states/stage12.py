"""Stages 1 and 2: flat groups of parameters whose optimizer states (and gradients) are partitioned. No torch.

Follows deepspeed/runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer, on rank 0; methods of the walk name its
functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llmscale.architecture.layers import ParameterTensor, ParameterTensors
from llmscale.config.deepspeed.schema import Dtype
from llmscale.memory.activations.backward_timeline import follow_backward
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.category_peak import Tally
from llmscale.memory.states.flat_groups import FlatGroup, build_flat_groups
from llmscale.memory.states.state_memory import BackwardMoment, HostMemory, StateMemory, fuller
from llmscale.memory.zero_settings import ZeroSetup, tensor_bytes


def estimate_stage12(tensors: ParameterTensors, setup: ZeroSetup) -> StateMemory:
    """DeepSpeedZeroOptimizer with partition_grads false (stage 1) or true (stage 2)."""
    walk = _Walk(tensors, setup)
    courses: list[tuple[BackwardMoment, ...]] = []
    forward = walk.tally.now
    # What the second micro-step adds to, every later one adds to as well.
    micro_steps = min(setup.config.gradient_accumulation_steps, 2)
    for micro_step in range(micro_steps):
        walk.begin(boundary=micro_step == micro_steps - 1)
        forward = walk.tally.now
        course = follow_backward(
            tensors,
            walk.tally,
            dtype=walk.dtype,
            hook=walk.hook,
            end=walk.end,
        )
        courses.append(course)
    return StateMemory(
        resident=_resident(tensors, walk.groups, setup),
        forward_course=(forward,) * (tensors.architecture.n_layer + 3),
        # Gradients larger than a bucket, when offloaded, leave the GPU earlier in the last micro-step.
        backward_course=tuple(fuller(moments) for moments in zip(*courses, strict=True)),
        step=walk.step(),
        host_bytes=_host(tensors, walk.groups, setup).num_bytes,
    )


def _resident(tensors: ParameterTensors, groups: tuple[FlatGroup, ...], setup: ZeroSetup) -> Breakdown:
    """The flat parameters; of each group's partition an fp32 copy, even of fp32, and the optimizer's states."""
    parameters = sum(tensor_bytes(group.elements, setup.config.model_dtype) for group in groups)
    if setup.zero.offload_optimizer.device != "none":
        # temp_grad_buffer_for_gpu_offload: as large as the largest parameter.
        largest = max(tensor.elements for tensor in tensors.all)
        return Breakdown(parameters_bytes=parameters, buckets_bytes=tensor_bytes(largest, setup.config.model_dtype))
    return Breakdown(parameters_bytes=parameters, optimizer_bytes=sum(group.state_bytes for group in groups))


def _host(tensors: ParameterTensors, groups: tuple[FlatGroup, ...], setup: ZeroSetup) -> HostMemory:
    """With offload: master weights, their gradients and a buffer for the new parameters (pinned), its states (not),
    a buffer of the largest parameter and, for stage 2 to accumulate in, each parameter that this rank has a part of."""
    host = HostMemory(setup.zero.offload_optimizer.pin_memory)
    if setup.zero.offload_optimizer.device == "none":
        return host
    for group in groups:
        host.pinned(group.partition, "fp32")
        host.pinned(group.partition, "fp32")
        host.pinned(group.partition, setup.config.model_dtype)
        host.pageable(len(group.optimizer.states) * group.partition, "fp32")
    host.pinned(max(tensor.elements for tensor in tensors.all), setup.config.model_dtype)
    if setup.stage == 2 and setup.accumulates and not _is_compact(setup):
        for group in groups:
            for tensor in group.tensors:
                if tensor.index in group.local:
                    host.pinned(tensor.elements, setup.config.model_dtype)
    return host


def _is_compact(setup: ZeroSetup) -> bool:
    """_use_compact_grad_partition_buffer: sums in fp32 of gradients in 16 bit lie in one flat buffer per group."""
    return setup.config.grad_accum_dtype == "fp32" and setup.config.model_dtype != "fp32"


@dataclass
class _Walk:
    """One optimizer step, allocation by allocation: what is alive beyond the resident memory."""

    tensors: ParameterTensors
    setup: ZeroSetup
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        setup = self.setup
        self.groups = build_flat_groups(self.tensors, setup)
        self.group_of = {tensor.index: group for group in self.groups for tensor in group.tensors}
        self.dtype = setup.config.model_dtype
        self.offload = setup.zero.offload_optimizer.device != "none"
        self.contiguous = setup.zero.contiguous_gradients or self.offload
        self.compact = _is_compact(setup)
        # Stage 1 with gradients in another type keeps them as `param.grad_accum`.
        self.as_attribute = setup.stage == 1 and setup.config.grad_accum_dtype != self.dtype
        self.reduced_dtype: Dtype = setup.config.grad_accum_dtype if self.as_attribute else self.dtype
        self.communication_dtype = setup.config.communication_data_type
        self.bucket_bytes = 0
        self.partition_bytes = 0
        self.micro_step = -1
        self.compact_groups: set[int] = set()
        self.pieces: dict[int, list[tuple[int, int, bool]]] = {}
        """Of each parameter, from the first micro-step on."""
        self.own: dict[int, int] = {}
        """Bytes of gradients in storages of their own."""
        self.accumulated_bytes = 0
        self.reduced_before: list[ParameterTensor] = []
        """Of other ranks, with overlap_comm and without contiguous gradients: they go with the next reduction."""

    def begin(self, boundary: bool) -> None:
        """A micro-step begins."""
        self.boundary = boundary
        self.micro_step += 1
        self.bucket: list[ParameterTensor] = []
        self.bucket_elements = 0

    def _setup_buckets(self) -> None:
        """setup_buckets: one whole bucket, two with overlap_comm. At stage 1 it stays from the first micro-step to the
        end of the last backward pass."""
        if self.contiguous and not self.bucket_bytes:
            count = 2 if self.setup.zero.overlap_comm else 1
            self.bucket_bytes = count * tensor_bytes(self.setup.zero.reduce_bucket_size, self.reduced_dtype)
            self.tally.hold("buckets", self.bucket_bytes)

    def hook(self, tensor: ParameterTensor) -> None:
        """process_gradients: the gradient is complete."""
        self._setup_buckets()
        self._settle(tensor)
        if self.setup.stage == 2 or (self.setup.zero.overlap_comm and self.boundary):
            self._reduce(tensor)

    def _settle(self, tensor: ParameterTensor) -> None:
        """Where the gradient lies: its own storage, that of the micro-steps before, or the sum in another type."""
        mine = tensor_bytes(tensor.elements, self.dtype)
        if not self.as_attribute:
            if tensor.index in self.own:
                self.tally.drop("gradients", mine)
            self.own[tensor.index] = mine
            return
        wider = tensor_bytes(tensor.elements, self.reduced_dtype)
        if tensor.index in self.own:
            self.tally.touch("gradients", wider)
        else:
            self.tally.hold("gradients", wider)
            self.own[tensor.index] = wider
        self.tally.drop("gradients", mine)

    def _reduce(self, tensor: ParameterTensor) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: into the bucket, which is reduced first when it is full. A
        parameter larger than the bucket is reduced where it lies."""
        size = self.setup.zero.reduce_bucket_size
        if self.bucket_elements + tensor.elements > size:
            self._flush()
        if self.contiguous:
            if tensor.elements <= size:
                self.tally.drop("gradients", self.own.pop(tensor.index))
            elif self.offload:
                self.tally.touch("gradients", self.own[tensor.index])  # a clone takes its place
        self.bucket.append(tensor)
        self.bucket_elements += tensor.elements

    def _flush(self) -> None:
        """reduce_ipg_grads."""
        if not self.bucket:
            return
        if not self.contiguous:
            self._allreduce_gradients()
        elif self.setup.zero.reduce_scatter:
            self._make_compact()
            self._average()
        else:
            self._make_compact()
            self._allreduce_whole()
        for tensor in self.bucket:
            self._release(tensor)
        self.bucket, self.bucket_elements = [], 0

    def _allreduce_whole(self) -> None:
        """gradient_reduction_w_predivide: the bucket as it is, or cast to the type of the communication."""
        other = self.communication_dtype != self.reduced_dtype
        cast = tensor_bytes(self.bucket_elements, self.communication_dtype) if other else 0
        self.tally.hold("buckets", cast)
        self._add_to_compact([piece for tensor in self.bucket for piece in self._pieces(tensor)])
        self.tally.drop("buckets", cast)

    def _allreduce_gradients(self) -> None:
        """buffered_reduce_fallback and _buffered_reduce_fallback_preserving_fp32: of gradients that lie where autograd
        has put them, whole, and in a flat tensor together."""
        self._release_reduced_before()
        pieces = [piece for tensor in self.bucket for piece in self._pieces(tensor)]
        self._allreduce_copy(self.bucket_elements, pieces, is_single=len(self.bucket) == 1)

    def _release_reduced_before(self) -> None:
        """_clear_previous_reduced_grads."""
        for tensor in self.reduced_before:
            self.tally.drop("gradients", self.own.pop(tensor.index, 0))
        self.reduced_before = []

    def _pieces(self, tensor: ParameterTensor) -> list[tuple[int, int, bool]]:
        """(owner, elements, whether they are added to rank 0's fp32 sums)."""
        found = self.pieces.get(tensor.index)
        if found is None:
            pieces = self.group_of[tensor.index].pieces(tensor)
            found = self.pieces[tensor.index] = [(rank, length, self.compact and rank == 0) for rank, length in pieces]
        return found

    def _average(self) -> None:
        """average_tensor: neighbouring pieces of one owner are one slice; all slices, or all of one owner without
        use_multi_rank_bucket_allreduce, are copied into a flat tensor, which one slice alone does not need."""
        slices: list[tuple[int, int, bool]] = []
        for tensor in self.bucket:
            for rank, length, is_summed in self._pieces(tensor):
                if slices and not is_summed and slices[-1][0] == rank and not slices[-1][2]:
                    slices[-1] = (rank, slices[-1][1] + length, False)
                else:
                    slices.append((rank, length, is_summed))
        if self.setup.zero.use_multi_rank_bucket_allreduce:
            self._allreduce(slices)
            return
        for owner in sorted({rank for rank, _, _ in slices}):
            self._allreduce([piece for piece in slices if piece[0] == owner])

    def _allreduce(self, slices: list[tuple[int, int, bool]]) -> None:
        """allreduce_and_scatter and allreduce_bucket."""
        chunk: list[tuple[int, int, bool]] = []
        elements = 0
        for position, piece in enumerate(slices):
            chunk.append(piece)
            elements += piece[1]
            if elements <= self.setup.zero.reduce_bucket_size and position < len(slices) - 1:
                continue
            self._allreduce_copy(elements, chunk, is_single=len(chunk) == 1)
            chunk, elements = [], 0

    def _allreduce_copy(self, elements: int, slices: list[tuple[int, int, bool]], *, is_single: bool) -> None:
        """allreduce_bucket: of tensors together in a flat one, and in one of the type of the communication; then what
        of it is added to the sums."""
        flat = 0 if is_single else tensor_bytes(elements, self.reduced_dtype)
        other = self.communication_dtype != self.reduced_dtype
        cast = tensor_bytes(elements, self.communication_dtype) if other else 0
        self.tally.hold("buckets", flat + cast)
        if other:
            self.tally.drop("buckets", flat)
        self._make_compact()
        self._add_to_compact(slices)
        self.tally.drop("buckets", cast if other else flat)

    def _make_compact(self) -> None:
        """_build_compact_grad_partition_buffer: at the first gradient of a group of which this rank owns a part."""
        for tensor in self.bucket if self.compact else ():
            group = self.group_of[tensor.index]
            if tensor.index in group.local and id(group) not in self.compact_groups:
                self.compact_groups.add(id(group))
                self.tally.hold("gradients", tensor_bytes(group.partition, "fp32"))

    def _add_to_compact(self, slices: list[tuple[int, int, bool]]) -> None:
        """_add_to_grad_partition_buffer: an fp32 copy of each slice of one's own."""
        for _, length, is_summed in slices:
            if is_summed and self.communication_dtype != "fp32":
                self.tally.touch("temporaries", tensor_bytes(length, "fp32"))

    def _release(self, tensor: ParameterTensor) -> None:
        """What becomes of a reduced gradient: of others' parameters nothing (at stage 1 it stays where it is)."""
        is_local = tensor.index in self.group_of[tensor.index].local
        if is_local and self.contiguous:
            if self.offload:
                self._to_host(tensor)
                if not self.boundary:  # cleared only by the epilogue
                    return
            elif not self.compact:
                self._make_grads_in_partition()
            elif not self.as_attribute:
                return
        elif is_local or self.setup.stage == 1:
            return
        elif self.setup.zero.overlap_comm and not self.contiguous:
            self.reduced_before.append(tensor)
            return
        self.tally.drop("gradients", self.own.pop(tensor.index, 0))

    def _make_grads_in_partition(self) -> None:
        """copy_grads_in_partition: a buffer for every parameter of which this rank owns a part, whole."""
        if not self.partition_bytes:
            elements = sum(
                tensor.elements for group in self.groups for tensor in group.tensors if tensor.index in group.local
            )
            self.partition_bytes = tensor_bytes(elements, self.dtype)
            self.tally.hold("gradients", self.partition_bytes)

    def _to_host(self, tensor: ParameterTensor) -> None:
        """The norm's fp64 copy, then an fp32 copy on its way to the host."""
        length = self.group_of[tensor.index].local[tensor.index]
        if self.boundary:
            self.tally.touch("temporaries", tensor_bytes(2 * length, "fp32"))
            if not self.compact and self.reduced_dtype != "fp32":
                self.tally.touch("temporaries", tensor_bytes(length, "fp32"))

    def end(self) -> None:
        """reduce_gradients and independent_gradient_partition_epilogue; at stage 1 in the last micro-step only."""
        if self.setup.stage == 1:
            if not self.boundary:
                return
            if not self.setup.zero.overlap_comm:
                for _, members in self.setup.optimizer.group_tensors(self.tensors.all):
                    for tensor in members:
                        self._reduce(tensor)
        self._flush()
        self._release_reduced_before()
        if not self.compact and not self.offload:
            self._keep_for_the_step()
        if not self.as_attribute or not self._has_views():
            self._clear_gradients()

    def _keep_for_the_step(self) -> None:
        """get_all_grad_tensors: one's own gradients, added to those of the first micro-step."""
        kept = self.partition_bytes
        self.partition_bytes = 0
        if not self.contiguous:
            kept = sum(self.own.pop(index, 0) for group in self.groups for index in group.local)
        if self.accumulated_bytes:
            self.tally.drop("gradients", kept)
        else:
            self.accumulated_bytes = kept

    def _has_views(self) -> bool:
        """Whether other ranks' gradients still are views of the bucket."""
        return any(
            tensor.index not in group.local and tensor.elements <= self.setup.zero.reduce_bucket_size
            for group in self.groups
            for tensor in group.tensors
        )

    def _clear_gradients(self) -> None:
        """The bucket goes with the last gradient that is a view of it."""
        self.tally.drop("buckets", self.bucket_bytes)
        self.bucket_bytes = 0
        self.tally.drop("gradients", sum(self.own.values()))
        self.own.clear()

    def step(self) -> Breakdown:
        """step: the norm, then group by group flattening, the fp32 copy of the gradients and the update."""
        tally, groups = self.tally, self.groups
        if self.offload:
            for group in groups:
                tally.touch("temporaries", group.orthogonalising_bytes(from_host=True))
            return tally.take_peak()
        tally.take_peak()
        for group in groups:
            for length in group.local.values():
                tally.touch("temporaries", tensor_bytes(2 * length, "fp32"))
        for position, group in enumerate(groups):
            if position == len(groups) - 1:
                self._clear_gradients()
            flat = 0 if self.compact else tensor_bytes(group.partition, self.dtype)
            cast = 0 if self.compact or self.dtype == "fp32" else tensor_bytes(group.partition, "fp32")
            tally.touch("temporaries", flat + cast)
            # The cast takes the flat tensor's place.
            tally.touch("temporaries", (cast or flat) + group.orthogonalising_bytes(from_host=False))
        return tally.take_peak()
