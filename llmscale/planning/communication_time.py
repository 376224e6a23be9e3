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

from dataclasses import dataclass

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.sections import CheckpointingMode
from llmscale.config.hardware import GPU
from llmscale.config.interconnect import Interconnect
from llmscale.memory.zero_settings import BYTES_PER_ELEMENT, EngineLayout
from llmscale.planning.kernels import memory_bytes_per_s

#: Of a link's peak rate that a ring reaches. NCCL itself reckons with 240 of an A100's 300 GB/s and 371 of an H100's
#: 450 (src/graph/topo.h, SM80_NVLINK_BW x 12 links, SM90_NVLINK_BW x 18).
_LINK_SHARE = 0.8
#: Seconds of one step of a ring to a neighbour in the node, and to one in another node beside its network's latency
#: (NCCL, src/graph/tuning.cc, hwLatencies of a ring's Simple protocol).
_NODE_HOP_S, _NETWORK_HOP_S = 3.4e-6, 14e-6
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

    @property
    def group_bytes_per_rank(self) -> float:
        """Bytes through one rank's link in one direction, in the ring of its hpZ group."""
        return self.group_gathered_bytes * (self.group_ranks - 1) / self.group_ranks

    def bytes_per_rank(self, ring_ranks: int) -> float:
        """Bytes through one rank's link in one direction, in a ring of all ranks that hold shards."""
        return (self.gathered_bytes + self.reduced_bytes) * (ring_ranks - 1) / ring_ranks


def count_traffic(
    shape: GPTShape, layout: EngineLayout, checkpointing: CheckpointingMode, *, compiled_blocks: bool = False
) -> Traffic:
    """Traffic of one optimizer step. Stage 3 gathers a compiled block as a whole, an eager one matrix by matrix."""
    elements, micro_steps = shape.num_parameters, layout.gradient_accumulation_steps
    reduce_width = BYTES_PER_ELEMENT[layout.communication_dtype]
    if layout.zero_stage == 3:
        gather_width = layout.parameter_width
        gathered = _gathered_elements(shape, layout, checkpointing, compiled_blocks)
        matrices = [tensor.elements for tensor in shape.tensors.all if tensor.kind != "vector"]
        gathers = _gather_calls(shape, matrices, layout.stage3_prefetch_bucket_size, compiled_blocks)
        scatters = min(-(-elements // max(1, layout.reduce_bucket_size)), len(matrices))
        group = layout.zero_hpz_partition_size
        # hpZ: a step's first forward pass gathers from all, and leaves the copies that the other passes gather from.
        from_all = elements if group > 1 else micro_steps * gathered
        passes_from_all = 1 if group > 1 else 2 * micro_steps
        return Traffic(
            gathered_bytes=from_all * gather_width,
            reduced_bytes=micro_steps * elements * reduce_width,
            collectives=passes_from_all * gathers + micro_steps * scatters,
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


def _gathered_elements(
    shape: GPTShape, layout: EngineLayout, checkpointing: CheckpointingMode, compiled_blocks: bool
) -> float:
    """Parameters that stage 3 gathers in a micro-step's two passes, each of which needs a tied embedding twice: for the
    look-up and for the head. What the passes find still gathered they do not gather again.

    DeepSpeed keeps what is used again within `stage3_max_reuse_distance` elements. From a block's forward pass to its
    backward pass the blocks behind it pass by twice, three times when they are recomputed.
    """
    elements = shape.num_parameters
    needed = 2 * (elements + (shape.tensors.table.elements if shape.tied else 0))
    uses = 2 if checkpointing == "none" else 3
    kept = max(layout.stage3_max_reuse_distance // uses, _seen_elements(shape, layout, compiled_blocks))
    return elements + max(0.0, 1 - kept / elements) * (needed - elements)


def _seen_elements(shape: GPTShape, layout: EngineLayout, compiled_blocks: bool) -> float:
    """Parameters that are kept because DeepSpeed's prefetcher comes across them before they were used and released.

    With every module that runs it goes on by `stage3_prefetch_bucket_size` elements, so that it is through with both
    passes' first N before the modules are, if the bucket is larger than a module on average. It is then as far ahead
    as `stage3_max_live_parameters` lets it. (DeepSpeed 0.19.8, PartitionedParameterCoordinator.fetch_sub_module;
    tests/distributed/test_traffic.py counts it.)
    """
    model = shape.architecture
    # A block, its attention and its MLP are modules too, and so is the model.
    of_block = 1 if compiled_blocks else 3 + sum(1 for layer in model.block if layer.name)
    modules = model.n_layer * of_block + len(model.before_blocks) + len(model.after_blocks) + 1
    reached = layout.stage3_prefetch_bucket_size * modules
    if reached <= shape.num_parameters:
        return 0
    return min(layout.stage3_max_live_parameters, shape.num_parameters * (1 - shape.num_parameters / reached))


def _gather_calls(shape: GPTShape, matrices: list[int], bucket_size: int, compiled_blocks: bool) -> int:
    """Collectives in which stage 3 gathers all matrices once.

    DeepSpeed's prefetcher takes one tensor after the other until it has `bucket_size` elements or more, and gathers
    them in one call. It goes on once with every module that runs: a compiled block is one, of which another call
    gathers what no prefetch had reached. (PartitionedParameterCoordinator.fetch_sub_module.)
    """
    units = shape.n_layer + 2
    if not bucket_size:
        return units if compiled_blocks else len(matrices)
    calls = taken = 0
    for elements in matrices:
        taken += elements
        if taken >= bucket_size:
            calls, taken = calls + 1, 0
    calls += taken > 0
    return min(calls, 2 * units) if compiled_blocks else calls


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


def _ring_latency_s(gpus_per_node: int, num_nodes: int, interconnect: Interconnect) -> float:
    """Of one gather or scatter: every rank's part goes once around."""
    across_s = (num_nodes - 1) * (_NETWORK_HOP_S + interconnect.latency_s)
    return (gpus_per_node - 1) * num_nodes * _NODE_HOP_S + across_s
