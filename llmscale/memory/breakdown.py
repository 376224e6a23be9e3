"""Bytes of one GPU's memory by what they are for. No torch."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from functools import cached_property


@dataclass(frozen=True)
class Breakdown:
    """Live bytes of one rank's GPU at one moment, as PyTorch allocates them (multiples of ALLOCATION_BYTES)."""

    parameters_bytes: int = 0
    """The weights that the forward pass reads: stored in the training precision, or gathered and cast for use."""
    gradients_bytes: int = 0
    """Gradients of the model's parameters, accumulated or kept for the optimizer step."""
    optimizer_bytes: int = 0
    """fp32 master weights, where they are a copy, and the optimizer's moments."""
    activations_bytes: int = 0
    """What the forward pass keeps for the backward pass, and the inputs of a micro-batch."""
    logits_bytes: int = 0
    """Output head and loss."""
    buckets_bytes: int = 0
    """Buffers through which gradients and parameters are communicated."""
    temporaries_bytes: int = 0
    """Everything short-lived besides: casts, the copy of a gradient for its norm, work space of a backward kernel."""

    @cached_property
    def total_bytes(self) -> int:
        # Spelt out, as in __add__: estimates of large models do this thousands of times.
        memory = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes
        return memory + self.logits_bytes + self.buckets_bytes + self.temporaries_bytes

    def __add__(self, other: Breakdown) -> Breakdown:
        return Breakdown(
            self.parameters_bytes + other.parameters_bytes,
            self.gradients_bytes + other.gradients_bytes,
            self.optimizer_bytes + other.optimizer_bytes,
            self.activations_bytes + other.activations_bytes,
            self.logits_bytes + other.logits_bytes,
            self.buckets_bytes + other.buckets_bytes,
            self.temporaries_bytes + other.temporaries_bytes,
        )

    def __sub__(self, other: Breakdown) -> Breakdown:
        return Breakdown(*(mine - others for mine, others in zip(astuple(self), astuple(other), strict=True)))

    def as_dict(self) -> dict[str, int]:
        """Category -> bytes, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


#: CUDA's caching allocator hands out blocks of a multiple of this many bytes (c10/cuda/CUDACachingAllocator.cpp,
#: kMinBlockSize).
ALLOCATION_BYTES = 512


def allocated_bytes(elements: int, bytes_per_element: int) -> int:
    """What a tensor takes on the GPU: rounded up to whole blocks, 0 for an empty one."""
    return -(-elements * bytes_per_element // ALLOCATION_BYTES) * ALLOCATION_BYTES
