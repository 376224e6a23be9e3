from __future__ import annotations

import random

import pytest

from llmscale.dry_run.caching_allocator import CachingAllocator, least_capacity_bytes
from llmscale.dry_run.tracker import Event

KIB, MIB = 2**10, 2**20


def follow(*sizes: tuple[int, int]) -> CachingAllocator:
    """The allocator after (storage, bytes) in order, bytes negative for a release."""
    allocator = CachingAllocator()
    allocator.follow(Event(storage, num_bytes, "") for storage, num_bytes in sizes)
    return allocator


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of no more than 1 MiB is not split off
        (33 * MIB, 34 * MIB, 34 * MIB),
    ],
)
def test_the_size_decides_the_segment(asked: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, asked)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_small_allocations_share_a_segment() -> None:
    allocator = CachingAllocator()
    for number in range(4096):
        allocator.allocate(number, 512)
    assert allocator.allocated_bytes == allocator.reserved_bytes == 2 * MIB
    allocator.allocate(4096, 512)
    assert allocator.reserved_bytes == 4 * MIB


def test_small_and_large_never_share() -> None:
    allocator = follow((0, 2 * MIB), (1, KIB))
    assert allocator.reserved_bytes == 22 * MIB


def test_segments_stay_reserved_and_are_used_again() -> None:
    allocator = follow((0, 64 * MIB), (0, -64 * MIB))
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 64 * MIB)
    allocator.allocate(1, 32 * MIB)
    allocator.allocate(2, 32 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (64 * MIB, 64 * MIB)


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = follow((0, 64 * MIB), (1, 32 * MIB), (0, -64 * MIB), (1, -32 * MIB), (2, 30 * MIB))
    allocator.allocate(3, 64 * MIB)
    assert allocator.reserved_bytes == 96 * MIB


def test_freed_neighbours_merge() -> None:
    pieces = [(number, 4 * MIB) for number in range(5)]
    allocator = follow(*pieces)
    assert allocator.reserved_bytes == 20 * MIB
    for number in (1, 3, 2):
        allocator.free(number)
    allocator.allocate(9, 12 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_fragments_are_no_use_for_a_larger_tensor() -> None:
    pieces = [(number, 4 * MIB) for number in range(5)]
    allocator = follow(*pieces, (1, -4 * MIB), (3, -4 * MIB))
    allocator.allocate(9, 8 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.peak_allocated_bytes == 20 * MIB


def test_after_any_history_everything_merges_back() -> None:
    draw = random.Random(0)
    allocator, alive = CachingAllocator(), set()
    for number in range(3000):
        if alive and draw.random() < 0.48:
            freed = draw.choice(sorted(alive))
            alive.remove(freed)
            allocator.free(freed)
        else:
            alive.add(number)
            allocator.allocate(number, draw.randrange(MIB + 1, 10 * MIB))
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    for number in alive:
        allocator.free(number)
    assert allocator.allocated_bytes == 0
    reserved = allocator.reserved_bytes
    assert reserved % (20 * MIB) == 0
    for segment in range(reserved // (20 * MIB)):
        allocator.allocate(10_000 + segment, 20 * MIB)
    assert allocator.reserved_bytes == reserved


def test_a_number_is_one_allocation() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 512)
    with pytest.raises(ValueError, match="allocation 0 of 512 bytes: taken already"):
        allocator.allocate(0, 512)
    with pytest.raises(KeyError):
        allocator.free(1)


def test_free_segments_are_given_back_before_memory_runs_out() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.allocate(0, 60 * MIB)
    allocator.free(0)
    allocator.allocate(1, 80 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    with pytest.raises(MemoryError):
        allocator.allocate(2, 30 * MIB)


def test_a_segment_in_use_is_not_given_back() -> None:
    allocator = CachingAllocator({0: 40 * MIB, 1: 2 * MIB}, capacity_bytes=100 * MIB)
    allocator.free(0)
    allocator.allocate(2, 20 * MIB)  # splits the free 40 MiB
    with pytest.raises(MemoryError):
        allocator.allocate(3, 60 * MIB)


def test_the_least_capacity_lies_between_what_is_allocated_and_what_is_reserved() -> None:
    """40 MiB are freed before 60 MiB are needed: they can be given back, unless a piece of them is in use."""
    whole = [Event(0, 40 * MIB, ""), Event(0, -40 * MIB, ""), Event(1, 60 * MIB, "")]
    assert least_capacity_bytes({}, whole) == pytest.approx(60 * MIB, rel=0.002)
    pieces = [Event(0, 40 * MIB, ""), Event(0, -40 * MIB, ""), Event(2, 20 * MIB, ""), Event(1, 60 * MIB, "")]
    assert least_capacity_bytes({}, pieces) == pytest.approx(100 * MIB, rel=0.002)
