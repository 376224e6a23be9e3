"""Bytes that ZeRO holds beside activations on rank 0 of DeepSpeed 0.19.8: one function per stage. No torch.

`done`: gradients that are complete; `own` beside it: those of a layer that is handing its gradients over.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from llmscale.architecture.layers import ParameterTensor, ParameterTensors
from llmscale.config.optimizers import OptimizerGroup
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.gathers import allocates_gathered, persistent_parameters, second_copies
from llmscale.memory.states import NOTHING, Added, Gathered, States, largest_addition, layers_in_order
from llmscale.memory.zero_setup import BYTES_PER_ELEMENT, ZeroSetup

#: Elements at which the engine closes a bucket of gradients (engine.py, MEMORY_OPT_ALLREDUCE_SIZE).
_ALLREDUCE = 500_000_000

#: Elements of one piece of a gradient's norm under offload (_constant_buffered_norm2).
_NORM_ELEMENTS = 250_000_000


@dataclass(frozen=True)
class _Group:
    """A group of the optimizer, laid out end to end and cut into equal parts; the rank has the first."""

    optimizer: OptimizerGroup
    tensors: list[ParameterTensor]
    ranks: int

    @cached_property
    def part(self) -> float:
        return sum(tensor.elements for tensor in self.tensors) / self.ranks

    @cached_property
    def own(self) -> list[ParameterTensor]:
        """Parameters of which the rank has a part at stages 1 and 2."""
        begins = accumulate((tensor.elements for tensor in self.tensors), initial=0)
        return [tensor for tensor, begin in zip(self.tensors, begins, strict=False) if begin < self.part]

    @cached_property
    def uncut(self) -> int:
        return sum(tensor.elements for tensor in self.own)

    def sub_groups(self, size: int) -> list[float]:
        """Cut the rank's shards at stage 3 where they reach `size` elements."""
        sizes = [0.0]
        for tensor in self.tensors:
            sizes[-1] += tensor.elements / self.ranks
            if sizes[-1] >= size:
                sizes.append(0.0)
        return [elements for elements in sizes if elements]


class _Flush(NamedTuple):
    """A reduction of the bucket."""

    at: int
    """Gradients that came before it."""
    elements: int
    largest: int
    """Elements of its largest gradient."""


