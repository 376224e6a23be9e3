"""What offload to host memory or NVMe costs in time. No torch.

All of it is counted as waiting, as in ZeRO-Infinity (Rajbhandari et al. 2021), whose efficiency ait x bw / (ait x bw +
peak) is compute time over compute plus transfer time; here with the bytes that DeepSpeed moves for this ds_config.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.config.hardware import Cluster
from llmscale.config.resolve import ResolvedStep
from llmscale.memory.zero_settings import BYTES_PER_ELEMENT
from llmscale.planning.communication_time import Traffic


@dataclass(frozen=True)
class HostRates:
    """A node's memory and disk. The defaults are assumptions, not measurements."""

    memory_bytes_per_s: float = 100e9
    """What an optimizer step on the host reaches, and copies to and from GPUs at most, all ranks of a node together:
    the order of a server of two sockets."""
    nvme_bytes_per_s: float = 6e9
    """Reading and writing, all ranks of a node together: one PCIe 4.0 drive."""


def estimate_offload_s(step: ResolvedStep, cluster: Cluster, traffic: Traffic, host: HostRates | None = None) -> float:
    """Seconds of one optimizer step that a rank waits for its host: copies, the optimizer step on the CPU, the disk."""
    host, shape, zero, ranks_per_node = host or HostRates(), step.shape, step.engine_config.zero, cluster.gpus_per_node
    width = BYTES_PER_ELEMENT[step.engine_config.model_dtype]
    shard_ranks, micro_steps = step.plan.ranks.shard_ranks, step.plan.gradient_accumulation_steps
    share = shape.num_parameters / shard_ranks
    link_bytes = 0.0
    nvme_bytes = 0.0
    seconds = 0.0
    if zero.offload_optimizer.device != "none":
        copies = micro_steps if zero.stage >= 2 else 1
        link_bytes += share * (copies + 1) * width
        step_bytes = step.optimizer.step_bytes_per_weight(shape.architecture)
        seconds += share * ranks_per_node * step_bytes / host.memory_bytes_per_s
        if zero.offload_optimizer.device == "nvme":
            nvme_bytes += share * 2 * step.optimizer.state_bytes_per_weight(shape.architecture)
    if zero.offload_param.device != "none":
        shards = traffic.gathered_bytes / shard_ranks
        link_bytes += shards
        if zero.offload_param.device == "nvme":
            nvme_bytes += shards
    if step.engine_config.cpu_checkpointing:
        activation_width = 4 if step.precision == "fp32" else 2
        saved = step.plan.micro_batch_size * shape.seq_len * shape.n_embd * shape.n_layer * activation_width
        link_bytes += 2 * micro_steps * saved
    # A node's GPUs copy at the same time, all from one host's memory.
    link = min(cluster.gpu.host_link_bytes_per_s, host.memory_bytes_per_s / ranks_per_node)
    return seconds + link_bytes / link + nvme_bytes * ranks_per_node / host.nvme_bytes_per_s
