"""What offload to host memory or NVMe costs in time. No torch.

All of it is counted as waiting, as in ZeRO-Infinity (Rajbhandari et al. 2021), whose efficiency ait x bw / (ait x bw +
peak) is compute time over compute plus transfer time; here with the bytes that DeepSpeed moves for this ds_config.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.architecture.shape import GPTShape
from llmscale.config.hardware import GPU
from llmscale.memory.zero_settings import EngineLayout
from llmscale.planning.communication_time import Traffic


@dataclass(frozen=True)
class HostRates:
    """A node's memory and disk. The defaults are assumptions, not measurements."""

    memory_bytes_per_s: float = 100e9
    """What an optimizer step on the host reaches, and copies to and from GPUs at most, all ranks of a node together:
    the order of a server of two sockets."""
    nvme_bytes_per_s: float = 6e9
    """Reading and writing, all ranks of a node together: one PCIe 4.0 drive."""


def estimate_offload_s(
    shape: GPTShape,
    micro_batch_size: int,
    layout: EngineLayout,
    traffic: Traffic,
    gpu: GPU,
    ranks_per_node: int,
    host: HostRates,
) -> float:
    """Seconds of one optimizer step that a rank waits for its host: copies, the optimizer step on the CPU, the disk."""
    share = shape.num_parameters / layout.ranks.shard_ranks
    micro_steps = layout.gradient_accumulation_steps
    link_bytes = 0.0
    nvme_bytes = 0.0
    seconds = 0.0
    if layout.offload_optimizer.device != "none":
        copies = micro_steps if layout.zero_stage >= 2 else 1
        link_bytes += share * (copies + 1) * layout.parameter_width
        step_bytes = layout.optimizer.step_bytes_per_weight(shape.architecture)
        seconds += share * ranks_per_node * step_bytes / host.memory_bytes_per_s
        if layout.offload_optimizer.device == "nvme":
            nvme_bytes += share * 2 * layout.optimizer.state_bytes_per_weight(shape.architecture)
    if layout.offload_param.device != "none":
        shards = traffic.gathered_bytes / layout.ranks.shard_ranks
        link_bytes += shards
        if layout.offload_param.device == "nvme":
            nvme_bytes += shards
    if layout.cpu_checkpointing:
        width = 4 if layout.precision == "fp32" else 2
        saved = micro_batch_size * shape.seq_len * shape.n_embd * shape.n_layer * width
        link_bytes += 2 * micro_steps * saved
    # A node's GPUs copy at the same time, all from one host's memory.
    link = min(gpu.host_link_bytes_per_s, host.memory_bytes_per_s / ranks_per_node)
    return seconds + link_bytes / link + nvme_bytes * ranks_per_node / host.nvme_bytes_per_s
