"""Memory in use and at its peak: the device's on a GPU, the process's on a CPU."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import psutil
import torch

from llmscale.architecture.attention_kernels import ComputeCapability
from llmscale.model.gpt import device_capability


@dataclass(frozen=True)
class MeasuredMemory:
    """Peaks of one rank since its process started."""

    allocated_bytes: int
    """Bytes in tensors."""
    reserved_bytes: int
    """Bytes that the caching allocator holds."""


def measured_memory() -> MeasuredMemory | None:
    """Return the peaks of this rank's GPU; None on a CPU, where a process's size tells nothing about a GPU's memory."""
    if not torch.cuda.is_available():
        return None
    return MeasuredMemory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def peak_memory_bytes() -> int:
    """Return the peak allocated device memory, or on a CPU the peak resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def device_memory_bytes() -> int | None:
    """Return the total memory of this rank's GPU; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def gpu_capability() -> ComputeCapability | None:
    """Return the compute capability of this rank's GPU; None on a CPU."""
    if torch.cuda.is_available():
        return device_capability(torch.device("cuda"))
    return None


def has_bf16() -> bool:
    """Return whether this rank's device computes in bf16; CUDA devices older than Ampere only store it."""
    from deepspeed.accelerator import get_accelerator

    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return torch.bfloat16 in get_accelerator().supported_dtypes()


def free_memory_bytes() -> int:
    """Return how many bytes this process could still allocate on its GPU, or on a host without one."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    # Includes the part of the file cache that Linux would release.
    return int(psutil.virtual_memory().available)
