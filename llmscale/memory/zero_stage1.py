"""Bytes of stage 1, and what it has in common with stage 2: the parts of a rank, and the optimizer step. No torch.

Follows deepspeed/runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from llmscale.memory.breakdown import Breakdown
from llmscale.memory.host_bytes import flat_host_bytes
from llmscale.memory.sharding import Sharding
from llmscale.memory.states import NOTHING, Added, States, largest_addition, resident_bytes


def stage1_states(sharding: Sharding) -> States:
    """Optimizer states divided; all gradients live to the end of the backward pass, then go through the bucket."""
    weight_bytes = sharding.weight_bytes
    sum_bytes = sharding.sum_bytes
    sums_bytes = sum_bytes * sharding.trained_elements
    bucket_bytes = _bucket_bytes(sharding)
    if sharding.accumulates:
        before = Added(gradients=sums_bytes, buckets=bucket_bytes)
    else:
        before = NOTHING
    # The last gradient exists in both types.
    last_bytes = 0
    if sum_bytes != weight_bytes:
        last_bytes = weight_bytes * sharding.last_elements
        if sharding.accumulates:
            last_bytes += sum_bytes * sharding.last_elements

    def gradients(complete: float) -> Added:
        if sharding.accumulates:
            return before._replace(gradients=before.gradients + sharding.waiting_after(complete))
        return Added(
            gradients=sum_bytes * min(complete, sharding.trained_elements),
            buckets=bucket_bytes if complete > 0 else 0,
        )

    def handing_over(complete: float, handing: float) -> Added:
        cast_bytes = sum_bytes * handing if sum_bytes != weight_bytes else 0
        is_first = not sharding.accumulates and not complete
        return Added(gradients=weight_bytes * handing + cast_bytes, buckets=bucket_bytes if is_first else 0)

    complete_sums = Added(gradients=sums_bytes + last_bytes, buckets=bucket_bytes)
    return States(
        resident=flat_resident_bytes(sharding),
        before=before,
        gradients=gradients,
        handing=handing_over,
        end=largest_addition([complete_sums, *_reductions(sharding)]),
        step=Added(
            gradients=part_bytes(sharding) + sharding.kept_in_step,
            buckets=bucket_bytes if keeps_bucket(sharding) else 0,
            temporaries=update_bytes(sharding),
        ),
        host_bytes=flat_host_bytes(sharding),
    )


def _bucket_bytes(sharding: Sharding) -> int:
    if sharding.copies_to_bucket:
        return sharding.bucket_elements * sharding.sum_bytes
    return 0


def keeps_bucket(sharding: Sharding) -> bool:
    """Return whether stage 1 keeps the bucket in the step: gradients of other ranks are views of it."""
    return sharding.sums_part_in_fp32 and sharding.ranks > 1


def _reductions(sharding: Sharding) -> Iterator[Added]:
    """Yield the peaks of reducing all gradients, group by group, after the backward pass.

    A gradient that fits is freed as it is copied into the bucket. A bucket of one rank's gradients needs no flat copy,
    unless the rank adds them one by one to sums in fp32.
    """
    sum_bytes = sharding.sum_bytes
    sent_bytes = sharding.sent_bytes
    sums_part = sharding.sums_part_in_fp32
    bucket_bytes = _bucket_bytes(sharding)
    left_elements = float(sharding.trained_elements)
    part_made_bytes = 0.0
    groups_with_sums = set[int]()
    for pieces in _buckets(sharding):
        elements = sum(piece.elements for piece in pieces)
        owned = max(piece.owned for piece in pieces)
        for piece in pieces:
            if piece.elements <= sharding.bucket_elements and sharding.copies_to_bucket:
                left_elements -= piece.elements
        ranks = {rank for piece in pieces for rank in (piece.first_rank, piece.last_rank)}
        is_one_slice = len(ranks) == 1 and not (sums_part and ranks == {0} and len(pieces) > 1)
        flat_bytes = 0 if is_one_slice else sum_bytes * elements
        cast_bytes = sent_bytes * elements if sent_bytes != sum_bytes else 0
        part_of_bucket_bytes = 0.0
        for piece in pieces:
            if sums_part and piece.owned and piece.group not in groups_with_sums:
                groups_with_sums.add(piece.group)
                part_of_bucket_bytes += 4 * sharding.groups[piece.group].part_elements
        part_made_bytes += part_of_bucket_bytes
        now = Added(gradients=sum_bytes * left_elements + part_made_bytes, buckets=bucket_bytes)
        # Without a bucket the sums are made when the gradients have travelled.
        if sharding.copies_to_bucket:
            travelling = now
        else:
            travelling = now._replace(gradients=now.gradients - part_of_bucket_bytes)
        yield travelling._replace(buckets=bucket_bytes + flat_bytes + cast_bytes)
        if sums_part and sent_bytes != 4:
            yield now._replace(buckets=bucket_bytes + (cast_bytes or flat_bytes), temporaries=4 * owned)
        if owned and sharding.offloads:
            yield now._replace(temporaries=8 * owned)
        elif owned and not sums_part and not part_made_bytes:
            part_made_bytes = part_bytes(sharding)
            yield now._replace(gradients=now.gradients + part_made_bytes)
        for piece in pieces:
            if piece.owned and piece.elements > sharding.bucket_elements and sharding.copies_to_bucket:
                left_elements -= piece.elements


class _Piece(NamedTuple):
    """A gradient in a bucket."""

    elements: int
    owned: float
    """Elements of which the rank has the states."""
    first_rank: int
    """Rank of its first element."""
    last_rank: int
    """Rank of its last element."""
    group: int
    """Index of its group."""


def _buckets(sharding: Sharding) -> list[list[_Piece]]:
    """Return the gradients of each reduction, which closes before one that does not fit."""
    buckets = [list[_Piece]()]
    size = 0
    for index, group in enumerate(sharding.groups):
        begin = 0
        for tensor in group.tensors:
            end = begin + tensor.elements
            piece = _Piece(
                tensor.elements,
                owned=max(0.0, min(tensor.elements, group.part_elements - begin)),
                first_rank=int(begin / group.part_elements),
                last_rank=int((end - 1) / group.part_elements),
                group=index,
            )
            if buckets[-1] and size + tensor.elements > sharding.bucket_elements:
                buckets.append([])
                size = 0
            buckets[-1].append(piece)
            begin = end
            size += tensor.elements
    return buckets


def flat_resident_bytes(sharding: Sharding) -> Breakdown:
    """Return what stays between steps: weights, and states or, under offload, room for the largest parameter."""
    weights = sharding.weight_bytes * sharding.trained_elements + sharding.frozen_bytes
    if sharding.offloads:
        return resident_bytes(weights, buckets=sharding.weight_bytes * sharding.largest_elements)
    return resident_bytes(weights, optimizer=sharding.state_bytes)


def part_bytes(sharding: Sharding) -> float:
    """Gradients of the rank's part: sums in fp32, or complete gradients of every parameter that it has a part of."""
    if sharding.sums_part_in_fp32:
        return 4 * sharding.owned_elements
    if sharding.offloads:
        return 0
    return sharding.weight_bytes * sum(group.owned_tensors_elements for group in sharding.groups)


def norm_bytes(sharding: Sharding) -> float:
    """The norm of one gradient is taken in fp64."""
    return 8 * sharding.largest_piece


def update_bytes(sharding: Sharding) -> float:
    """The norm; group by group, without sums in fp32, gradients end to end; their copy in the master's type; Muon."""
    master_bytes = sharding.master_bytes
    if sharding.sums_part_in_fp32 or sharding.offloads:
        cast_bytes = master_bytes if master_bytes != 4 else 0
        casts = (cast_bytes * group.part_elements for group in sharding.groups)
        norm = 0 if sharding.offloads else norm_bytes(sharding)
        return max(norm, sharding.orthogonalising_bytes, *casts)
    is_cast = sharding.weight_bytes != master_bytes
    flat_bytes = sharding.weight_bytes + (master_bytes if is_cast else 0)
    updates = (
        max(
            flat_bytes * group.part_elements,
            master_bytes * group.part_elements + sharding.orthogonalising_bytes_of(group),
        )
        for group in sharding.groups
    )
    return max(norm_bytes(sharding), *updates)
