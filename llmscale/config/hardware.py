"""The one table of GPUs: rates, memory, links and power, each with its source. Unknown hardware gives None, never a
guess. No torch.

Named networks between nodes, with the bandwidth for each GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.architecture.attention_kernels import AMPERE, ComputeCapability
from llmscale.errors import ConfigError
from llmscale.suggestions import did_you_mean

if TYPE_CHECKING:
    from llmscale.config.deepspeed.schema import Precision

#: PCIe x16 in one direction, bytes/s.
_PCIE3 = 16e9
_PCIE4 = 32e9
_PCIE5 = 64e9
#: Words that turn a known name into that of another GPU: a part of it, a slower or a smaller one.
_OTHER_GPU = {"mig", "nvl", "laptop", "max", "d", "ti", "super", "ls"}
#: Share of the memory in its name that CUDA reports of a GPU, at least.
_LEAST_REPORTED = 0.9
#: Headings of `gpu_table_rows`.
GPU_TABLE_HEAD = ("GPU", "GiB", "16-bit TFLOP/s", "TF32", "fp32", "bf16", "memory TB/s", "link GB/s", "W", "source")
#: GPUs of the largest common nodes, such as DGX-2.
_MANY_IN_A_NODE = 16


def has_bf16(capability: ComputeCapability | None) -> bool:
    """Return whether the tensor cores support bf16, which Ampere's were the first to do. None counts as newer."""
    return capability is None or capability >= AMPERE


def has_bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this CPU multiplies bf16: avx512_bf16, amx_bf16, Arm's bf16. Without them torch emulates it."""
    return cpuinfo.exists() and "bf16" in cpuinfo.read_text(errors="replace")


@dataclass(frozen=True)
class GPU:
    """One GPU model. Rates are peaks without sparsity (vendors' tables often print twice that)."""

    name: str
    """Name on the command line."""
    pattern: str
    """Words, in lower case, that the driver's name of the GPU must contain."""
    memory_gib: float
    """Memory in GiB (2^30 bytes) as CUDA reports it: less than the nominal, as ECC and the driver use some. The
    table has the lowest totals found in users' out-of-memory messages."""
    dense_16bit_flops: float
    """Peak dense FLOP/s with 16-bit inputs and fp32 accumulation; bf16, or fp16 where there is no bf16."""
    fp32_flops: float | None
    """Peak FLOP/s of true fp32 (no TF32), or None when sources disagree."""
    capability: ComputeCapability
    """Compute capability, by which PyTorch chooses its kernels; for AMD's GPUs, ROCm's equivalent."""
    memory_bytes_per_s: float | None
    """Peak bandwidth of the GPU's own memory."""
    link_bytes_per_s: float
    """Bandwidth to the other GPUs of the node in ONE direction: half of the figure in datasheets."""
    host_link_bytes_per_s: float
    """Bandwidth to host memory in one direction: PCIe x16."""
    power_w: float | None
    """Power limit of the board in watts."""
    source: str
    """Source of the rates."""

    @property
    def has_bf16(self) -> bool:
        return has_bf16(self.capability)

    @property
    def tf32_flops(self) -> float | None:
        """Peak dense FLOP/s in TF32, None without it: half the 16-bit rate in every datasheet, within 1 %."""
        return self.dense_16bit_flops / 2 if self.has_bf16 else None


