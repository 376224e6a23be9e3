"""Stage 3: parameters, gradients and optimizer states are partitioned, and parameters gathered for use. No torch.

Follows deepspeed/runtime/zero/stage3.py, DeepSpeedZeroOptimizer_Stage3, on rank 0, and deepspeed/runtime/swap_tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from llmscale.architecture.layers import ParameterTensor, ParameterTensors
from llmscale.config.deepspeed.schema import OffloadOptimizer, OffloadParam
from llmscale.config.muon import Part
from llmscale.config.optimizers import OptimizerGroup
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.category_peak import Tally
from llmscale.memory.states.muon import orthogonalising_bytes
from llmscale.memory.states.stage3_parameters import (
    Gathers,
    Stage3Parameters,
    persistent_parameters,
    second_copies,
    shard_elements,
)
from llmscale.memory.states.stage3_trace import Event, Pass, Stage3Trace
from llmscale.memory.states.state_memory import BackwardMoment, HostMemory, StateMemory
from llmscale.memory.zero_settings import (
    BYTES_PER_ELEMENT,
    ZeroSetup,
    state_tensor_bytes,
    tensor_bytes,
)

#: Elements of one piece of a gradient's norm under offload (_constant_buffered_norm2).
_NORM_ELEMENTS = 250_000_000

#: Smaller optimizer sub-groups stay in host memory (swap_tensor/utils.py, MIN_AIO_BYTES).
_SMALLEST_SWAP_BYTES = 2**20


def estimate_stage3(tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool) -> StateMemory:
    """`recomputes`: blocks run forward again in the backward pass, and so are gathered again."""
    followed = _follow(tensors, _as_the_gpu_sees_it(setup), recomputes)
    sub_groups = _build_sub_groups(tensors, setup)
    return StateMemory(
        resident=_resident(tensors, sub_groups, setup),
        forward_course=followed.forward,
        backward_course=followed.backward,
        step=_step(tensors, sub_groups, setup),
        host_bytes=_host_bytes(sub_groups, setup),
        nvme_bytes=_nvme_bytes(sub_groups, setup),
    )


def _as_the_gpu_sees_it(setup: ZeroSetup) -> ZeroSetup:
    """Return one setup for all whose micro-steps are alike: whether something is offloaded matters, not where."""
    offloads = {
        "offload_optimizer": OffloadOptimizer(
            device="none" if setup.zero.offload_optimizer.device == "none" else "cpu"
        ),
        "offload_param": OffloadParam(device="none" if setup.zero.offload_param.device == "none" else "cpu"),
    }
    zero = setup.zero.model_copy(update=offloads)
    return replace(setup, config=setup.config.model_copy(update={"zero_optimization": zero}))


def count_gathers(tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool) -> tuple[Gathers, Gathers]:
    """Of a micro-step's forward and backward pass. What stays gathered between steps is not among them."""
    followed = _follow(tensors, _as_the_gpu_sees_it(setup), recomputes)
    return followed.forward_gathers, followed.backward_gathers


@dataclass(frozen=True)
class _Followed:
    """A micro-step."""

    forward: tuple[Breakdown, ...]
    backward: tuple[BackwardMoment, ...]
    forward_gathers: Gathers
    backward_gathers: Gathers


@lru_cache(maxsize=32)
def _follow(tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool) -> _Followed:
    """The rows of one table share it."""
    walk = _Walk(tensors, setup, recomputes)
    forward = walk.forward()
    gathers = walk.parameters.gathers
    return _Followed(forward, walk.backward(), gathers, walk.parameters.gathers.plus(gathers, -1))


@lru_cache(maxsize=4)
def _trace(tensors: ParameterTensors, recomputes: bool, reuse_distance: int) -> Stage3Trace:
    """The same whatever is offloaded."""
    return Stage3Trace(tensors, recomputes, reuse_distance)


