"""Bytes of one GPU's memory by category, and their formats. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

GIB = 2**30
MIB = 2**20

#: CUDA's caching allocator hands out blocks of a multiple of this many bytes (c10/cuda/CUDACachingAllocator.cpp,
#: kMinBlockSize).
ALLOCATION_BYTES = 512


def allocated_bytes(elements: int, bytes_per_element: int) -> int:
    """Return the bytes that a tensor takes on the GPU: rounded up to blocks, 0 for an empty one."""
    return -(-elements * bytes_per_element // ALLOCATION_BYTES) * ALLOCATION_BYTES


@dataclass(frozen=True)
class Breakdown:
    """Live bytes of one rank's GPU at one moment, as PyTorch allocates them (multiples of ALLOCATION_BYTES)."""

    parameters_bytes: int = 0
    """Weights that the forward pass reads: stored in the training precision, or gathered and cast for use."""
    gradients_bytes: int = 0
    """Gradients of the model's parameters, accumulated or kept for the optimizer step."""
    optimizer_bytes: int = 0
    """The optimizer's moments, and fp32 master weights where they are a copy."""
    activations_bytes: int = 0
    """Tensors that the forward pass keeps for the backward pass, and the inputs of a micro-batch."""
    logits_bytes: int = 0
    """Output head and loss."""
    buckets_bytes: int = 0
    """Buffers through which gradients and parameters are communicated."""
    temporaries_bytes: int = 0
    """Short-lived tensors: casts, the copy of a gradient for its norm, work space of a backward kernel."""

    @property
    def total_bytes(self) -> int:
        # Spelt out, as in __add__: estimates of large models do this thousands of times.
        memory = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes
        return memory + self.logits_bytes + self.buckets_bytes + self.temporaries_bytes

    def __add__(self, other: Breakdown) -> Breakdown:
        return Breakdown(
            parameters_bytes=self.parameters_bytes + other.parameters_bytes,
            gradients_bytes=self.gradients_bytes + other.gradients_bytes,
            optimizer_bytes=self.optimizer_bytes + other.optimizer_bytes,
            activations_bytes=self.activations_bytes + other.activations_bytes,
            logits_bytes=self.logits_bytes + other.logits_bytes,
            buckets_bytes=self.buckets_bytes + other.buckets_bytes,
            temporaries_bytes=self.temporaries_bytes + other.temporaries_bytes,
        )

    def as_dict(self) -> dict[str, int]:
        """Return category -> bytes, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def format_size(num_bytes: float) -> str:
    """Format as `1.25 GiB`, `312.4 GiB`, or `48.0 MiB` for a small size."""
    if abs(num_bytes) < GIB / 10:
        return f"{num_bytes / MIB:.1f} MiB"
    if abs(num_bytes) < 100 * GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / GIB:,.1f} GiB"


def describe_breakdown(breakdown: Breakdown) -> str:
    """Format as `parameters 1.20 + gradients 0.60 + activations 3.41 GiB`, without categories that round to nothing."""
    unit, name = (GIB, "GiB") if breakdown.total_bytes >= GIB / 10 else (MIB, "MiB")
    parts = {key.removesuffix("_bytes"): value / unit for key, value in breakdown.as_dict().items()}
    return " + ".join(f"{key} {value:.2f}" for key, value in parts.items() if value >= 0.005) + f" {name}"