#: In order: name, pattern, memory_gib, dense_16bit_flops, fp32_flops, capability, memory_bytes_per_s, link_bytes_per_s,
#: host_link_bytes_per_s, power_w, source.
GPUS = (
    GPU("a100-40gb", "a100 sxm4 40gb", 39.25, 312e12, 19.5e12, (8, 0), 1.555e12, 300e9, _PCIE4, 400,
        "NVIDIA A100 datasheet (SXM)"),
    GPU("a100-80gb", "a100 sxm4 80gb", 79.14, 312e12, 19.5e12, (8, 0), 2.039e12, 300e9, _PCIE4, 400,
        "NVIDIA A100 datasheet (SXM)"),
    GPU("a100-40gb-pcie", "a100 pcie 40gb", 39.25, 312e12, 19.5e12, (8, 0), 1.555e12, _PCIE4, _PCIE4, 250,
        "NVIDIA A100 40GB PCIe product brief; link without NVLink bridges"),
    GPU("a100-80gb-pcie", "a100 80gb pcie", 79.14, 312e12, 19.5e12, (8, 0), 1.935e12, _PCIE4, _PCIE4, 300,
        "NVIDIA A100 datasheet (PCIe); link without NVLink bridges"),
    GPU("h100-80gb", "h100 80gb hbm3", 79.10, 989e12, 67e12, (9, 0), 3.35e12, 450e9, _PCIE5, 700,
        "NVIDIA H100 datasheet (SXM)"),
    GPU("h100-80gb-pcie", "h100 pcie", 79.10, 756e12, 51e12, (9, 0), 2.0e12, _PCIE5, _PCIE5, 350,
        "NVIDIA H100 datasheet (PCIe); link without NVLink bridges"),
    GPU("h200", "h200", 139.72, 989e12, 67e12, (9, 0), 4.8e12, 450e9, _PCIE5, 700,
        "NVIDIA H200 datasheet (SXM)"),
    GPU("b200", "b200", 178.35, 2250e12, None, (10, 0), 7.672e12, 900e9, _PCIE5, 1000,
        "NVIDIA Blackwell architecture brief (HGX B200, 1000 W); memory: pytorch/ao#4002"),
    GPU("l4", "l4", 22.03, 121e12, 30.3e12, (8, 9), 300e9, _PCIE4, _PCIE4, 72,
        "NVIDIA L4 datasheet"),
    GPU("l40s", "l40s", 44.34, 362e12, 91.6e12, (8, 9), 864e9, _PCIE4, _PCIE4, 350,
        "NVIDIA L40S datasheet"),
    GPU("a10g", "a10g", 22.05, 70e12, None, (8, 6), 600e9, _PCIE4, _PCIE4, None,
        "baseten.co 'A10 vs A10G' (NVIDIA publishes no datasheet of AWS's A10G)"),
    GPU("t4", "t4", 14.56, 65e12, 8.1e12, (7, 5), 320e9, _PCIE3, _PCIE3, 70,
        "NVIDIA T4 datasheet, fp16"),
    GPU("v100-16gb", "v100 sxm2 16gb", 15.77, 125e12, 15.7e12, (7, 0), 900e9, 150e9, _PCIE3, 300,
        "NVIDIA V100 datasheet (SXM2), fp16"),
    GPU("v100-32gb", "v100 sxm2 32gb", 31.73, 125e12, 15.7e12, (7, 0), 900e9, 150e9, _PCIE3, 300,
        "NVIDIA V100 datasheet (SXM2), fp16"),
    GPU("rtx3090", "rtx 3090", 23.55, 71e12, 35.6e12, (8, 6), 936e9, _PCIE4, _PCIE4, 350,
        "NVIDIA GA102 whitepaper, fp32 accumulation; link without an NVLink bridge"),
    GPU("rtx4090", "rtx 4090", 23.52, 165.2e12, 82.6e12, (8, 9), 1.008e12, _PCIE4, _PCIE4, 450,
        "NVIDIA Ada whitepaper, fp32 accumulation; peers only through the host"),
    GPU("rtx5090", "rtx 5090", 31.36, 209.5e12, 104.8e12, (12, 0), 1.792e12, _PCIE5, _PCIE5, 575,
        "NVIDIA RTX Blackwell whitepaper, fp32 accumulation; peers only through the host"),
    GPU("mi300x", "mi300x", 191.69, 1307.4e12, 163.4e12, (9, 4), 5.3e12, 448e9, _PCIE5, 750,
        "AMD MI300X datasheet"),
)  # fmt: skip


def find_gpu(device_name: str) -> GPU | None:
    """Return the GPU with the driver's name `device_name`, or None if it is not in the table.

    An L40 is not an L4, and a MIG slice is not the full GPU.
    """
    words = set(device_name.lower().replace("-", " ").split())
    if words & _OTHER_GPU:
        return None
    return next((gpu for gpu in GPUS if words.issuperset(gpu.pattern.split())), None)


