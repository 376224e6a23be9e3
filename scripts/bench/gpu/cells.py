"""The cells of gpu.sh, and the device that they run on. No torch here: a process of its own asks for the device.

Cells come in the order of their value, so a run that is cut short has the most important ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmscale.cluster.doctor.machine import host_memory_bytes
from llmscale.config.hardware import GPU, find_gpu
from llmscale.memory.estimate import MemoryEstimate
from scripts.bench.harness import GIB, gpu_names, why_it_failed
from scripts.bench.memory.memory_grid import list_cells

GPT2_VOCAB, LLAMA_VOCAB = 50_257, 128_256


@dataclass(frozen=True)
class Cell:
    """One process: train.py, nanoGPT's train.py, or a cell of memory_grid.py."""

    kind: str
    """Program: "train", "nanogpt" or "grid"."""
    model: str
    """Preset, or name of a cell of memory_grid.py."""
    zero_stage: int = 1
    compiled: bool = False
    offload: str = "none"
    """States in host memory: "none", "optimizer" or "parameters"."""
    pins_memory: bool = True
    """True if offloaded states are in page-locked memory."""
    n_layer: int | None = None
    """Number of blocks instead of the preset's, for a model that does not fit completely."""
    micro_batch_sizes: Sequence[int] = (32, 16, 8, 4, 2, 1)
    """Candidates, of which the first that fits by the memory estimate is used."""
    tokens_per_step: int = 2**17
    seq_len: int = 1024
    vocab_size: int = GPT2_VOCAB
    turn: int = 1
    """Turn of a cell that is run several times."""
    compared: bool = False
    """True for the two cells whose speeds are compared."""
    least_s: float = 45
    """Seconds that must be left to begin this cell."""

    @property
    def name(self) -> str:
        if self.kind == "grid":
            return f"memory {self.model}"
        words = [self.model if self.kind == "train" else f"nanoGPT {self.model}"]
        words += [f"{self.n_layer} blocks"] if self.n_layer else []
        words += [f"ZeRO-{self.zero_stage}"] if self.kind == "train" else []
        words += [f"offload {self.offload}"] if self.offload != "none" else []
        words += ["compiled" if self.compiled else "eager"]
        words += [f"turn {self.turn}"] if self.turn > 1 else []
        return ", ".join(words)

    def ds_config(self, precision: str) -> dict[str, object]:
        """Return the ds_config that a user would write; `precision`: bf16 or fp32."""
        zero: dict[str, object] = {"stage": self.zero_stage}
        if self.offload != "none":
            # Page-locked buffers are rounded up to a power of two, which 128 GiB have no space for at 6.7B.
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self.pins_memory}
        if self.offload == "parameters":
            zero["offload_param"] = {"device": "cpu", "pin_memory": self.pins_memory}
        return {"zero_optimization": zero, **({"bf16": {"enabled": True}} if precision == "bf16" else {})}


#: Both sides of the comparison have the same micro-batch and the same tokens per step.
_124M = {"model": "gpt2-124m", "micro_batch_sizes": (16, 8, 4), "tokens_per_step": 2**18}
_1_5B = {"model": "gpt2-1.5b"}
_LLAMA_1B = {"model": "llama3-1b", "seq_len": 8192, "vocab_size": LLAMA_VOCAB, "micro_batch_sizes": (4, 2, 1)}
_GPT3_6_7B = {"model": "gpt3-6.7b", "seq_len": 2048, "micro_batch_sizes": (8, 4, 2, 1)}
_LLAMA_8B = {"model": "llama3-8b", "seq_len": 8192, "vocab_size": LLAMA_VOCAB, "micro_batch_sizes": (4, 2, 1)}
#: Cells of memory_grid.py, small to large and of every stage, that calibrate context and reserve.
_GRID = (
    "gpt2-124m-z1-bf16-mb16-full",
    "gpt2-774m-z2-bf16-mb4-selective",
    "gpt2-124m-z3-bf16-mb16",
    "gpt2-1.5b-z2-bf16-mb4-offload-optimizer-full",
    "gpt2-124m-z0-bf16-mb16",
    "gpt2-774m-z3-bf16-mb8-full",
    "gpt2-350m-z2-bf16-mb4-acc1",
    "gpt3-2.7b-z1-bf16-mb2-full",
)


