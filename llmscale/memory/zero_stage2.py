"""Bytes of stage 2, and of stage 1 with overlap_comm, whose gradients go the same way. No torch.

Follows deepspeed/runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from llmscale.memory.host_bytes import flat_host_bytes
from llmscale.memory.sharding import Reduction, Sharding
from llmscale.memory.states import Added, States, largest_addition
from llmscale.memory.zero_stage1 import (
    flat_resident_bytes,
    keeps_bucket,
    part_bytes,
    update_bytes,
)


@dataclass(frozen=True)
class Stage2:
    """Gradients divided too: each goes through the bucket at once, and the rank keeps its part.

    Stage 1 with overlap_comm reduces alike, but sums all gradients of earlier micro-steps.
    """

    sharding: Sharding

    def states(self) -> States:
        """Return the bytes of every moment."""
        stays = self.is_stage1 and keeps_bucket(self.sharding)
        return States(
            resident=flat_resident_bytes(self.sharding),
            before=Added(gradients=self._earlier_bytes, buckets=self._bucket_bytes if self._sums_bytes else 0),
            gradients=self._gradients,
            handing=self._handing_over,
            end=self._end,
            step=Added(
                gradients=self._part_bytes + (self.sharding.kept_in_step if self.is_stage1 else 0),
                buckets=self._bucket_bytes if stays else 0,
                temporaries=update_bytes(self.sharding),
            ),
            moving_bytes=self._sums_bytes + max(sum(self._reduce(one)) for one in self.sharding.reductions),
            host_bytes=flat_host_bytes(self.sharding),
        )

    @cached_property
    def is_stage1(self) -> bool:
        return self.sharding.setup.stage == 1

    @cached_property
    def _gradient_bytes(self) -> int:
        """Bytes of a gradient in the bucket."""
        return self.sharding.sum_bytes if self.is_stage1 else self.sharding.weight_bytes

    @cached_property
    def _bucket_bytes(self) -> int:
        if not self.sharding.copies_to_bucket:
            return 0
        buckets = 2 if self.sharding.zero.overlap_comm else 1
        return buckets * self.sharding.bucket_elements * self._gradient_bytes

    @cached_property
    def _first_owned(self) -> int:
        """Gradients before the first that the rank has a part of."""
        return min(place for place, _ in self.sharding.first_owned)

    @cached_property
    def _parts(self) -> list[tuple[int, float]]:
        """(gradients that have been reduced when it is allocated, bytes) of each buffer of the rank's part."""
        sharding = self.sharding
        if sharding.sums_part_in_fp32:
            return [(sharding.reduced_at(place), 4 * group.part_elements) for place, group in sharding.first_owned]
        # One buffer of all tensors that the rank has a part of.
        return [(sharding.reduced_at(self._first_owned), part_bytes(sharding))]

    @cached_property
    def _part_bytes(self) -> float:
        """Bytes of the rank's part."""
        return sum(num_bytes for _, num_bytes in self._parts)

    @cached_property
    def _sums_bytes(self) -> int:
        """Bytes of complete sums, which are freed as gradients are added and reduced."""
        if not self.is_stage1 or not self.sharding.accumulates:
            return 0
        return self._gradient_bytes * self.sharding.trained_elements

    @cached_property
    def _earlier_bytes(self) -> float:
        """Bytes that earlier micro-steps leave."""
        if self.is_stage1:
            return self._sums_bytes
        return self._part_bytes if self.sharding.accumulates else 0

    @cached_property
    def _growing_parts(self) -> list[tuple[int, float]]:
        """The buffers that a micro-step allocates, as in `_parts`."""
        is_there = not self._sums_bytes and self._earlier_bytes == self._part_bytes
        if self.sharding.sums_part_in_fp32:
            return [] if is_there else self._parts
        # A second buffer is added to the sums at the end. Without a bucket the gradients stay where they are.
        return self._parts if self.sharding.copies_to_bucket else []

    @cached_property
    def _keeps_uncopied(self) -> bool:
        """True if gradients that are not copied into the bucket stay after their reduction."""
        if self.is_stage1 or not self.sharding.copies_to_bucket:
            return True
        if self.sharding.offloads:
            return self.sharding.accumulates
        return self.sharding.sums_part_in_fp32

    def _gradients(self, complete: float) -> Added:
        sharding = self.sharding
        handed = sharding.handed_over(complete)
        grown = sum(num_bytes for place, num_bytes in self._growing_parts if handed > place)
        uncopied = 0.0
        if not sharding.copies_to_bucket:
            waiting = sharding.waiting_for_reduction(handed)
            uncopied = self._gradient_bytes * (sharding.kept_elements(handed - waiting) + waiting)
        elif self._keeps_uncopied:
            uncopied = self._gradient_bytes * sharding.kept_elements(handed)
        if self._sums_bytes:
            reduced = self._gradient_bytes * min(handed, sharding.trained_elements)
        else:
            reduced = 0
        has_bucket = self._sums_bytes > 0 or complete > 0
        return Added(
            gradients=self._earlier_bytes - reduced + grown + uncopied + sharding.waiting_after(complete),
            buckets=self._bucket_bytes if has_bucket else 0,
        )

    def _reduce(self, reduction: Reduction) -> Added:
        """The bucket is copied if it has gradients of several ranks, and cast; the rank's pieces are added in fp32."""
        sharding = self.sharding
        sums_part = sharding.sums_part_in_fp32
        elements = reduction.travelling
        flat_bytes = self._gradient_bytes * elements if reduction.slices > 1 else 0
        if sharding.sent_bytes != self._gradient_bytes:
            cast_bytes = sharding.sent_bytes * elements
        else:
            cast_bytes = 0
        owned = reduction.largest_owned
        new_bytes = sum(num_bytes for place, num_bytes in self._growing_parts if place == reduction.end)
        piece_bytes = 4 * owned if sums_part and sharding.sent_bytes != 4 else 0
        # A gradient beyond the bucket is there until it has been reduced, or longer.
        is_kept = reduction.largest_owned == 0 if self.is_stage1 else self._keeps_uncopied
        is_beyond = reduction.largest > sharding.bucket_elements and not is_kept
        complete_bytes = self._gradient_bytes * reduction.largest if is_beyond else 0
        copied_bytes = max(flat_bytes + cast_bytes, (cast_bytes or flat_bytes) + piece_bytes)
        visit_bytes = max(0, (8 * owned if sharding.offloads else 0) - copied_bytes)
        if sums_part:
            return Added(gradients=complete_bytes + new_bytes, buckets=copied_bytes, temporaries=visit_bytes)
        if copied_bytes >= new_bytes:
            return Added(gradients=complete_bytes, buckets=copied_bytes, temporaries=visit_bytes)
        return Added(gradients=complete_bytes + new_bytes, temporaries=visit_bytes)

    def _handing_over(self, complete: float, handing: float) -> Added:
        """The layer's gradients wait while the bucket is reduced."""
        sharding = self.sharding
        if self._gradient_bytes != sharding.weight_bytes:
            cast_bytes = self._gradient_bytes * handing
        else:
            cast_bytes = 0
        is_first = not complete and not self._sums_bytes
        layer = Added(
            gradients=sharding.weight_bytes * handing + cast_bytes,
            buckets=self._bucket_bytes if is_first else 0,
        )
        reductions = sharding.reductions_while(complete, handing)
        return layer.with_more(largest_addition(map(self._reduce, reductions)))

    @property
    def _end(self) -> Added:
        """After the last gradient, or while it is handed over."""
        sharding = self.sharding
        without_waiting = Added(gradients=-sharding.waiting_bytes)
        everything = sharding.trained_elements + sharding.tied_elements
        complete = self._gradients(everything).with_more(without_waiting)
        before_last = sharding.complete_before_last
        last = self._gradients(before_last).with_more(self._handing_over(before_last, sharding.last_elements))
        return largest_addition(
            [complete.with_more(self._reduce(sharding.reductions[-1])), last.with_more(without_waiting)]
        )
