"""Bytes that data-parallel ranks exchange in one optimizer step, and how long that takes. No torch.

As DeepSpeed 0.19.8 communicates with llmscale's ds_configs, counted in passes of a ring: gathering or scattering all
parameters is one pass, an all-reduce is two.

    stage 0   gradients all-reduced at the accumulation boundary
    stage 1   the same, then parameters gathered once
    stage 2   gradients all-reduced every micro-step, then parameters gathered once
    stage 3   parameters gathered in the forward pass and, but for those still there, in the backward pass; gradients
              reduce-scattered: every micro-step. With hpZ (zero_hpz_partition_size) all but a step's first gathers
              stay within groups of ranks

Three things then cost time: the wire, the ranks' waiting for each other, and the copies on both ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from llmscale.architecture.description import Architecture
from llmscale.architecture.layers import together
from llmscale.architecture.parameter_list import ParameterTensors
from llmscale.config.hardware import GPU
from llmscale.config.interconnect import Interconnect
from llmscale.config.resolve import ResolvedStep
from llmscale.memory.states.stage3 import count_gathers
from llmscale.memory.states.stage3_parameters import Gathers, persistent_parameters
from llmscale.memory.zero_settings import BYTES_PER_ELEMENT, zero_setup
from llmscale.planning.kernels import memory_bytes_per_s

#: Of a link's peak rate that a ring reaches. NCCL itself reckons with 240 of an A100's 300 GB/s and 371 of an H100's
#: 450 (src/graph/topo.h, SM80_NVLINK_BW x 12 links, SM90_NVLINK_BW x 18).
_LINK_SHARE = 0.8
#: Seconds of one step of a ring to a neighbour in the node, and to one in another node beside its network's latency
#: (NCCL, src/graph/tuning.cc, hwLatencies of a ring's Simple protocol).
_NODE_HOP_S, _NETWORK_HOP_S = 3.4e-6, 14e-6
#: The same of its protocol for small tensors, LL.
_SMALL_NODE_HOP_S, _SMALL_NETWORK_HOP_S = 0.6e-6, 2.7e-6
#: Of a collective's latency that ranks wait. (Fitted to 8 to 512 GPUs, with the constants of
#: llmscale.planning.compute_time.)
_WAITED = 0.66
#: Passes through the GPU's memory for every byte that a collective gathers or reduces: into buckets and out of them,
#: from one type to the other, and what NCCL's own reading and writing takes from kernels that run beside it. (Fitted.)
_COPIES = 6.7


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
    small_collectives: int = 0
    """Further calls among all ranks, each for a single bias or norm."""

    @property
    def group_bytes_per_rank(self) -> float:
        """Bytes through one rank's link in one direction, in the ring of its hpZ group."""
        return self.group_gathered_bytes * (self.group_ranks - 1) / self.group_ranks

    def bytes_per_rank(self, ring_ranks: int) -> float:
        """Bytes through one rank's link in one direction, in a ring of all ranks that hold shards."""
        return (self.gathered_bytes + self.reduced_bytes) * (ring_ranks - 1) / ring_ranks


