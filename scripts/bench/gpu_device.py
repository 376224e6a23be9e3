"""The device that gpu.py's cells run on. No torch here: it is asked for in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass

from children import why_it_failed
from machine import gpu_names

from llmscale.cluster.doctor.system import gather_system
from llmscale.config.hardware import GPU, find_gpu
from llmscale.memory.estimate import MemoryEstimate

GIB = 2**30
_ASK = "import torch; p = torch.cuda.get_device_properties(0); print(p.total_memory, p.major, p.minor, p.name, sep='|')"


@dataclass(frozen=True)
class Device:
    """What the cells run on."""

    kind: str
    """"cuda" or "cpu"."""
    name: str
    """As the driver has it."""
    memory_bytes: int | None
    capability: tuple[int, int] | None

    @property
    def gpu(self) -> GPU | None:
        return find_gpu(self.name) if self.kind == "cuda" else None

    @property
    def precision(self) -> str:
        """A CPU's is fp32, in which its blocks can be compiled."""
        return "bf16" if self.kind == "cuda" else "fp32"

    @property
    def label(self) -> str:
        """For file names."""
        return self.gpu.name if self.gpu else re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


def find_device(kind: str) -> Device:
    """The first GPU. SystemExit, with what to do, when torch cannot use it."""
    if kind == "cpu":
        return Device("cpu", "cpu", None, None)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"error: torch sees no CUDA GPU here ({why_it_failed(done)}); nvidia-smi names {gpu_names() or 'none'}. "
            "Fix: a machine with a GPU and a driver for torch's CUDA, or a torch for the driver's (pip install torch "
            "--index-url "
            "https://download.pytorch.org/whl/cu126), or --device cpu."
        )
    memory, major, minor, name = done.stdout.strip().split("|", 3)
    return Device("cuda", name, int(memory), (int(major), int(minor)))


def why_it_does_not_fit(estimate: MemoryEstimate | None, device: Device) -> str | None:
    """By the estimate, whole GPU and whole host; None where it fits, or nobody knows."""
    if estimate is None or device.memory_bytes is None:
        return None
    if estimate.total_bytes > device.memory_bytes:
        return f"{estimate.total_bytes / GIB:.0f} GiB estimated, the GPU has {device.memory_bytes / GIB:.0f}"
    host_bytes = gather_system().memory_bytes
    if estimate.host_bytes > 0.9 * host_bytes:
        return f"{estimate.host_bytes / GIB:.0f} GiB of host memory estimated, it has {host_bytes / GIB:.0f}"
    return None
