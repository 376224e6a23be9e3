"""Peak arithmetic rates of GPUs, for model FLOPs utilisation. Unknown hardware gives None, never a guess. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """One GPU model."""

    pattern: str
    """Lower-case text that identifies it in the name that the driver reports."""
    dense_16bit_flops: float
    """Peak dense FLOP/s with 16-bit inputs and fp32 accumulation; bf16, or fp16 where there is no bf16."""
    source: str
    """Where the rate is printed."""


#: First match wins, so the more specific names stand first. Vendors' tables often print the rate with sparsity, which
#: is twice these.
GPUS = (
    GPU("b200", 2250e12, "NVIDIA B200 datasheet"),
    GPU("h200", 989e12, "NVIDIA H200 datasheet"),
    GPU("h100 pcie", 756e12, "NVIDIA H100 datasheet"),
    GPU("h100", 989e12, "NVIDIA H100 datasheet (SXM)"),
    GPU("a100", 312e12, "NVIDIA A100 datasheet"),
    GPU("v100", 125e12, "NVIDIA V100 datasheet, fp16"),
    GPU("l4", 121e12, "NVIDIA L4 datasheet"),
    GPU("t4", 65e12, "NVIDIA T4 datasheet, fp16"),
    GPU("mi300x", 1307e12, "AMD MI300X datasheet"),
)


def find_gpu(device_name: str) -> GPU | None:
    """The GPU that the driver calls `device_name`, or None when the table does not have it (L40 is not an L4)."""
    words = device_name.lower().replace("-", " ")
    return next((gpu for gpu in GPUS if all(part in words.split() for part in gpu.pattern.split())), None)


def model_flops_utilisation(
    tokens_per_second_per_device: float, flops_per_token: int, device_name: str, is_16bit: bool
) -> float | None:
    """Fraction of the peak 16-bit rate that the model's own FLOPs reach (PaLM, Chowdhery et al. 2022, appendix B).

    None when the device is unknown, or the run is in fp32 whose peak is not in the table.
    """
    gpu = find_gpu(device_name)
    if gpu is None or not is_16bit:
        return None
    return tokens_per_second_per_device * flops_per_token / gpu.dense_16bit_flops