def get_gpu(name: str, other: str = " For any other GPU give --gpu-memory-gib and --bf16-tflops.") -> GPU:
    """Return the GPU with this name on the command line.

    Raises ConfigError with the closest and all legal names, and `other`: what the command takes for other GPUs.
    """
    for gpu in (*GPUS, *_gpus_of_size(name.lower())):
        if gpu.name == name.lower():
            return gpu
    names = [gpu.name for gpu in GPUS]
    # The driver's name, as nvidia-smi prints it.
    meant = find_gpu(name)
    if meant:
        hint = f" Did you mean '{meant.name}'?"
    else:
        hint = did_you_mean(name, names)
    size = re.match(r"\d{1,4}", name)
    if size and _gpus_of_size(f"{size[0]}gb"):
        hint = f" Did you mean '{size[0]}gb', any GPU of that size?"
    raise ConfigError(f"GPU '{name}' is not in the table.{hint} GPUs: {', '.join(names)}.{other}")


def _gpus_of_size(name: str) -> list[GPU]:
    """Return a GPU called `24gb`: the slowest of the table with so much memory, with the least memory of them."""
    size = re.fullmatch(r"(\d{1,4})gb", name)
    if size:
        gib = int(size[1])
    else:
        gib = 0
    alike = [gpu for gpu in GPUS if _LEAST_REPORTED * gib <= gpu.memory_gib <= gib]
    slowest = sorted(alike, key=lambda gpu: (gpu.dense_16bit_flops, gpu.link_bytes_per_s))[:1]
    memory_gib = min((gpu.memory_gib for gpu in alike), default=0.0)
    return [replace(gpu, name=name, memory_gib=memory_gib, source=f"as {gpu.name}") for gpu in slowest]


def usable_precision(wanted: Precision | None, gpu: GPU, where: str = "") -> Precision:
    """Return `wanted`, or by default bf16, or fp16 on a GPU without bf16.

    Raises ConfigError, beginning with `where`, for a precision that the GPU does not support.
    """
    if wanted is None:
        return "bf16" if gpu.has_bf16 else "fp16"
    if wanted in ("bf16", "autocast") and not gpu.has_bf16:
        raise ConfigError(
            f"{where}a {gpu.name} has no bf16 arithmetic. Use fp16: --precision fp16, or a ds_config such as "
            "--ds zero2_fp16."
        )
    return wanted


def custom_gpu(memory_gib: float, bf16_tflops: float) -> GPU:
    """Return a GPU that is not in the table.

    Memory bandwidth and power stay unknown. Assumed are a PCIe 4.0 x16 link, the slowest of current GPUs, and Ampere's
    kernels.
    """
    return GPU(
        name="custom",
        pattern="",
        memory_gib=memory_gib,
        dense_16bit_flops=bf16_tflops * 1e12,
        fp32_flops=None,
        capability=AMPERE,
        memory_bytes_per_s=None,
        link_bytes_per_s=_PCIE4,
        host_link_bytes_per_s=_PCIE4,
        power_w=None,
        source="given on the command line; link taken as PCIe 4.0 x16",
    )


def gpu_table_rows() -> list[tuple[str, ...]]:
    """Return the table as text, one row per GPU below GPU_TABLE_HEAD; '-' for unknown numbers."""
    return [
        (
            gpu.name,
            f"{gpu.memory_gib:.2f}",
            f"{gpu.dense_16bit_flops / 1e12:g}",
            f"{gpu.tf32_flops / 1e12:g}" if gpu.tf32_flops else "-",
            f"{gpu.fp32_flops / 1e12:g}" if gpu.fp32_flops else "-",
            "yes" if gpu.has_bf16 else "no",
            f"{gpu.memory_bytes_per_s / 1e12:.3g}" if gpu.memory_bytes_per_s else "-",
            f"{gpu.link_bytes_per_s / 1e9:g}",
            f"{gpu.power_w:g}" if gpu.power_w else "-",
            gpu.source,
        )
        for gpu in GPUS
    ]


def model_flops_utilisation(
    tokens_per_second_per_device: float, flops_per_token: int, device_name: str, is_16bit: bool
) -> float | None:
    """Return the MFU as a fraction of the peak 16-bit rate (PaLM, Chowdhery et al. 2022, appendix B).

    Return None for an unknown device, and for fp32, which torch may compute in TF32 at another rate.
    """
    gpu = find_gpu(device_name)
    if gpu is None or not is_16bit:
        return None
    return tokens_per_second_per_device * flops_per_token / gpu.dense_16bit_flops


