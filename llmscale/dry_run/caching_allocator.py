"""Memory that PyTorch's caching allocator reserves, and needs at least, for recorded allocations. No torch.

Rules of c10/cuda/CUDACachingAllocator.cpp with its default settings and one stream: sizes are multiples of 512
bytes; up to 1 MiB they share segments of 2 MiB, below 10 MiB segments of 20 MiB, and larger ones get their own segment
in multiples of 2 MiB; the smallest free block that fits is split; freed neighbours merge; completely free segments are
released when memory runs out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmscale.memory.breakdown import ALLOCATION_BYTES, allocated_bytes

_MIB = 2**20
#: Largest allocation from the pool of small blocks.
SMALL_BYTES = _MIB
#: Segment for small blocks. Sizes of large segments are multiples of it.
SMALL_SEGMENT_BYTES = 2 * _MIB
#: Segment for large blocks below OWN_SEGMENT_BYTES.
LARGE_SEGMENT_BYTES = 20 * _MIB
#: Smallest allocation with its own segment.
OWN_SEGMENT_BYTES = 10 * _MIB


class AllocationEvent(Protocol):
    """Allocation (`num_bytes` > 0) or release (< 0) of a storage."""

    @property
    def storage(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(eq=False)
class _Block:
    address: int
    size: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


class CachingAllocator:
    """Simulated allocator. The caller numbers the allocations."""

    def __init__(self, alive: Mapping[int, int] | None = None, capacity_bytes: int | None = None) -> None:
        """Begin with the allocations `alive` (bytes by number) side by side, as after `empty_cache()`.

        This and later allocations raise MemoryError if they exceed `capacity_bytes`.
        """
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self._taken: dict[int, _Block] = {}
        self._blocks: dict[int, _Block] = {}
        """Free blocks by address."""
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """Ascending (size, address) of the free blocks, small (True) and large."""
        self._next_address = 0
        self._capacity_bytes = capacity_bytes
        for number, num_bytes in (alive or {}).items():
            self.allocate(number, num_bytes)

    def follow(self, events: Iterable[AllocationEvent]) -> None:
        """Replay recorded allocations and releases."""
        for event in events:
            if event.num_bytes > 0:
                self.allocate(event.storage, event.num_bytes)
            else:
                self.free(event.storage)

    def allocate(self, number: int, num_bytes: int) -> None:
        """Allocate. Raises ValueError for a number in use, or less than one byte."""
        if number in self._taken or num_bytes < 1:
            raise ValueError(f"allocation {number} of {num_bytes} bytes: taken already, or empty")
        size = allocated_bytes(num_bytes, 1)
        block = self._find_free(size) or self._new_segment(size)
        self._split(block, size)
        self._taken[number] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, number: int) -> None:
        """Release an allocation. Raises KeyError for an unknown number."""
        block = self._taken.pop(number)
        self.allocated_bytes -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._withdraw(neighbour)
                block = _merge(*sorted((block, neighbour), key=lambda one: one.address))
        self._offer(block)

    def _find_free(self, size: int) -> _Block | None:
        candidates = self._free[size <= SMALL_BYTES]
        place = bisect_left(candidates, (size, 0))
        if place == len(candidates):
            return None
        block = self._blocks[candidates[place][1]]
        self._withdraw(block)
        return block

    def _new_segment(self, size: int) -> _Block:
        segment = _segment_bytes(size)
        if self._capacity_bytes is not None and self.reserved_bytes + segment > self._capacity_bytes:
            self._release_free_segments()
            if self.reserved_bytes + segment > self._capacity_bytes:
                raise MemoryError(f"{segment} bytes more than {self.reserved_bytes} of {self._capacity_bytes}")
        block = _Block(self._next_address, segment, small=size <= SMALL_BYTES)
        self._next_address += segment
        self.reserved_bytes += segment
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _release_free_segments(self) -> None:
        """Return completely free segments to CUDA, as before an allocation fails."""
        for block in list(self._blocks.values()):
            if block.before is None and block.after is None:
                self._withdraw(block)
                self.reserved_bytes -= block.size

    def _split(self, block: _Block, size: int) -> None:
        """Make the unused rest of a block a free block; of a large block only a rest above 1 MiB."""
        rest = block.size - size
        if rest < ALLOCATION_BYTES or (not block.small and rest <= SMALL_BYTES):
            return
        remaining = _Block(block.address + size, rest, block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = remaining
        block.size, block.after = size, remaining
        self._offer(remaining)

    def _offer(self, block: _Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        insort(self._free[block.small], (block.size, block.address))

    def _withdraw(self, block: _Block) -> None:
        block.free = False
        del self._blocks[block.address]
        candidates = self._free[block.small]
        candidates.pop(bisect_left(candidates, (block.size, block.address)))


def least_capacity_bytes(alive: Mapping[int, int], events: Sequence[AllocationEvent]) -> int:
    """Return the smallest GPU memory on which these events succeed, to a thousandth."""
    free = CachingAllocator(alive)
    free.follow(events)
    low, high = free.peak_allocated_bytes, free.peak_reserved_bytes
    while high - low > high // 1000:
        middle = (low + high) // 2
        if _succeeds(alive, events, middle):
            high = middle
        else:
            low = middle
    return high


def _succeeds(alive: Mapping[int, int], events: Iterable[AllocationEvent], capacity_bytes: int) -> bool:
    try:
        CachingAllocator(alive, capacity_bytes).follow(events)
    except MemoryError:
        return False
    return True


def _segment_bytes(size: int) -> int:
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


def _merge(first: _Block, second: _Block) -> _Block:
    """Merge two neighbouring blocks of a segment, the lower one first."""
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