def count_traffic(step: ResolvedStep, *, compiled_blocks: bool = False) -> Traffic:
    """Traffic of one optimizer step. Stage 3 gathers a compiled block as a whole, an eager one matrix by matrix."""
    config, elements, micro_steps = step.engine_config, step.shape.num_parameters, step.plan.gradient_accumulation_steps
    zero = config.zero
    if zero.stage == 3:
        return _count_stage3(step, compiled_blocks)
    scatters = zero.stage > 0 and zero.reduce_scatter and not zero.use_multi_rank_bucket_allreduce
    reductions = micro_steps if zero.stage == 2 else 1
    buckets = -(-elements // zero.reduce_bucket_size)
    reduced = reductions * elements * BYTES_PER_ELEMENT[config.communication_data_type] * (1 if scatters else 2)
    gathered = elements * BYTES_PER_ELEMENT[config.model_dtype] if zero.stage else 0
    gathers = -(-elements // zero.allgather_bucket_size) if zero.stage else 0
    return Traffic(gathered, reduced, 2 * reductions * buckets + gathers)


def _count_stage3(step: ResolvedStep, compiled_blocks: bool) -> Traffic:
    """As llmscale.memory.states.stage3 follows DeepSpeed through a micro-step: what is still gathered, or comes with
    a prefetch, is not gathered again. With hpZ a step's first forward pass gathers from all ranks, and leaves the
    copies that the other passes gather from."""
    shape, config = step.shape, step.engine_config
    tensors = _of_compiled_blocks(shape.architecture) if compiled_blocks else shape.tensors
    micro_steps, group = step.plan.gradient_accumulation_steps, config.zero.zero_hpz_partition_size
    # A compiled block that recomputes selectively does so within its graph.
    recomputes = step.checkpointing == "full" or (step.checkpointing == "selective" and not compiled_blocks)
    # One micro-step is like the other, and the memory's estimate has followed it.
    setup = zero_setup(step).with_micro_steps(1)
    forward, backward = count_gathers(tensors, setup, recomputes)
    everything = Gathers().plus(forward, micro_steps).plus(backward, micro_steps)
    from_all = forward if group > 1 else everything
    from_group = everything.plus(from_all, -1)
    # After a step, each by itself (DeepSpeedZeroOptimizer_Stage3._post_step).
    persistent = [tensor.elements for tensor in persistent_parameters(shape.tensors.all, setup).values()]
    matrices = sum(tensor.kind != "vector" for tensor in shape.tensors.all)
    scatters = min(-(-shape.num_parameters // max(1, config.zero.reduce_bucket_size)), matrices)
    parameter_bytes = BYTES_PER_ELEMENT[config.model_dtype]
    return Traffic(
        gathered_bytes=(from_all.elements + sum(persistent)) * parameter_bytes,
        reduced_bytes=micro_steps * shape.num_parameters * BYTES_PER_ELEMENT[config.communication_data_type],
        collectives=from_all.calls + micro_steps * scatters,
        small_collectives=len(persistent),
        group_gathered_bytes=from_group.elements * parameter_bytes,
        group_collectives=from_group.calls,
        group_ranks=group,
    )


@lru_cache(maxsize=16)
def _of_compiled_blocks(model: Architecture) -> ParameterTensors:
    """DeepSpeed gathers a compiled block as one module."""
    return ParameterTensors(replace(model, block=(together("", *model.block_as_made),), made_order=()))


def ring_bytes_per_s(gpu: GPU, gpus_per_node: int, num_nodes: int, interconnect: Interconnect) -> float:
    """What a rank's part of a ring carries in one direction.

    Between nodes NCCL builds as many rings as there are adapters and each crosses the node's border once, so a rank
    is held up by the slower of its own link and of all adapters of its node together, not of its own adapter.
    """
    if num_nodes == 1:
        return gpu.link_bytes_per_s
    network = interconnect.bytes_per_s_per_node(gpus_per_node)
    return network if gpus_per_node == 1 else min(gpu.link_bytes_per_s, network)


@dataclass(frozen=True)
class CommunicationTime:
    """What a step's traffic takes, before any of it is hidden behind the arithmetic."""

    wire_s: float
    """Bytes on the slowest link."""
    waiting_s: float
    """Latency of the collectives, which grows with the ranks."""
    copies_s: float
    """On the GPU itself."""


def estimate_communication(
    traffic: Traffic, gpu: GPU, gpus_per_node: int, num_nodes: int, interconnect: Interconnect
) -> CommunicationTime:
    """Of one optimizer step."""
    ranks = gpus_per_node * num_nodes
    if ranks == 1:
        return CommunicationTime(0.0, 0.0, 0.0)
    copied_bytes = traffic.gathered_bytes + traffic.reduced_bytes + traffic.group_gathered_bytes
    wire_s = traffic.bytes_per_rank(ranks) / ring_bytes_per_s(gpu, gpus_per_node, num_nodes, interconnect)
    hops_s = traffic.collectives * _ring_latency_s(gpus_per_node, num_nodes, interconnect)
    small = (_SMALL_NODE_HOP_S, _SMALL_NETWORK_HOP_S)
    hops_s += traffic.small_collectives * _ring_latency_s(gpus_per_node, num_nodes, interconnect, small)
    if traffic.group_ranks > 1:
        # Groups are neighbouring ranks. One that does not lie within a node crosses the network like all others.
        is_within = gpus_per_node % traffic.group_ranks == 0
        nodes = 1 if is_within else max(2, -(-traffic.group_ranks // gpus_per_node))
        wire_s += traffic.group_bytes_per_rank / ring_bytes_per_s(gpu, gpus_per_node, nodes, interconnect)
        within = traffic.group_ranks // nodes
        hops_s += traffic.group_collectives * _ring_latency_s(within, nodes, interconnect)
    return CommunicationTime(
        wire_s=wire_s / _LINK_SHARE,
        waiting_s=_WAITED * hops_s,
        copies_s=_COPIES * copied_bytes / memory_bytes_per_s(gpu),
    )


def _ring_latency_s(
    gpus_per_node: int,
    num_nodes: int,
    interconnect: Interconnect,
    hops_s: tuple[float, float] = (_NODE_HOP_S, _NETWORK_HOP_S),
) -> float:
    """Of one gather or scatter: every rank's part goes once around. `hops_s`: within a node, and across."""
    within_s, across_s = hops_s
    return (gpus_per_node - 1) * num_nodes * within_s + (num_nodes - 1) * (across_s + interconnect.latency_s)
