"""Bytes of stage 3: parameters divided too, gathered for use; the bucket and the sums of gradients stay. No torch.

Follows deepspeed/runtime/zero/stage3.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from llmscale.memory.breakdown import Breakdown
from llmscale.memory.gathers import persistent_parameters, second_copies
from llmscale.memory.host_bytes import nvme_bytes, stage3_host_bytes
from llmscale.memory.sharding import Reduction, ShardedGroup, Sharding
from llmscale.memory.states import Added, Gathered, States, largest_addition, resident_bytes

#: Elements of one piece of a gradient's norm under offload (_constant_buffered_norm2).
_NORM_ELEMENTS = 250_000_000


def stage3_states(sharding: Sharding, gathered: Gathered | None) -> States:
    """Return the bytes of every moment; `gathered` is None where the rank has all parameters on its GPU."""
    return _Stage3(sharding, gathered).states()


@dataclass(frozen=True)
class _Stage3:
    sharding: Sharding
    gathered: Gathered | None

    def states(self) -> States:
        sharding = self.sharding
        before_last = sharding.complete_before_last
        last = self._gradients(before_last).with_more(self._handing_over(before_last, sharding.last_elements))
        complete = self._gradients(sharding.trained_elements + sharding.tied_elements)
        end = largest_addition([complete.with_more(self._reduce(sharding.reductions[-1])), last])
        # Where a reduction ends changes nothing.
        reductions = {reduction._replace(end=0) for reduction in sharding.reductions}
        return States(
            resident=self._resident,
            gradients=self._gradients,
            handing=self._handing_over,
            end=end._replace(
                parameters=self.gathered.at_end if self.gathered else 0.0,
                gradients=end.gradients - sharding.waiting_bytes,
            ),
            step=self._step,
            gathered=self.gathered,
            moving_bytes=max(sum(self._reduce(reduction)) for reduction in reductions)
            + sharding.weight_bytes * max(sharding.bucket_elements, sharding.largest_elements),
            host_bytes=stage3_host_bytes(sharding),
            nvme_bytes=nvme_bytes(sharding),
        )

    def _gradients(self, complete: float) -> Added:
        sharding = self.sharding
        waiting = sharding.waiting_for_reduction(sharding.handed_over(complete))
        return Added(gradients=sharding.waiting_after(complete) + sharding.weight_bytes * waiting)

    @property
    def _resident(self) -> Breakdown:
        sharding = self.sharding
        tensors = sharding.tensors.all
        shards = 0.0
        if sharding.zero.offload_param.device == "none":
            sizes = (tensor.elements / sharding.setup.ranks_of(tensor) for tensor in tensors)
            shards = sharding.weight_bytes * sum(sizes)
        return resident_bytes(
            shards + self._persistent_bytes,
            gradients=0 if sharding.offloads else sharding.sum_bytes * sharding.owned_elements,
            optimizer=0 if sharding.offloads else sharding.state_bytes,
            buckets=sharding.bucket_elements * sharding.sent_bytes if sharding.zero.contiguous_gradients else 0,
        )

    @cached_property
    def _persistent_bytes(self) -> int:
        """Bytes of parameters that stay gathered."""
        if not self.gathered:
            return 0
        persistent = persistent_parameters(self.sharding.tensors.all, self.sharding.setup)
        return self.sharding.weight_bytes * sum(tensor.elements for tensor in persistent.values())

    @cached_property
    def _largest_shard(self) -> float:
        """Elements of the largest shard of a trained parameter."""
        sharding = self.sharding
        return max(tensor.elements / sharding.setup.ranks_of(tensor) for tensor in sharding.gradient_order)

    def _reduce(self, reduction: Reduction) -> Added:
        """Gradients cast to travel, end to end in one tensor, the rank's pieces in the sums' type.

        reduce_scatter_coalesced takes a single gradient as it is, if all ranks have equal parts of it. Offloaded pieces
        visit the GPU with their norm.
        """
        sharding = self.sharding
        elements = reduction.elements
        # A copy in the bucket has the type that travels.
        is_copied = sharding.copies_to_bucket and reduction.largest <= sharding.bucket_elements
        is_cast = sharding.sent_bytes != sharding.weight_bytes and not is_copied
        is_taken = reduction.tensors == 1 and elements % reduction.group_ranks == 0
        cast_bytes = sharding.sent_bytes * elements if is_cast else 0
        flat_bytes = 0 if is_taken else sharding.sent_bytes * elements
        pieces = elements / reduction.group_ranks
        pieces_bytes = 0.0
        left_bytes: float = flat_bytes or cast_bytes
        if reduction.group_ranks != sharding.ranks:  # divided by more ranks than have a part
            pieces_bytes = sharding.sent_bytes * pieces
            left_bytes = pieces_bytes
        if sharding.sent_bytes != sharding.sum_bytes:
            pieces_bytes += sharding.sum_bytes * pieces
            left_bytes = sharding.sum_bytes * pieces
        visit_bytes = 0.0
        if sharding.offloads:
            piece = min(reduction.largest, self._largest_shard)
            visit_bytes = sharding.sum_bytes * piece + 8 * min(piece, _NORM_ELEMENTS)
        return largest_addition(
            [
                Added(buckets=cast_bytes + flat_bytes + pieces_bytes),
                Added(buckets=left_bytes, temporaries=visit_bytes),
            ]
        )

    def _handing_over(self, complete: float, handing: float) -> Added:
        reductions = self.sharding.reductions_while(complete, handing)
        layer = Added(gradients=self.sharding.weight_bytes * handing)
        return largest_addition(map(self._reduce, reductions)).with_more(layer)

    @property
    def _step(self) -> Added:
        sharding = self.sharding
        copies_bytes = sum(second_copies(sharding.tensors.all, sharding.setup).values())
        begin = Added(parameters=self.gathered.after_backward if self.gathered else 0)
        if sharding.offloads:
            update = Added(parameters=copies_bytes, temporaries=sharding.orthogonalising_bytes)
            return largest_addition([begin, update])
        overflow_bytes = 0.0
        if sharding.setup.config.precision == "fp16":
            overflow_bytes = (sharding.sum_bytes + 1) * sharding.owned_elements
        updates = map(self._update_bytes, sharding.groups)
        # Persistent parameters are released until the end of the step.
        update = Added(
            parameters=copies_bytes - self._persistent_bytes,
            temporaries=max(8 * self._largest_shard, overflow_bytes, *updates),
        )
        return largest_addition([begin, update])

    def _update_bytes(self, group: ShardedGroup) -> float:
        """Gradients of a sub-group end to end, their copy in the master's type, and Muon."""
        sharding = self.sharding
        is_cast = sharding.sum_bytes != sharding.master_bytes
        width = sharding.sum_bytes + (sharding.master_bytes if is_cast else 0)
        sub_group = max(group.sub_groups(sharding.zero.sub_group_size))
        return width * sub_group + sharding.orthogonalising_bytes_of(group)
