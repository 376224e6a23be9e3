"""Parameters, gradients and states as ZeRO divides them: numbers that the formulas of all stages read. No torch.

Groups are those of the optimizer. A rank's part of one is its first: rank 0 has the first elements of each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from llmscale.architecture.layers import ParameterTensor, ParameterTensors
from llmscale.config.deepspeed.schema import ResolvedZero
from llmscale.config.optimizers import OptimizerGroup
from llmscale.memory.zero_setup import BYTES_PER_ELEMENT, ZeroSetup


@dataclass(frozen=True)
class ShardedGroup:
    """A group of the optimizer, laid out end to end and cut into equal parts; the rank has the first."""

    optimizer: OptimizerGroup
    tensors: list[ParameterTensor]
    ranks: int

    @cached_property
    def part_elements(self) -> float:
        """Elements of the rank's part."""
        return sum(tensor.elements for tensor in self.tensors) / self.ranks

    @cached_property
    def owned_tensors(self) -> list[ParameterTensor]:
        """Parameters of which the rank has a part at stages 1 and 2."""
        begins = accumulate((tensor.elements for tensor in self.tensors), initial=0)
        return [tensor for tensor, begin in zip(self.tensors, begins, strict=False) if begin < self.part_elements]

    @cached_property
    def owned_tensors_elements(self) -> int:
        """Elements of these parameters, with what other ranks have of the last one."""
        return sum(tensor.elements for tensor in self.owned_tensors)

    def sub_groups(self, size: int) -> list[float]:
        """Cut the rank's shards at stage 3 where they reach `size` elements."""
        sizes = [0.0]
        for tensor in self.tensors:
            sizes[-1] += tensor.elements / self.ranks
            if sizes[-1] >= size:
                sizes.append(0.0)
        return [elements for elements in sizes if elements]


class Reduction(NamedTuple):
    """Gradients of the bucket that are reduced at once."""

    end: int
    """Gradients that were handed over before it, its own included."""
    elements: int
    largest: int
    """Elements of its largest gradient."""
    tensors: int
    """Number of its gradients."""
    travelling: int = 0
    """Elements that travel at once, at stages 1 and 2: those of divided experts apart from the others."""
    largest_owned: float = 0.0
    """Elements of the largest piece that the rank has, at stages 1 and 2."""
    group_ranks: int = 1
    """Ranks that divide its parameters; fewer for divided experts."""
    slices: int = 0
    """Number of pieces that are neighbours and of one rank each, at stages 1 and 2."""


class _Slices(NamedTuple):
    """Places at which stages 1 and 2 cut a parameter."""

    owned: float
    """Elements that the rank has."""
    first_rank: int
    """Rank that has its first element."""
    last_rank: int
    """Rank that has its last element."""