class _Zero:
    """Numbers that the stages share."""

    def __init__(self, tensors: ParameterTensors, setup: ZeroSetup) -> None:
        config = setup.config
        self.tensors, self.setup, self.zero = tensors, setup, config.zero
        dtypes = config.model_dtype, config.grad_accum_dtype, config.communication_data_type
        self.weight, self.sum, self.sent = (BYTES_PER_ELEMENT[dtype] for dtype in dtypes)
        """Bytes of a weight, of a summed and of a communicated gradient."""
        self.master = setup.optimizer.groups[0].master_bytes
        """Bytes of a master weight, and of the gradient that the optimizer gets."""
        self.accumulates, self.offloads = setup.accumulates, setup.offloads_optimizer
        self.ranks, self.bucket = setup.shard_ranks, config.zero.reduce_bucket_size
        self.groups = [_Group(group, members, setup.ranks_of(members[0])) for group, members in setup.groups(tensors)]
        trained = {tensor.index for tensor in tensors.trainable}
        self.order = [tensor for layer in tensors.gradient_order for tensor in layer if tensor.index in trained]
        self.trained = sum(tensor.elements for tensor in self.order)
        self.own = sum(group.part for group in self.groups)
        """Parameters whose states the rank has."""
        self.largest = max(tensor.elements for tensor in self.order)
        self.frozen_bytes = self.weight * sum(tensor.elements for tensor in tensors.frozen_tensors)
        self.table = tensors.table.elements if tensors.tied else 0
        self.waiting = self.weight * self.table * (tensors.table.index in trained)
        """Bytes of a tied table's gradient from the head, which waits for the look-up's."""
        self.is_contiguous = config.zero.contiguous_gradients or self.offloads

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of the rank's master weights and optimizer states: every optimizer says its bytes per parameter."""
        return sum(group.optimizer.state_bytes * group.part for group in self.groups)

    @cached_property
    def muon(self) -> float:
        return max(map(self.orthogonalising, self.groups))

    @property
    def factored(self) -> float:
        """Bytes of Adafactor's second moments of the largest matrix, which become its update."""
        sizes = [tensor.elements for group in self.groups for tensor in group.tensors if group.optimizer.is_factored]
        return 4 * max(sizes, default=0)

    def orthogonalising(self, group: _Group) -> float:
        """Bytes to orthogonalise the largest matrix in bf16, copied or gathered in fp32 where the rank lacks it."""
        if not group.optimizer.is_orthogonalised:
            return 0.0
        tensors = group.tensors if self.setup.stage in (0, 3) else group.own
        elements, side = max(
            (rows * tensor.parameter.columns, min(rows, tensor.parameter.columns))
            for tensor in tensors
            for rows in tensor.parameter.matrix_rows
        )
        is_gathered = self.setup.stage == 3 and group.ranks > 1
        copies = 8 * elements if is_gathered else 4 * elements if self.offloads else 0
        return copies + 4 * elements + 2 * side**2

    def handed(self, done: float) -> float:
        """Return those of `done` gradients that DeepSpeed has."""
        return max(0.0, done - self.table)

    @cached_property
    def flushes(self) -> list[_Flush]:
        """Every reduction: the bucket is reduced before a gradient that does not fit."""
        flushes, bucket = [], _Flush(0, 0, 0)
        for size in (tensor.elements for tensor in self.order):
            if bucket.elements and bucket.elements + size > self.bucket:
                flushes.append(bucket)
                bucket = _Flush(bucket.at, 0, 0)
            bucket = _Flush(bucket.at + size, bucket.elements + size, max(bucket.largest, size))
        return [*flushes, bucket]

    def flushed(self, done: float, own: float) -> list[_Flush]:
        """Return the reductions while `own` gradients follow `done` others."""
        handed = self.handed(done)
        begin = bisect_left(self._flush_places, handed)
        return self.flushes[begin : bisect_left(self._flush_places, handed + own, begin)]

    @cached_property
    def _flush_places(self) -> list[int]:
        return [flush.at for flush in self.flushes]

    def flush_after(self, gradients: int) -> int:
        return next((flush.at for flush in self.flushes if flush.at > gradients), self.trained)

    @property
    def before_last(self) -> float:
        """Gradients that are complete when the last parameter hands over its own."""
        return self.trained if self.table else self.trained - self.order[-1].elements

    @cached_property
    def first_own(self) -> list[tuple[int, _Group]]:
        """(gradients before the first that the rank has a part of, group), at stages 1 and 2."""
        places = accumulate((tensor.elements for tensor in self.order), initial=0)
        begins = dict(zip((tensor.index for tensor in self.order), places, strict=False))
        return [(min(begins[tensor.index] for tensor in group.own), group) for group in self.groups]

    @cached_property
    def _too_large(self) -> list[tuple[int, int]]:
        """(gradients, elements of those among them that stay) after every gradient that exceeds the bucket."""
        steps, done, total = [(-1, 0)], 0, 0
        # Stage 1 with overlap_comm keeps those of other ranks too.
        own = {tensor.index for group in self.groups for tensor in group.own}
        for tensor in self.order:
            done += tensor.elements
            if tensor.elements > self.bucket and (self.setup.stage == 1 or tensor.index in own):
                total += tensor.elements
                steps.append((done, total))
        return steps

    def too_large(self, handed: float) -> int:
        """Elements of parameters that exceed the bucket: DeepSpeed frees their gradients after the backward pass."""
        return self._too_large[bisect_left(self._too_large, (handed + 1, 0)) - 1][1]

    def allreduce(self, width: int) -> float:
        """Bytes of gradients in a flat tensor of _ALLREDUCE elements or one tensor more, and cast to travel."""
        elements = self.trained if self.trained <= _ALLREDUCE else _ALLREDUCE + self.largest / 2
        return elements * (width + (self.sent if self.sent != width else 0))


