"""What this rank's memory holds and held: the device's on a GPU, the process's on a CPU."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MeasuredMemory:
    """Peaks of one rank since its process started."""

    allocated_bytes: int
    """In tensors."""
    reserved_bytes: int
    """Held by the caching allocator."""


def measured_memory() -> MeasuredMemory | None:
    """Peaks of this rank's GPU; None on a CPU, where a process's size is no measure of what a GPU would hold."""
    if not torch.cuda.is_available():
        return None
    return MeasuredMemory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def peak_memory_bytes() -> int:
    """Peak allocated device memory, or on a CPU the peak resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def device_memory_bytes() -> int | None:
    """All memory of this rank's GPU; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