@dataclass(frozen=True)
class Interconnect:
    """A network between nodes. Rates are those of the line; planning/ estimates what collectives reach."""

    name: str
    """Name on the command line."""
    bytes_per_s: float
    """Bandwidth in one direction, per GPU, or per node if `per_node`."""
    per_node: bool
    """True if a node's GPUs share one adapter."""
    latency_s: float
    """Time of one message to a neighbour; the technology's order of magnitude, not measured."""
    description: str

    def bytes_per_s_per_node(self, gpus_per_node: int) -> float:
        """Return the bandwidth of all adapters of a node in one direction."""
        return self.bytes_per_s if self.per_node else self.bytes_per_s * gpus_per_node


def _gigabits(rate: float) -> float:
    return rate * 1e9 / 8


#: DGX and HGX nodes have one adapter per GPU.
INTERCONNECTS = (
    Interconnect("ib-800g", _gigabits(800), False, 2e-6, "InfiniBand XDR, 800 Gbit/s per GPU"),
    Interconnect("ib-400g", _gigabits(400), False, 2e-6, "InfiniBand NDR, 400 Gbit/s per GPU (DGX H100, H200)"),
    Interconnect("ib-200g", _gigabits(200), False, 2e-6, "InfiniBand HDR, 200 Gbit/s per GPU (DGX A100)"),
    Interconnect("ib-100g", _gigabits(100), False, 2e-6, "InfiniBand EDR, 100 Gbit/s per GPU"),
    Interconnect("roce-400g", _gigabits(400), False, 5e-6, "RoCE, 400 Gbit/s per GPU"),
    Interconnect("roce-200g", _gigabits(200), False, 5e-6, "RoCE, 200 Gbit/s per GPU (1600 Gbit/s for 8 GPUs)"),
    Interconnect("roce-100g", _gigabits(100), True, 5e-6, "RoCE, one adapter of 100 Gbit/s per node"),
    Interconnect("ethernet-100g", _gigabits(100), True, 50e-6, "TCP, 100 Gbit/s per node"),
    Interconnect("ethernet-25g", _gigabits(25), True, 50e-6, "TCP, 25 Gbit/s per node"),
    Interconnect("ethernet-10g", _gigabits(10), True, 50e-6, "TCP, 10 Gbit/s per node"),
    Interconnect("ethernet-1g", _gigabits(1), True, 100e-6, "TCP, 1 Gbit/s per node"),
)


def get_interconnect(name: str) -> Interconnect:
    """Return the network of that name. Raises ConfigError with the closest and all legal names."""
    for interconnect in INTERCONNECTS:
        if interconnect.name == name.lower():
            return interconnect
    names = [interconnect.name for interconnect in INTERCONNECTS]
    raise ConfigError(
        f"interconnect '{name}' is not known.{did_you_mean(name.lower(), names)} Legal: {', '.join(names)}."
    )


@dataclass(frozen=True)
class Cluster:
    """Machines of a run: GPUs, nodes, the network between them, and the memory of a node."""

    gpu: GPU
    gpus_per_node: int
    interconnect: Interconnect = INTERCONNECTS[0]
    num_nodes: int = 1
    host_bytes: int | None = None
    """Memory of one node for offloaded states; None if unknown, and then not checked."""

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def gpu_bytes(self) -> int:
        """Return the memory of one GPU, as CUDA reports it."""
        return int(self.gpu.memory_gib * 2**30)

    def in_words(self, gpu: str = "") -> str:
        """Return `2 nodes x 8 x h100-80gb`, with a hint at --num-nodes for an unusually large node."""
        gpu = gpu or self.gpu.name
        if self.num_nodes > 1:
            return f"{self.num_nodes} nodes x {self.gpus_per_node} x {gpu}"
        if self.gpus_per_node > _MANY_IN_A_NODE:
            one = " in one node (of several nodes: --num-nodes)"
        else:
            one = ""
        return f"{self.gpus_per_node} x {gpu}{one}"


def measured_gpu(device_name: str, memory_bytes: int, capability: ComputeCapability | None) -> GPU:
    """Return the GPU of a machine: its rates from the table if they are known, its memory as the driver reports it."""
    gpu = find_gpu(device_name) or replace(custom_gpu(1, 1), capability=capability or AMPERE)
    return replace(gpu, memory_gib=memory_bytes / 2**30)
