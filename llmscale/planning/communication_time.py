"""Bytes that data-parallel ranks exchange in one optimizer step, and how long that takes. No torch.

As DeepSpeed 0.19.8 communicates with llmscale's ds_configs, counted in passes of a ring: gathering or scattering all
parameters is one pass, an all-reduce is two.

    stage 0   gradients all-reduced at the accumulation boundary
    stage 1   the same, then parameters gathered once
    stage 2   gradients all-reduced every micro-step, then parameters gathered once
    stage 3   parameters gathered in the forward pass and, but for those still live, in the backward pass; gradients
              reduce-scattered: every micro-step. With hpZ (zero_hpz_partition_size) all but a step's first gathers
              stay within groups of ranks
"""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.sections import CheckpointingMode
from llmscale.config.hardware import GPU
from llmscale.config.interconnect import Interconnect
from llmscale.memory.zero_settings import BYTES_PER_ELEMENT, EngineLayout

#: Collectives take this many times what their bytes would at the line's rate, and none of it is hidden. Fitted with
#: llmscale.planning.compute_time' constants; it stands for slower wires and for overlap, which the rows cannot tell
#: apart.
SLOWDOWN = 1.15


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one optimizer step."""

    gathered_bytes: float
    """Parameters, whole, each time they are gathered from all ranks."""
    reduced_bytes: float
    """Gradients, whole, once per pass of a ring."""
    collectives: int
    """Calls among all ranks, for their latency."""
    group_gathered_bytes: float = 0.0
    """Parameters, whole, each time they are gathered within an hpZ group."""
    group_collectives: int = 0
    """Calls within a group."""
    group_ranks: int = 1
    """Ranks of an hpZ group."""

    @property
    def group_bytes_per_rank(self) -> float:
        """Bytes through one rank's link in one direction, in the ring of its hpZ group."""
        return self.group_gathered_bytes * (self.group_ranks - 1) / self.group_ranks

    def bytes_per_rank(self, ring_ranks: int) -> float:
        """Bytes through one rank's link in one direction, in a ring of all ranks that hold shards."""
        return (self.gathered_bytes + self.reduced_bytes) * (ring_ranks - 1) / ring_ranks


def count_traffic(shape: GPTShape, layout: EngineLayout, checkpointing: CheckpointingMode) -> Traffic:
    """Traffic of one optimizer step."""
    elements, micro_steps = shape.num_parameters, layout.gradient_accumulation_steps
    reduce_width = BYTES_PER_ELEMENT[layout.communication_dtype]
    if layout.zero_stage == 3:
        gather_width = layout.parameter_width
        gathered = elements + max(0, elements - _live_elements(layout, checkpointing))
        gathers, group = shape.n_layer + 2, layout.zero_hpz_partition_size
        # hpZ: a step's first forward pass gathers from all, and leaves the copies that the other passes gather from.
        from_all = elements if group > 1 else micro_steps * gathered
        passes_from_all = 1 if group > 1 else 2 * micro_steps
        return Traffic(
            gathered_bytes=from_all * gather_width,
            reduced_bytes=micro_steps * elements * reduce_width,
            collectives=(passes_from_all + micro_steps) * gathers,
            group_gathered_bytes=(micro_steps * gathered - from_all) * gather_width,
            group_collectives=(2 * micro_steps - passes_from_all) * gathers,
            group_ranks=group,
        )
    scatters = layout.zero_stage > 0 and layout.reduce_scatter and not layout.use_multi_rank_bucket_allreduce
    reductions = micro_steps if layout.zero_stage == 2 else 1
    buckets = -(-elements // layout.reduce_bucket_size)
    reduced = reductions * elements * reduce_width * (1 if scatters else 2)
    gathered = elements * layout.parameter_width if layout.zero_stage else 0
    gathers = -(-elements // layout.allgather_bucket_size) if layout.zero_stage else 0
    return Traffic(gathered, reduced, 2 * reductions * buckets + gathers)


def _live_elements(layout: EngineLayout, checkpointing: CheckpointingMode) -> int:
    """Parameters of the last blocks that the backward pass finds still gathered.

    DeepSpeed keeps what is used again within `stage3_max_reuse_distance` elements. From a block's forward pass to its
    backward pass the blocks behind it pass by twice, three times when they are recomputed.
    """
    uses = 2 if checkpointing == "none" else 3
    return layout.stage3_max_reuse_distance // uses


def ring_bytes_per_s(gpu: GPU, gpus_per_node: int, num_nodes: int, interconnect: Interconnect) -> float:
    """What a rank's part of a ring carries in one direction.

    Between nodes NCCL builds as many rings as there are adapters and each crosses the node's border once, so a rank
    is held up by the slower of its own link and of all adapters of its node together, not of its own adapter.
    """
    if num_nodes == 1:
        return gpu.link_bytes_per_s
    network = interconnect.bytes_per_s_per_node(gpus_per_node)
    return network if gpus_per_node == 1 else min(gpu.link_bytes_per_s, network)


def estimate_communication_s(
    traffic: Traffic, gpu: GPU, gpus_per_node: int, num_nodes: int, interconnect: Interconnect
) -> float:
    """Seconds of one optimizer step that ranks wait for each other's bytes."""
    rate = ring_bytes_per_s(gpu, gpus_per_node, num_nodes, interconnect)
    latency_s = traffic.collectives * (num_nodes - 1) * interconnect.latency_s
    waited_s = SLOWDOWN * traffic.bytes_per_rank(gpus_per_node * num_nodes) / rate + latency_s
    if traffic.group_ranks == 1:
        return waited_s
    # Groups are neighbouring ranks. One that does not lie within a node crosses the network like all others.
    is_within = gpus_per_node % traffic.group_ranks == 0
    nodes_per_group = 1 if is_within else max(2, -(-traffic.group_ranks // gpus_per_node))
    group_rate = ring_bytes_per_s(gpu, gpus_per_node, nodes_per_group, interconnect)
    group_latency_s = traffic.group_collectives * (nodes_per_group - 1) * interconnect.latency_s
    return waited_s + SLOWDOWN * traffic.group_bytes_per_rank / group_rate + group_latency_s
