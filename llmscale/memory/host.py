"""Host memory of one rank, with what page-locking adds. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.config.deepspeed.sections import Dtype
from llmscale.memory.zero_settings import BYTES_PER_ELEMENT


@dataclass
class HostMemory:
    """Adds up tensors in host memory."""

    pin_memory: bool
    num_bytes: int = 0

    def pinned(self, elements: int, dtype: Dtype) -> None:
        """A buffer that DeepSpeed page-locks where the config says so. PyTorch's allocator of page-locked memory hands
        out powers of two (aten/src/ATen/core/CachingHostAllocator.h)."""
        num_bytes = elements * BYTES_PER_ELEMENT[dtype]
        self.num_bytes += 1 << (num_bytes - 1).bit_length() if self.pin_memory and num_bytes else num_bytes

    def pageable(self, elements: int, dtype: Dtype) -> None:
        """Ordinary memory."""
        self.num_bytes += elements * BYTES_PER_ELEMENT[dtype]
