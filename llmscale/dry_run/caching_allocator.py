"""How much PyTorch's caching allocator would reserve for a recorded sequence of allocations. No torch.

The rules of c10/cuda/CUDACachingAllocator.cpp with its default settings and one stream: sizes are multiples of 512
bytes; up to 1 MiB they share segments of 2 MiB, below 10 MiB segments of 20 MiB, and larger ones get a segment of their
own in multiples of 2 MiB; the smallest free block that fits is taken and split; freed neighbours merge; segments stay.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from llmscale.memory.breakdown import ALLOCATION_BYTES, allocated_bytes

_MIB = 2**20
#: Largest allocation from the pool of small blocks.
SMALL_BYTES = _MIB
#: Segment for small blocks, and what the size of a large segment is a multiple of.
SMALL_SEGMENT_BYTES = 2 * _MIB
#: Segment for large blocks below OWN_SEGMENT_BYTES.
LARGE_SEGMENT_BYTES = 20 * _MIB
#: From here on an allocation has a segment of its own size.
OWN_SEGMENT_BYTES = 10 * _MIB


class AllocationEvent(Protocol):
    """A storage appears (`num_bytes` > 0) or goes (< 0)."""

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
    """Allocations are known by numbers that the caller gives."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self._taken: dict[int, _Block] = {}
        self._blocks: dict[int, _Block] = {}
        """Free blocks by address."""
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """(size, address) of the free blocks in ascending order, small and large apart."""
        self._next_address = 0

    def allocate(self, number: int, num_bytes: int) -> None:
        """Raises ValueError for a number that is taken, and for nothing to allocate."""
        if number in self._taken or num_bytes < 1:
            raise ValueError(f"allocation {number} of {num_bytes} bytes: taken already, or empty")
        size = allocated_bytes(num_bytes, 1)
        block = self._find_free(size) or self._new_segment(size)
        self._split(block, size)
        self._taken[number] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, number: int) -> None:
        """Raises KeyError for a number that is not allocated."""
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
        block = _Block(self._next_address, segment, small=size <= SMALL_BYTES)
        self._next_address += segment
        self.reserved_bytes += segment
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _split(self, block: _Block, size: int) -> None:
        """Give back what the allocation does not need; a large block's rest only above 1 MiB."""
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


def replay(events: Iterable[AllocationEvent], alive: Mapping[int, int] | None = None) -> CachingAllocator:
    """The allocator after these events, with its peaks. `alive`: bytes by storage before the first event."""
    allocator = CachingAllocator()
    for storage, num_bytes in (alive or {}).items():
        allocator.allocate(storage, num_bytes)
    for event in events:
        if event.num_bytes > 0:
            allocator.allocate(event.storage, event.num_bytes)
        else:
            allocator.free(event.storage)
    return allocator


def _segment_bytes(size: int) -> int:
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


def _merge(first: _Block, second: _Block) -> _Block:
    """Two neighbours of one segment, the lower first, as one block."""
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