def list_gpu_cells() -> list[Cell]:
    """Return the cells for one GPU."""
    pair = [Cell(kind, **_124M, compiled=True, compared=True) for kind in ("train", "nanogpt")]
    again = [replace(cell, turn=2) for cell in reversed(pair)]
    grid = [Cell("grid", name, least_s=25) for name in _GRID]
    stages = [Cell("train", **_124M, zero_stage=stage, compiled=True) for stage in (0, 2, 3)]
    sizes = [Cell("train", model, compiled=True) for model in ("gpt2-350m", "gpt2-774m")]
    eager = [
        *(Cell("train", model) for model in ("gpt2-350m", "gpt2-774m")),
        Cell("train", **_1_5B),
        Cell("train", **_LLAMA_1B),
    ]
    offload = [
        Cell("train", **_1_5B, zero_stage=2, offload="optimizer", compiled=True, least_s=60),
        Cell("train", **_1_5B, zero_stage=3, offload="parameters", compiled=True, least_s=60),
    ]
    return [
        *pair,
        Cell("train", **_1_5B, compiled=True),
        *grid[:2],
        Cell("train", **_LLAMA_8B, n_layer=8, compiled=True),
        Cell("train", **_124M),
        *again,
        *grid[2:4],
        Cell("train", **_GPT3_6_7B, zero_stage=2, offload="optimizer", pins_memory=False, compiled=True, least_s=240),
        *stages,
        Cell("train", "olmoe-1b-7b", n_layer=4, compiled=True),
        Cell("train", **_LLAMA_1B, compiled=True),
        *sizes,
        *grid[4:6],
        *offload,
        Cell("train", **_1_5B, zero_stage=3, compiled=True),
        *eager,
        *(Cell("train", **_124M, zero_stage=stage) for stage in (0, 2, 3)),
        *grid[6:],
    ]


def list_cpu_cells() -> list[Cell]:
    """Return small cells of the same kinds, which show on a CPU that everything works."""
    tiny = {"seq_len": 128, "n_layer": 1, "tokens_per_step": 512, "micro_batch_sizes": (2,), "least_s": 1}
    return [
        *(Cell(kind, "tiny-1m", compared=True, **tiny) for kind in ("train", "nanogpt")),
        *(Cell("train", "tiny-1m", stage, **tiny) for stage in (0, 2, 3)),
        Cell("train", "tiny-1m", 2, offload="optimizer", **tiny),
        Cell("train", "tiny-modern-10m", compiled=True, **tiny),
        Cell("train", "tiny-moe-3m", **tiny),
        Cell("grid", list_cells()[0].name, least_s=1),
    ]


_ASK = "import torch; p = torch.cuda.get_device_properties(0); print(p.total_memory, p.major, p.minor, p.name, sep='|')"


@dataclass(frozen=True)
class Device:
    """Device of the cells."""

    kind: str
    """Kind: "cuda" or "cpu"."""
    name: str
    """Name given by the driver."""
    memory_bytes: int | None
    capability: tuple[int, int] | None

    @property
    def gpu(self) -> GPU | None:
        return find_gpu(self.name) if self.kind == "cuda" else None

    @property
    def precision(self) -> str:
        """Return bf16, or fp32 on a CPU, where blocks compile in fp32 only."""
        return "bf16" if self.kind == "cuda" else "fp32"

    @property
    def label(self) -> str:
        """Return the device's name in file names."""
        return self.gpu.name if self.gpu else re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


def find_device(kind: str) -> Device:
    """Return the first GPU, or the CPU. Exits with a remedy when torch cannot use the GPU."""
    if kind == "cpu":
        return Device("cpu", "cpu", None, None)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"error: torch sees no CUDA GPU here ({why_it_failed(done)}); nvidia-smi names {gpu_names() or 'none'}. "
            "Fix: a machine with a GPU and a driver for torch's CUDA, or a torch for the driver's (pip install torch "
            "--index-url https://download.pytorch.org/whl/cu126), or --device cpu."
        )
    memory, major, minor, name = done.stdout.strip().split("|", 3)
    return Device("cuda", name, int(memory), (int(major), int(minor)))


def why_it_does_not_fit(estimate: MemoryEstimate | None, device: Device) -> str | None:
    """Return why a run exceeds the GPU or the host by the estimate; None if it fits or is unknown."""
    if estimate is None or device.memory_bytes is None:
        return None
    if estimate.total_bytes > device.memory_bytes:
        return f"{estimate.total_bytes / GIB:.0f} GiB estimated, the GPU has {device.memory_bytes / GIB:.0f}"
    host_bytes = host_memory_bytes()
    if estimate.host_bytes > 0.9 * host_bytes:
        return f"{estimate.host_bytes / GIB:.0f} GiB of host memory estimated, it has {host_bytes / GIB:.0f}"
    return None