def zero_states(tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool = False) -> States:
    """Return what DeepSpeed allocates beside activations; autocast's 16-bit copies count as activations.

    `recomputes` matters at stage 3, where recomputation gathers the parameters once more.
    """
    zero = _Zero(tensors, setup)
    states = replace(_states_of_stage(zero, recomputes), waiting=zero.waiting)
    return replace(states, trained=_count_trained(tensors)) if tensors.frozen else states


def _states_of_stage(z: _Zero, recomputes: bool) -> States:
    config, stage = z.setup.config, z.setup.stage
    if stage == 0:
        return _stage0(z)
    if stage == 3:
        return _stage3(z, Gathered(z.tensors, z.setup, recomputes) if allocates_gathered(z.setup) else None)
    if stage == 1 and config.precision == "bf16" and config.grad_accum_dtype == "fp32" and not z.offloads:
        return _stage1_bf16(z)
    return _stage1(z) if stage == 1 and not z.zero.overlap_comm else _Stage2(z).states()


def _count_trained(tensors: ParameterTensors) -> Callable[[float], float]:
    """Return a function of a number of gradients, of which frozen parameters have none."""
    frozen, layers = set(tensors.frozen_tensors), layers_in_order(tensors)
    sizes = [sum(tensor.elements for tensor in layer) for layer in layers]
    trained = [sum(tensor.elements for tensor in layer if tensor not in frozen) for layer in layers]
    begins, counts = list(accumulate(sizes, initial=0)), list(accumulate(trained, initial=0))

    def count(done: float) -> float:
        place = min(bisect_right(begins, done) - 1, len(layers) - 1)
        return counts[place] + min(trained[place], done - begins[place])

    return count


def _resident(parameters: float, gradients: float, optimizer: float, buckets: float) -> Breakdown:
    return Breakdown(
        parameters_bytes=math.ceil(parameters),
        gradients_bytes=math.ceil(gradients),
        optimizer_bytes=math.ceil(optimizer),
        buckets_bytes=math.ceil(buckets),
    )


def _stage0(z: _Zero) -> States:
    """Everything everywhere. 16 bit: FP16_UnfusedOptimizer, whose fp32 gradients live in the step alone."""
    master = 4 * z.trained if z.weight == 2 else 0
    before = z.trained * (z.sum if z.weight == 2 else z.weight) if z.accumulates else 0
    casting = z.weight * z.order[-1].elements if z.accumulates and z.sum > z.weight else 0
    states = sum(
        (group.optimizer.state_bytes - 4) * tensor.elements + group.optimizer.sums_bytes(tensor.parameter)
        for group in z.groups
        for tensor in group.tensors
    )

    def gradients(done: float) -> Added:
        grown = before + z.waiting * (done > 0) if before else z.weight * min(done, z.trained)
        return Added(gradients=grown)

    complete = z.weight * z.trained
    return States(
        resident=_resident(complete + z.frozen_bytes, 0, master + states, 0),
        before=Added(gradients=before),
        gradients=gradients,
        handing=lambda done, own: Added(gradients=z.weight * own),
        end=largest_addition(
            [Added(gradients=before, temporaries=casting), Added(gradients=complete, buckets=z.allreduce(z.weight))]
        ),
        step=Added(gradients=complete, temporaries=master + max(z.muon, z.factored)),
    )


def _stage1_bf16(z: _Zero) -> States:
    """BF16_Optimizer: stage 1 in bf16 with sums in fp32, which stay between steps."""
    immediate = z.setup.config.immediate_grad_update
    before = 2 * z.trained if z.accumulates and not immediate else 0
    grows = 0 if before or immediate else 2
    is_one_flat = z.trained <= _ALLREDUCE and len(z.groups) > 1 and z.setup.expert_parallel_size == 1
    reduction = z.trained * ((4 if is_one_flat else 0) + (z.sent if z.sent != 4 else 0))
    at_end = before + grows * z.trained

    def gradients(done: float) -> Added:
        return Added(gradients=before + (grows * min(done, z.trained) if grows else z.waiting * (done > 0)))

    return States(
        resident=_resident(2 * z.trained + z.frozen_bytes, 4 * z.trained, z.state_bytes, 0),
        before=Added(gradients=before),
        gradients=gradients,
        handing=lambda done, own: Added(gradients=2 * own, temporaries=4 * own if immediate else 0),
        end=largest_addition(
            [Added(gradients=at_end, temporaries=4 * z.largest), Added(gradients=at_end, buckets=reduction)]
        ),
        step=Added(gradients=at_end, temporaries=z.muon),
    )