@dataclass(frozen=True)
class Sharding:
    """Parameters, gradients and states of one rank."""

    tensors: ParameterTensors
    setup: ZeroSetup

    @cached_property
    def zero(self) -> ResolvedZero:
        return self.setup.config.zero

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of a weight, and of its gradient as autograd returns it."""
        return BYTES_PER_ELEMENT[self.setup.config.model_dtype]

    @cached_property
    def sum_bytes(self) -> int:
        """Bytes of a gradient that is summed over micro-steps."""
        return BYTES_PER_ELEMENT[self.setup.config.grad_accum_dtype]

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes of a gradient that is communicated."""
        return BYTES_PER_ELEMENT[self.setup.config.communication_data_type]

    @cached_property
    def master_bytes(self) -> int:
        """Bytes of a master weight, and of the gradient that the optimizer gets."""
        return self.setup.optimizer.groups[0].master_bytes

    @cached_property
    def accumulates(self) -> bool:
        """True when a step has several micro-steps."""
        return self.setup.accumulates

    @cached_property
    def offloads(self) -> bool:
        """True if the optimizer's states are on the host or on disk."""
        return self.setup.offloads_optimizer

    @cached_property
    def ranks(self) -> int:
        return self.setup.shard_ranks

    @cached_property
    def bucket_elements(self) -> int:
        """Elements of a bucket of gradients."""
        return self.zero.reduce_bucket_size

    @cached_property
    def copies_to_bucket(self) -> bool:
        """True if gradients are copied into a bucket."""
        return self.zero.contiguous_gradients or (self.offloads and self.setup.stage < 3)

    @cached_property
    def sums_part_in_fp32(self) -> bool:
        """True if stages 1 and 2 sum the gradients of the rank's part in fp32, beside weights in 16 bit."""
        return self.sum_bytes == 4 and self.weight_bytes == 2

    @cached_property
    def groups(self) -> list[ShardedGroup]:
        groups = self.setup.groups(self.tensors)
        return [ShardedGroup(group, members, self.setup.ranks_of(members[0])) for group, members in groups]

    @cached_property
    def gradient_order(self) -> list[ParameterTensor]:
        """Trained parameters in the order in which their gradients are complete."""
        trained = {tensor.index for tensor in self.tensors.trainable}
        return [tensor for layer in self.tensors.gradient_order for tensor in layer if tensor.index in trained]

    @cached_property
    def trained_elements(self) -> int:
        return sum(tensor.elements for tensor in self.gradient_order)

    @cached_property
    def owned_elements(self) -> float:
        """Parameters whose states the rank has."""
        return sum(group.part_elements for group in self.groups)

    @cached_property
    def largest_elements(self) -> int:
        """Elements of the largest trained parameter."""
        return max(tensor.elements for tensor in self.gradient_order)

    @cached_property
    def last_elements(self) -> int:
        """Elements of the parameter whose gradient comes last."""
        return self.gradient_order[-1].elements

    @cached_property
    def frozen_bytes(self) -> int:
        return self.weight_bytes * sum(tensor.elements for tensor in self.tensors.frozen_tensors)

    @cached_property
    def tied_elements(self) -> int:
        """Elements of a trained table that is the output head too, else 0."""
        is_trained = any(tensor.index == self.tensors.table.index for tensor in self.gradient_order)
        return self.tensors.table.elements if self.tensors.tied and is_trained else 0

    @cached_property
    def waiting_bytes(self) -> int:
        """Bytes of a tied table's gradient from the head, which waits for the look-up's."""
        return self.weight_bytes * self.tied_elements

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of the rank's master weights and optimizer states: every optimizer says its bytes per parameter."""
        return sum(group.optimizer.state_bytes * group.part_elements for group in self.groups)

    @cached_property
    def orthogonalising_bytes(self) -> float:
        """Bytes that Muon takes for the largest matrix of all groups."""
        return max(map(self.orthogonalising_bytes_of, self.groups))

    def orthogonalising_bytes_of(self, group: ShardedGroup) -> float:
        """Bytes to orthogonalise the largest matrix in bf16, copied or gathered in fp32 where the rank lacks it."""
        if not group.optimizer.is_orthogonalised:
            return 0.0
        stage = self.setup.stage
        tensors = group.tensors if stage in (0, 3) else group.owned_tensors
        elements, side = max(
            (rows * tensor.parameter.columns, min(rows, tensor.parameter.columns))
            for tensor in tensors
            for rows in tensor.parameter.matrix_rows
        )
        copies = 0
        if stage == 3 and group.ranks > 1:
            copies = 8 * elements
        elif self.offloads:
            copies = 4 * elements
        return copies + 4 * elements + 2 * side**2

    @property
    def factored_bytes(self) -> float:
        """Bytes of Adafactor's second moments of a matrix, which become its update, beside the update before it."""
        largest = 0
        for group in self.groups:
            before = 0
            for tensor in group.tensors if group.optimizer.is_factored else ():
                largest = max(largest, before + tensor.elements)
                before = tensor.elements
        return 4 * largest

    def waiting_after(self, complete: float) -> int:
        """Return the bytes of a tied table's gradient that waits once gradients are complete."""
        return self.waiting_bytes if complete > 0 else 0

    def handed_over(self, complete: float) -> float:
        """Return those of the complete gradients that DeepSpeed has: all but a tied table's."""
        return max(0.0, complete - self.tied_elements)

    @cached_property
    def reductions(self) -> list[Reduction]:
        """Every reduction of a micro-step: the bucket is reduced before a gradient that does not fit."""
        buckets: list[list[ParameterTensor]] = [[]]
        size = 0
        for tensor in self.gradient_order:
            bucket = buckets[-1]
            # Stage 3 reduces a bucket also before a parameter that other ranks divide.
            is_of_others = self.setup.stage == 3 and bucket and self._ranks_of(bucket[0]) != self._ranks_of(tensor)
            if size and (is_of_others or size + tensor.elements > self.bucket_elements):
                buckets.append([])
                size = 0
            buckets[-1].append(tensor)
            size += tensor.elements
        ends = accumulate(sum(tensor.elements for tensor in bucket) for bucket in buckets)
        return [self._reduction(bucket, end) for bucket, end in zip(buckets, ends, strict=True)]

    def _ranks_of(self, tensor: ParameterTensor) -> int:
        return self.setup.ranks_of(tensor)

    def _reduction(self, bucket: list[ParameterTensor], end: int) -> Reduction:
        reduction = Reduction(
            end,
            elements=sum(tensor.elements for tensor in bucket),
            largest=max(tensor.elements for tensor in bucket),
            tensors=len(bucket),
            group_ranks=self._ranks_of(bucket[0]),
        )
        if self.setup.stage not in (1, 2):
            return reduction
        cuts = [self._slices[tensor.index] for tensor in bucket]
        slices = 0
        rank_before = -1
        for cut in cuts:
            slices += cut.last_rank - cut.first_rank + 1
            # Neighbours of one rank are one, but those that this rank adds to sums in fp32.
            is_added_alone = cut.first_rank == 0 and self.sums_part_in_fp32
            slices -= 1 if cut.first_rank == rank_before and not is_added_alone else 0
            rank_before = cut.last_rank
        by_ranks: Counter[int] = Counter()
        for tensor in bucket:
            by_ranks[self._ranks_of(tensor)] += tensor.elements
        return reduction._replace(
            travelling=max(by_ranks.values()), largest_owned=max(cut.owned for cut in cuts), slices=slices
        )

    @cached_property
    def largest_piece(self) -> float:
        """Elements of the largest gradient, or part of one, that the rank has at stages 1 and 2."""
        return max(cut.owned for cut in self._slices.values())

    @cached_property
    def _slices(self) -> dict[int, _Slices]:
        slices: dict[int, _Slices] = {}
        for group in self.groups:
            begin = 0
            for tensor in group.tensors:
                end = begin + tensor.elements
                slices[tensor.index] = _Slices(
                    owned=max(0.0, min(tensor.elements, group.part_elements - begin)),
                    first_rank=int(begin / group.part_elements),
                    last_rank=int((end - 1) / group.part_elements),
                )
                begin = end
        return slices

    def reductions_while(self, complete: float, handing: float) -> list[Reduction]:
        """Return the reductions while `handing` gradients follow `complete` others."""
        handed = self.handed_over(complete)
        first = bisect_left(self._reduction_ends, handed)
        last = bisect_left(self._reduction_ends, handed + handing, first)
        return self.reductions[first:last]

    @cached_property
    def _reduction_ends(self) -> list[int]:
        return [reduction.end for reduction in self.reductions]

    def waiting_for_reduction(self, handed: float) -> float:
        """Return the elements of gradients that keep a storage of their own until they are reduced.

        These are those beyond the bucket, and all that is not copied into it.
        """
        place = bisect_left(self._reduction_ends, handed)
        if place == len(self.reductions):
            return 0
        reduction = self.reductions[place]
        begin = reduction.end - reduction.elements
        is_copied = self.copies_to_bucket and reduction.largest <= self.bucket_elements
        return 0 if is_copied else handed - begin

    def reduced_at(self, gradients: int) -> int:
        """Return the gradients that have been handed over when the one behind `gradients` others is reduced."""
        return next((end for end in self._reduction_ends if end > gradients), self.trained_elements)

    @property
    def complete_before_last(self) -> float:
        """Gradients that are complete when the last parameter hands over its own."""
        if self.tied_elements:
            return self.trained_elements
        return self.trained_elements - self.last_elements

    @cached_property
    def first_owned(self) -> list[tuple[int, ShardedGroup]]:
        """(gradients before the first that the rank has a part of, group), at stages 1 and 2."""
        places = accumulate((tensor.elements for tensor in self.gradient_order), initial=0)
        begins = dict(zip((tensor.index for tensor in self.gradient_order), places, strict=False))
        return [(min(begins[tensor.index] for tensor in group.owned_tensors), group) for group in self.groups]

    @cached_property
    def _kept(self) -> list[tuple[int, int]]:
        """(gradients, elements of those among them that stay) after every gradient that is not copied."""
        owned = {tensor.index for group in self.groups for tensor in group.owned_tensors}
        steps = [(-1, 0)]
        complete = 0
        total = 0
        for tensor in self.gradient_order:
            complete += tensor.elements
            is_copied = self.copies_to_bucket and tensor.elements <= self.bucket_elements
            is_owned = tensor.index in owned
            if self.setup.stage == 1:
                # Copies of the rank's own take their place, where there is a bucket.
                stays = not is_copied and not (is_owned and self.copies_to_bucket)
            else:
                stays = not is_copied and is_owned
            if stays:
                total += tensor.elements
                steps.append((complete, total))
        return steps

    @cached_property
    def kept_in_step(self) -> int:
        """Bytes of the sums that stage 1 frees when the next forward pass begins."""
        if self.sum_bytes != self.weight_bytes:
            return self.sum_bytes * self._kept[-1][1]
        return 0

    def kept_elements(self, handed: float) -> int:
        """Elements of gradients that are not copied into the bucket: DeepSpeed frees them after the backward pass."""
        return self._kept[bisect_left(self._kept, (handed + 1, 0)) - 1][1]
