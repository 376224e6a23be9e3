"""Power, temperature and utilisation of this rank's GPU, by NVML through torch.

NVML's binding is nvidia-ml-py (`pip install -e '.[nvml]'`). What it, the driver or the GPU does not tell is None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GpuReading:
    """State of a GPU."""

    power_w: float | None = None
    """Power, of NVML's last second on most GPUs."""
    temperature_c: float | None = None
    gpu_utilisation: float | None = None
    """Fraction of NVML's last sampling period (up to a second) in which a kernel ran; says nothing of how well."""


def read_gpu(device: torch.device) -> GpuReading:
    """Return the state of a GPU within milliseconds; nothing of another device."""
    if device.type != "cuda":
        return GpuReading()
    milliwatts, percentage = _ask(torch.cuda.power_draw, device), _ask(torch.cuda.utilization, device)
    return GpuReading(
        power_w=None if milliwatts is None else milliwatts / 1000,
        temperature_c=_ask(torch.cuda.temperature, device),
        gpu_utilisation=None if percentage is None else percentage / 100,
    )


def _ask(query: Callable[[torch.device], int], device: torch.device) -> int | None:
    try:
        return query(device)
    except Exception:  # ModuleNotFoundError without the binding, RuntimeError without a driver, NVML's own
        return None