def _stage1(z: _Zero) -> States:
    """Optimizer states divided; all gradients live to the end of the backward pass, then go through the bucket."""
    compact, bucket = z.sum == 4 and z.weight == 2, z.bucket * z.sum if z.is_contiguous else 0
    before = Added(gradients=z.sum * z.trained, buckets=bucket) if z.accumulates else NOTHING
    part = _part(z, compact)
    last = z.order[-1].elements if z.sum != z.weight else 0  # in both types
    of_last = z.sum * last * z.accumulates + z.weight * last

    def gradients(done: float) -> Added:
        if z.accumulates:
            return before._replace(gradients=before.gradients + z.waiting * (done > 0))
        return Added(gradients=z.sum * min(done, z.trained), buckets=bucket * (done > 0))

    def handing(done: float, own: float) -> Added:
        cast = z.sum * own if z.sum != z.weight else 0
        return Added(gradients=z.weight * own + cast, buckets=bucket * (not z.accumulates and not done))

    complete = Added(gradients=z.sum * z.trained + of_last, buckets=bucket)
    # In fp16 with sums in fp32 other ranks' gradients are views of the bucket, which stays.
    stays = bucket if compact and z.ranks > 1 else 0
    return States(
        resident=_resident12(z),
        before=before,
        gradients=gradients,
        handing=handing,
        end=largest_addition([complete, *_reductions1(z, compact)]),
        step=Added(gradients=part, buckets=stays, temporaries=_update12(z, compact)),
        host_bytes=_host12(z, compact),
    )


def _reductions1(z: _Zero, compact: bool) -> Iterator[Added]:
    """Yield the peaks of reducing all gradients, group by group, after the backward pass.

    A gradient that fits is freed as it is copied into the bucket. A bucket of one rank's gradients needs no flat copy,
    unless the rank adds them one by one to sums in fp32.
    """
    bucket, left, made = z.bucket * z.sum if z.is_contiguous else 0, float(z.trained), 0.0
    grown = set[int]()  # groups whose sums exist
    for chunk in _buckets1(z):
        size, own = sum(piece.elements for piece in chunk), max(piece.own for piece in chunk)
        left -= sum(piece.elements for piece in chunk if piece.elements <= z.bucket and z.is_contiguous)
        ranks = {rank for piece in chunk for rank in (piece.first_rank, piece.last_rank)}
        is_one_slice = len(ranks) == 1 and not (compact and ranks == {0} and len(chunk) > 1)
        flat, cast = 0 if is_one_slice else z.sum * size, z.sent * size if z.sent != z.sum else 0
        for piece in chunk if compact else ():
            if piece.own and piece.group not in grown:
                grown.add(piece.group)
                made += 4 * z.groups[piece.group].part
        now = Added(gradients=z.sum * left + made, buckets=bucket)
        yield now._replace(buckets=bucket + flat + cast)
        if compact and z.sent != 4:
            yield now._replace(buckets=bucket + (cast or flat), temporaries=4 * own)
        if own and z.offloads:
            yield now._replace(temporaries=8 * own)
        elif own and not compact and not made:
            made = _part(z, compact)
            yield now._replace(gradients=now.gradients + made)


class _Piece(NamedTuple):
    """A gradient of a group, with the elements that the rank has, and the ranks of its first and last element."""

    elements: int
    own: float
    first_rank: int
    last_rank: int
    group: int


def _buckets1(z: _Zero) -> list[list[_Piece]]:
    """Return the gradients of each reduction, which closes before one that does not fit."""
    buckets, size = [list[_Piece]()], 0
    for place, group in enumerate(z.groups):
        begin = 0
        for tensor in group.tensors:
            end = begin + tensor.elements
            own = max(0.0, min(tensor.elements, group.part - begin))
            piece = _Piece(tensor.elements, own, int(begin / group.part), int((end - 1) / group.part), place)
            if buckets[-1] and size + tensor.elements > z.bucket:
                buckets.append([])
                size = 0
            buckets[-1].append(piece)
            begin, size = end, size + tensor.elements
    return buckets