@dataclass(frozen=True)
class _SubGroup:
    """Parameters of one group that are stepped together."""

    index: int
    """Of its group."""
    group: OptimizerGroup
    tensors: tuple[ParameterTensor, ...]
    shards: tuple[int, ...]
    """Elements that a rank has of each parameter."""

    @cached_property
    def elements(self) -> int:
        return sum(self.shards)

    def orthogonalising_bytes(self, ranks: int, *, from_host: bool) -> int:
        """What its step takes beside its states; 0 where nothing is orthogonalised."""
        parts = (_parts(tensor.elements, shard, ranks) for tensor, shard in zip(self.tensors, self.shards, strict=True))
        return orthogonalising_bytes(self.group, zip(self.tensors, parts, strict=True), from_host=from_host)


@lru_cache(maxsize=256)
def _parts(elements: int, shard: int, ranks: int) -> tuple[Part, ...]:
    """Of a parameter, cut into equal pieces; the last one may be shorter, or empty."""
    holders = range(min(ranks, -(-elements // shard)))
    return tuple(Part(rank, rank * shard, min(shard, elements - rank * shard)) for rank in holders)


def _build_sub_groups(tensors: ParameterTensors, setup: ZeroSetup) -> list[_SubGroup]:
    """A sub-group is closed when a rank's part of it has reached `sub_group_size` (_create_fp16_sub_groups)."""
    found: list[_SubGroup] = []
    for index, (group, members) in enumerate(setup.optimizer.group_tensors(tensors.all)):
        current: list[int] = []
        for position, tensor in enumerate(members):
            current.append(shard_elements(tensor, setup.shard_ranks))
            if sum(current) >= setup.zero.sub_group_size or position == len(members) - 1:
                together = tuple(members[position + 1 - len(current) : position + 1])
                found.append(_SubGroup(index, group, together, tuple(current)))
                current = []
    return found


def _resident(tensors: ParameterTensors, sub_groups: Sequence[_SubGroup], setup: ZeroSetup) -> Breakdown:
    """The shards in one flat tensor, persistent parameters whole, the sums of gradients in one flat tensor, the bucket;
    an fp32 copy of each sub-group, in fp32 as well, and the optimizer's states."""
    ranks, dtype = setup.shard_ranks, setup.config.model_dtype
    sizes = [sub_group.elements for sub_group in sub_groups]
    parameters = optimizer = gradients = 0
    if setup.zero.offload_param.device == "none":
        parameters = tensor_bytes(sum(sizes), dtype)
    if ranks > 1 or setup.zero.offload_param.device != "none":
        persistent = persistent_parameters(tensors.all, setup).values()
        parameters += sum(tensor_bytes(shard_elements(tensor, ranks) * ranks, dtype) for tensor in persistent)
    if setup.zero.offload_optimizer.device == "none":
        optimizer = sum(
            tensor_bytes(sub_group.elements, "fp32") + state_tensor_bytes(sub_group.group, sub_group.elements)
            for sub_group in sub_groups
        )
        gradients = tensor_bytes(sum(sizes), setup.config.grad_accum_dtype)
    bucket = (
        tensor_bytes(setup.zero.reduce_bucket_size, setup.config.communication_data_type)
        if setup.zero.contiguous_gradients
        else 0
    )
    return Breakdown(
        parameters_bytes=parameters, gradients_bytes=gradients, optimizer_bytes=optimizer, buckets_bytes=bucket
    )


def _step(tensors: ParameterTensors, sub_groups: Sequence[_SubGroup], setup: ZeroSetup) -> Breakdown:
    """step: persistent parameters are released until its end, when hpZ's copies go too; the norm in fp64; then
    sub-group by sub-group the flattened gradients and their fp32 copy. In fp16 the check for overflows makes copies of
    all gradients."""
    tally = Tally()
    ranks, accumulated = setup.shard_ranks, setup.config.grad_accum_dtype
    if setup.zero.offload_optimizer.device != "none":
        for sub_group in sub_groups:
            tally.touch("temporaries", sub_group.orthogonalising_bytes(ranks, from_host=True))
        return tally.take_peak()
    if ranks > 1 or setup.zero.offload_param.device != "none":
        persistent = persistent_parameters(tensors.all, setup).values()
        released = sum(
            tensor_bytes(shard_elements(tensor, ranks) * ranks, setup.config.model_dtype) for tensor in persistent
        )
        tally.drop("parameters", released)
    tally.hold("parameters", sum(second_copies(tensors.all, setup).values()))
    everything = sum(sub_group.elements for sub_group in sub_groups)
    if setup.config.precision == "fp16":
        tally.touch("temporaries", tensor_bytes(everything, accumulated) + tensor_bytes(everything, "fp16") // 2)
    for sub_group in sub_groups:
        for shard in sub_group.shards:
            tally.touch("temporaries", tensor_bytes(2 * shard, "fp32"))
    for sub_group in sub_groups:
        flat = tensor_bytes(sub_group.elements, accumulated) if len(sub_group.shards) > 1 else 0
        cast = tensor_bytes(sub_group.elements, "fp32") if accumulated != "fp32" else 0
        tally.touch("temporaries", flat + cast + sub_group.orthogonalising_bytes(ranks, from_host=False))
    return tally.take_peak()


def _host_bytes(sub_groups: Sequence[_SubGroup], setup: ZeroSetup) -> int:
    """In host memory, by one rank."""
    everything = sum(sub_group.elements for sub_group in sub_groups)
    states, parameters = setup.zero.offload_optimizer, setup.zero.offload_param
    host = HostMemory(pin_memory=True)
    if parameters.device != "none":
        # _create_param_groups_fp16_flat_cpu_memory: page-locked, whatever the config says.
        for index in sorted({sub_group.index for sub_group in sub_groups}):
            host.pinned(_elements_in_host(index, sub_groups, setup), setup.config.model_dtype)
    if parameters.device == "nvme":
        # AsyncPartitionedParameterSwapper: its buffers, and a swap space for the largest sub-group not in memory.
        host.pageable(parameters.buffer_count * parameters.buffer_size, setup.config.model_dtype)
        swapped = [sub_group.elements for sub_group in sub_groups if not _is_in_host(sub_group, sub_groups, setup)]
        host.pageable(max(swapped, default=0), setup.config.model_dtype)
    host.pin_memory = states.pin_memory
    if states.device != "none":
        # grad_partitions_flat_buffer in _setup_for_real_optimizer.
        host.pinned(everything, setup.config.grad_accum_dtype)
    if states.device == "nvme":
        # SwapBufferManager of the OptimizerSwapper.
        host.pageable(states.buffer_count * max(sub_group.elements for sub_group in sub_groups), "fp32")
    for sub_group in sub_groups:
        # _create_fp32_partitions and initialize_optimizer_states.
        if states.device == "cpu" or (states.device == "nvme" and not _is_swapped(sub_group)):
            host.pageable((1 + len(sub_group.group.states)) * sub_group.elements, "fp32")
            host.pinned(sub_group.elements, "fp32")
    return host.num_bytes


def _nvme_bytes(sub_groups: Sequence[_SubGroup], setup: ZeroSetup) -> int:
    """In files, by one rank."""
    num_bytes = 0
    for sub_group in sub_groups:
        if setup.zero.offload_optimizer.device == "nvme" and _is_swapped(sub_group):
            # With the gradient, which the step reads too.
            num_bytes += (sub_group.group.state_bytes + BYTES_PER_ELEMENT["fp32"]) * sub_group.elements
        if setup.zero.offload_param.device == "nvme" and not _is_in_host(sub_group, sub_groups, setup):
            num_bytes += BYTES_PER_ELEMENT[setup.config.model_dtype] * sub_group.elements
    return num_bytes


def _is_swapped(sub_group: _SubGroup) -> bool:
    """OptimizerSwapper.is_swappable_tensor."""
    return sub_group.elements * BYTES_PER_ELEMENT["fp32"] >= _SMALLEST_SWAP_BYTES


def _elements_in_host(index: int, sub_groups: Sequence[_SubGroup], setup: ZeroSetup) -> int:
    """Room for a group's parameters: all of them, or what `max_in_cpu` leaves after the groups before."""
    own = sum(sub_group.elements for sub_group in sub_groups if sub_group.index == index)
    if setup.zero.offload_param.device == "cpu":
        return own
    before = sum(sub_group.elements for sub_group in sub_groups if sub_group.index < index)
    return max(0, min(own, setup.zero.offload_param.max_in_cpu - before))


def _is_in_host(sub_group: _SubGroup, sub_groups: Sequence[_SubGroup], setup: ZeroSetup) -> bool:
    """Whether a sub-group's parameters lie within their group's room (_create_fp16_partitions_with_defragmentation)."""
    end = 0
    for other in sub_groups:
        if other.index == sub_group.index:
            end += other.elements
        if other is sub_group:
            break
    return end <= _elements_in_host(sub_group.index, sub_groups, setup)


@dataclass
class _Walk:
    """One micro-step: what is alive beyond the resident memory."""

    tensors: ParameterTensors
    setup: ZeroSetup
    recomputes: bool
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.trace = _trace(self.tensors, self.recomputes, self.setup.zero.stage3_max_reuse_distance)
        self.parameters = Stage3Parameters(self.trace, self.setup, self.tally)
        self.dtype = self.setup.config.model_dtype
        self.communication = self.setup.config.communication_data_type
        self.bucket: list[ParameterTensor] = []
        self.bucket_elements = 0
        self.own_bytes = 0
        """Of gradients in the bucket's list that did not fit into the bucket."""
        self.cast_bytes = 0
        """What those take in the type of the communication, where it is another; the bucket has it anyway."""
        self.done = 0
        """Parameters that have gradients."""
        self.handover = self.tally.now
        """Most that was live while the last gradients were handed over."""

    def forward(self) -> tuple[Breakdown, ...]:
        self.parameters.begin()
        # What is fetched before the embeddings run belongs to them.
        return tuple(moment.extra for moment in self._run(self.trace.forward)[1:])

    def backward(self) -> tuple[BackwardMoment, ...]:
        return tuple(self._run(self.trace.backward))

    def _run(self, passed: Pass) -> list[BackwardMoment]:
        """The course of a pass. Of a large model most blocks begin as the one before did, and are not followed."""
        course: list[BackwardMoment] = []
        self._follow(passed.begin, course)
        place, totals, state = 0, None, None
        while place < len(passed.blocks):
            begin, done, gathers = len(course), self.done, self.parameters.gathers
            self._follow(passed.blocks[place], course)
            place += 1
            (before, totals), (last, state) = (totals, self._totals()), (state, None)
            if totals == before and place < len(passed.blocks):
                state = self.parameters.state(passed.numbers[place])
            if state is not None and state == last:
                count = self.parameters.equal_blocks(passed, place)
                one, elements = course[begin:], self.done - done
                for number in range(1, count + 1):
                    course += [replace(m, parameters_done=m.parameters_done + number * elements) for m in one]
                self.parameters.skip(passed, place, count)
                of_block = self.parameters.gathers.plus(gathers, -1)
                self.parameters.gathers = self.parameters.gathers.plus(of_block, count)
                self.done += count * elements
                place += count
        self._follow(passed.end, course)
        course.append(BackwardMoment(self.done, self.handover, self.tally.take_peak()))
        self.handover = self.tally.now
        return course

    def _totals(self) -> Hashable:
        """With `Stage3Parameters.state`, all that decides what is alive from here on; quickly compared."""
        bucket = tuple(tensor.elements for tensor in self.bucket)
        alive = self.tally.state, self.handover.total_bytes, self.own_bytes
        return self.parameters.available, self.parameters.ahead, alive, bucket

    def _follow(self, events: Iterable[Event], course: list[BackwardMoment]) -> None:
        for action, module in events:
            if action == "fetch":
                self.parameters.fetch(module)
            elif action == "release":
                self.parameters.release(module)
            elif action == "reduced":
                self._flush()
            else:
                course.append(BackwardMoment(self.done, self.handover, self.tally.take_peak()))
                if action == "gradients":
                    self.done += self._gradients(self.trace.parameters[module], is_first=not self.done)
                self.handover = self.tally.take_peak()

    def _gradients(self, together: tuple[ParameterTensor, ...], is_first: bool) -> int:
        """Those of one layer appear; parameters that are done by them. The tied table's from the head only waits, and
        the one from the look-up is then added to it in place: stage 3's own linear layer makes no views."""
        sizes = [tensor_bytes(tensor.elements, self.dtype) for tensor in together]
        table = self.tensors.tied and together == (self.tensors.table,)
        if table and not is_first:
            self.tally.touch("gradients", sizes[0])
        else:
            self.tally.hold("gradients", sum(sizes))
        if not (table and is_first):
            for tensor, num_bytes in zip(together, sizes, strict=True):
                self._reduce(tensor, num_bytes)
        return 0 if table and not is_first else sum(tensor.elements for tensor in together)

    def _reduce(self, tensor: ParameterTensor, num_bytes: int) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: into the bucket, which is reduced first when it is full."""
        size = self.setup.zero.reduce_bucket_size
        if self.bucket and self.bucket_elements + tensor.elements > size:
            self._flush()
        if self.setup.zero.contiguous_gradients and self.bucket_elements + tensor.elements <= size:
            self.tally.drop("gradients", num_bytes)
        else:
            self.own_bytes += num_bytes
            if self.communication != self.dtype:
                self.cast_bytes += tensor_bytes(tensor.elements, self.communication)
        self.bucket.append(tensor)
        self.bucket_elements += tensor.elements

    def _flush(self) -> None:
        """__reduce_and_partition_ipg_grads."""
        if not self.bucket:
            return
        setup = self.setup
        fits = setup.zero.contiguous_gradients and self.bucket_elements <= setup.zero.reduce_bucket_size
        if fits and not setup.zero.reduce_scatter:
            self._allreduce()
        else:
            self._reduce_scatter()
        self.tally.drop("gradients", self.own_bytes)
        self.bucket, self.bucket_elements, self.own_bytes, self.cast_bytes = [], 0, 0, 0

    def _allreduce(self) -> None:
        """__avg_scatter_contiguous_grads: the scaled bucket is a copy, and so is that in the type of the sums."""
        scaled = tensor_bytes(self.bucket_elements, self.communication) if self.setup.shard_ranks > 1 else 0
        other = self.communication != self.setup.config.grad_accum_dtype
        cast = tensor_bytes(self.bucket_elements, self.setup.config.grad_accum_dtype) if other else 0
        self.tally.touch("buckets", scaled + cast)

    def _reduce_scatter(self) -> None:
        """__avg_scatter_grads and reduce_scatter_coalesced: padded pieces of all gradients in one flat tensor, which a
        single gradient that divides evenly does not need; then each piece in the type of the sums."""
        ranks, setup = self.setup.shard_ranks, self.setup
        casts = self.cast_bytes
        shards = [shard_elements(tensor, ranks) for tensor in self.bucket]
        needs_copy = len(shards) > 1 or self.bucket[0].elements % ranks
        flat = tensor_bytes(sum(shards) * ranks, self.communication) if needs_copy else 0
        self.tally.hold("buckets", casts + flat)
        other = self.communication != setup.config.grad_accum_dtype
        pieces = sum(tensor_bytes(shard, setup.config.grad_accum_dtype) for shard in shards) if other else 0
        self.tally.hold("buckets", pieces)
        if other:
            self.tally.drop("buckets", casts + flat)
            casts = flat = 0
        if setup.zero.offload_optimizer.device != "none":
            self._to_host(max(shards))
        self.tally.drop("buckets", casts + flat + pieces)

    def _to_host(self, shard: int) -> None:
        """partition_grads: the sum of a parameter's gradient visits the GPU, where its norm is taken in fp64."""
        accumulated = tensor_bytes(shard, self.setup.config.grad_accum_dtype)
        norm = tensor_bytes(2 * min(shard, _NORM_ELEMENTS), "fp32")
        cast = tensor_bytes(shard, "fp32") if self.setup.config.grad_accum_dtype != "fp32" else 0
        self.tally.touch("temporaries", accumulated + max(norm, cast))