class _Stage2:
    """Gradients divided too: each goes through the bucket at once, and the rank keeps its part.

    Stage 1 with overlap_comm reduces alike, but sums all gradients of earlier micro-steps.
    """

    def __init__(self, z: _Zero) -> None:
        self.z, self.compact, self.is_stage1 = z, z.sum == 4 and z.weight == 2, z.setup.stage == 1
        self.width = z.sum if self.is_stage1 else z.weight
        self.bucket = z.bucket * self.width * (2 if z.zero.overlap_comm else 1) if z.is_contiguous else 0
        self.first, self.largest_own = min(at for at, _ in z.first_own), _norm(z) / 8
        if self.compact:
            parts = [(z.flush_after(at), 4 * group.part) for at, group in z.first_own]
        else:  # one buffer of all tensors that the rank has a part of
            parts = [(z.flush_after(self.first), _part(z, self.compact))]
        self.part = sum(num_bytes for _, num_bytes in parts)
        """Bytes of the rank's part."""
        self.sums = self.width * z.trained if self.is_stage1 and z.accumulates else 0
        """Bytes of complete sums, which are freed as gradients are added and reduced."""
        self.of_steps = self.sums if self.is_stage1 else self.part if z.accumulates else 0
        """Bytes that earlier micro-steps leave."""
        # Else a second buffer is added to the sums at the end.
        self.grows = [] if not self.sums and self.of_steps == self.part and self.compact else parts
        self.holds_large = z.accumulates if z.offloads else self.compact and not self.is_stage1
        """True if gradients that do not fit the bucket stay."""

    def gradients(self, done: float) -> Added:
        z, at = self.z, self.z.handed(done)
        grown = sum(num_bytes for flush, num_bytes in self.grows if at > flush)
        large = z.weight * z.too_large(at) if self.holds_large else 0
        reduced = self.width * min(at, z.trained) if self.sums else 0
        return Added(
            gradients=self.of_steps - reduced + grown + large + z.waiting * (done > 0),
            buckets=self.bucket * (self.sums > 0 or done > 0),
        )

    def reduction(self, flush: _Flush) -> Added:
        """The bucket is copied if it has gradients of several ranks, and cast; the rank's pieces are added in fp32."""
        z, (at, size, largest) = self.z, flush
        begin, end = (int((z.trained - place) / (z.trained / z.ranks)) for place in (at - size + 1, at))
        flat = self.width * size if begin != end or (self.compact and not end) else 0
        cast, own = (
            z.sent * size if z.sent != self.width else 0,
            min(largest, self.largest_own) if at > self.first else 0,
        )
        new = sum(num_bytes for place, num_bytes in self.grows if place == at)
        piece = 4 * own if self.compact and z.sent != 4 else 0
        complete = z.weight * largest if largest > z.bucket and not self.holds_large else 0  # not copied
        copied = max(flat + cast, (cast or flat) + piece)
        visit = max(0, (8 * own if z.offloads else 0) - copied)
        if self.compact or copied >= new:
            return Added(gradients=complete + new * self.compact, buckets=copied, temporaries=visit)
        return Added(gradients=complete + new, temporaries=visit)

    def handing(self, done: float, own: float) -> Added:
        """The layer's gradients wait while the bucket is reduced."""
        z = self.z
        cast = self.width * own if self.width != z.weight else 0
        given = Added(gradients=z.weight * own + cast, buckets=self.bucket * (not done and not self.sums))
        return given.with_more(largest_addition(map(self.reduction, z.flushed(done, own))))

    @property
    def end(self) -> Added:
        """After the last gradient, or while it is handed over."""
        z, waiting = self.z, Added(gradients=-self.z.waiting)
        if self.is_stage1:
            grown = sum(num_bytes for at, num_bytes in self.grows if at < z.trained)
            complete = Added(gradients=grown, buckets=self.bucket)
        else:
            complete = self.gradients(z.trained).with_more(waiting)
        last = self.gradients(z.before_last).with_more(self.handing(z.before_last, z.order[-1].elements))
        return largest_addition([complete.with_more(self.reduction(z.flushes[-1])), last.with_more(waiting)])

    def states(self) -> States:
        z, stays = self.z, self.bucket if self.is_stage1 and self.compact and self.z.ranks > 1 else 0
        return States(
            resident=_resident12(z),
            before=Added(gradients=self.of_steps, buckets=self.bucket * (self.sums > 0)),
            gradients=self.gradients,
            handing=self.handing,
            end=self.end,
            step=Added(gradients=self.part, buckets=stays, temporaries=_update12(z, self.compact)),
            moving=self.sums + max(sum(self.reduction(flush)) for flush in z.flushes),
            host_bytes=_host12(z, self.compact),
        )


def _resident12(z: _Zero) -> Breakdown:
    """Weights; states, or under offload room for the largest parameter."""
    room = z.weight * z.largest if z.offloads else 0
    return _resident(z.weight * z.trained + z.frozen_bytes, 0, 0 if z.offloads else z.state_bytes, room)


def _part(z: _Zero, compact: bool) -> float:
    """Gradients of the rank's part: sums in fp32, or complete gradients of every parameter that it has a part of."""
    if compact:
        return 4 * z.own
    return 0 if z.offloads else z.weight * sum(group.uncut for group in z.groups)


def _norm(z: _Zero) -> float:
    """The norm of one gradient is taken in fp64."""
    return 8 * max(min(tensor.elements, group.part) for group in z.groups for tensor in group.own)


def _update12(z: _Zero, compact: bool) -> float:
    """The norm; group by group, without sums in fp32, gradients end to end; their copy in the master's type; Muon."""
    if compact or z.offloads:
        cast = z.master if z.master != 4 else 0
        return max(0 if z.offloads else _norm(z), z.muon, *(cast * group.part for group in z.groups))
    flat = z.weight + (z.master if z.weight != z.master else 0)
    updates = (max(flat * group.part, z.master * group.part + z.orthogonalising(group)) for group in z.groups)
    return max(_norm(z), *updates)


def _stage3(z: _Zero, gathered: Gathered | None) -> States:
    """Parameters divided too, gathered for use; the bucket and the sums of gradients stay."""
    zero, setup, tensors = z.zero, z.setup, z.tensors.all
    on_host = zero.offload_param.device != "none"
    shards = 0 if on_host else z.weight * sum(tensor.elements / setup.ranks_of(tensor) for tensor in tensors)
    gathered_always = persistent_parameters(tensors, setup).values() if gathered else ()
    persistent = z.weight * sum(tensor.elements for tensor in gathered_always)
    copies = sum(second_copies(tensors, setup).values())
    bucket = z.bucket * z.sent if zero.contiguous_gradients else 0
    shard = max(tensor.elements / setup.ranks_of(tensor) for tensor in z.order)

    def reduction(flush: _Flush) -> Added:
        """The bucket in one flat tensor, the rank's pieces in the sums' type; offloaded ones visit with their norm."""
        _, size, largest = flush
        flat = z.sent * size if size != largest or z.ranks > 1 else 0
        pieces = z.sum * size / z.ranks if z.sent != z.sum else 0
        visit = z.sum * min(largest, shard) + 8 * min(largest, shard, _NORM_ELEMENTS) if z.offloads else 0
        complete = z.weight * largest if largest > z.bucket else 0
        options = [
            Added(gradients=complete, buckets=flat + pieces),
            Added(gradients=complete, buckets=pieces or flat, temporaries=visit),
        ]
        return largest_addition(options)

    def handing(done: float, own: float) -> Added:
        parameters, gradients, buckets, temporaries = largest_addition(map(reduction, z.flushed(done, own)))
        return Added(parameters, gradients + z.weight * own, buckets, temporaries)

    def update(group: _Group) -> float:
        size = max(group.sub_groups(zero.sub_group_size))
        return z.sum * size + (z.master * size if z.sum != z.master else 0) + z.orthogonalising(group)

    overflow = (z.sum + 1) * z.own if setup.config.precision == "fp16" else 0
    step = Added(temporaries=z.muon)
    if not z.offloads:  # persistent parameters are released until the end of the step
        step = Added(parameters=copies - persistent, temporaries=max(8 * shard, overflow, *map(update, z.groups)))
    last = largest_addition([reduction(z.flushes[-1]), handing(z.before_last, z.order[-1].elements)])
    return States(
        resident=_resident(
            shards + persistent, 0 if z.offloads else z.sum * z.own, 0 if z.offloads else z.state_bytes, bucket
        ),
        gradients=lambda done: Added(gradients=z.waiting * (done > 0)),
        handing=handing,
        end=last._replace(parameters=gathered.at_end if gathered else 0.0),
        step=step,
        gathered=gathered,
        moving=max(sum(reduction(flush)) for flush in {flush._replace(at=0) for flush in z.flushes}),
        host_bytes=_host3(z),
        nvme_bytes=_nvme3(z),
    )


def pinned_bytes(num_bytes: float, pinned: bool = True) -> float:
    """Page-locked memory comes in powers of two."""
    return 1 << (int(num_bytes) - 1).bit_length() if pinned and num_bytes >= 1 else num_bytes


def _host12(z: _Zero, compact: bool) -> float:
    """Master weights, gradients, new parameters, states, the largest parameter; at stage 2 sums of gradients."""
    if not z.offloads:
        return 0.0
    pin, host = z.zero.offload_optimizer.pin_memory, 0.0
    for group in z.groups:
        host += 2 * pinned_bytes(4 * group.part, pin) + pinned_bytes(z.weight * group.part, pin)
        host += (group.optimizer.state_bytes - 4) * group.part
        if z.setup.stage == 2 and z.accumulates and not compact:
            host += sum(pinned_bytes(z.weight * tensor.elements, pin) for tensor in group.own)
    return host + pinned_bytes(z.weight * z.largest, pin)


def _host3(z: _Zero) -> float:
    """Parameters, sums of gradients, master weights, states; buffers of NVMe."""
    states, params, host = z.zero.offload_optimizer, z.zero.offload_param, 0.0
    size = z.zero.sub_group_size
    in_host, on_disk = _parameters_on_host(z)
    if params.device != "none":
        host += sum(pinned_bytes(z.weight * elements) for elements in in_host)
    if params.device == "nvme":
        host += z.weight * (params.buffer_count * params.buffer_size + max(on_disk, default=0))
    if states.device != "none":
        host += pinned_bytes(z.sum * z.own, states.pin_memory)
    sub_groups = [(group, elements) for group in z.groups for elements in group.sub_groups(size)]
    if states.device == "nvme":
        host += states.buffer_count * 4 * max(elements for _, elements in sub_groups)
    if states.device == "cpu":
        host += sum(group.optimizer.state_bytes * group.part for group in z.groups)
        host += sum(pinned_bytes(4 * elements, states.pin_memory) for _, elements in sub_groups)
    return host


def _parameters_on_host(z: _Zero) -> tuple[list[float], list[float]]:
    """Elements of each group with room in host memory, and of the sub-groups beyond it."""
    left, in_host, on_disk = float(z.zero.offload_param.max_in_cpu), list[float](), list[float]()
    for group in z.groups:
        room = group.part if z.zero.offload_param.device == "cpu" else max(0.0, min(group.part, left))
        left -= group.part
        in_host.append(room)
        sizes = group.sub_groups(z.zero.sub_group_size)
        on_disk += [one for one, end in zip(sizes, accumulate(sizes), strict=True) if end > room]
    return in_host, on_disk


def _nvme3(z: _Zero) -> float:
    """Optimizer states with the gradient, and parameters beyond the host's room."""
    states = sum((group.optimizer.state_bytes + 4) * group.part for group in z.groups)
    parameters = z.weight * sum(_parameters_on_host(z)[1])
    return states * (z.zero.offload_optimizer.device == "nvme") + parameters * (z.zero.offload_param.device == "nvme")
