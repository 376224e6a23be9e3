"""Time of an optimizer step, tokens per second and MFU, from a resolved step and its cluster. No torch.

    step = micro-steps x compute + what communication adds + optimizer + offload

Compute has three kinds of work per token: matrix products, (6 x 12 L h^2 + 6 V h) FLOPs at a share of the peak rate;
attention, 12 L h s FLOPs (not halved for the causal mask) at another share; norms, activations, residuals and loss,
8 L h x element bytes + V x logit bytes through the GPU's memory. Other kinds of blocks are counted by the same
formulas. A sliding window and document masks save no time: with a mask, PyTorch's memory-efficient kernel computes
every score.

Communication is counted as DeepSpeed 0.19.8 issues it, in passes of a ring (an all-reduce is two):

    stage 0   gradients all-reduced at the accumulation boundary
    stage 1   like stage 0, then parameters gathered once
    stage 2   gradients all-reduced every micro-step, then parameters gathered once
    stage 3   every micro-step: parameters gathered in the forward pass and, unless still there, in the backward pass;
              gradients reduce-scattered. With hpZ all gathers but a step's first stay within groups of ranks

Ranks that divide sequences (Ulysses) exchange tokens for heads in every block: `estimate_exchange_s`. Ranks that divide
experts exchange rows in every block with experts: `estimate_dispatch_s`. Each then gathers and reduces its own experts
alone.

Offload is counted as waiting, as in ZeRO-Infinity (Rajbhandari et al. 2021).

Nothing was measured by us on a GPU. The constants here and in llmscale.planning.kernels are a rounded least-squares fit
to 209 published bf16 rows of MosaicML's llm-foundry: A100 and H100, MPT 125M to 70B (GPT-3's shapes), 8 to 512 GPUs,
contexts of 512 to 65,536, micro-batches of 4,096 tokens and more, PyTorch FSDP with Triton's FlashAttention 1. On them
the relative error of tokens/s has a median of 2.4 %, a 90th percentile of 7.1 % and a maximum of 31 %. On 51 other
published runs from 9 sources it has a median of 8 % and a 90th percentile of 20 %, mostly too fast (docs/speed.md,
tests/planning/published_runs.py). How communication and arithmetic overlap cannot be told from the fitted rows: the
square root of the sum of squares was chosen among three forms on those 51 runs (the sum has a median error of 15 %,
hiding as long as possible 11 %). Not modelled: data loading, launch overhead of micro-batches below 4,096 tokens, and
differences between DeepSpeed and FSDP.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from llmscale.architecture.layers import Architecture, ParameterTensors, sum_of_work
from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import CheckpointingMode, Precision
from llmscale.config.hardware import GPU, Cluster, Interconnect
from llmscale.config.resolve import ResolvedStep
from llmscale.memory.gathers import Gathers, count_gathers, persistent_parameters
from llmscale.memory.zero_setup import BYTES_PER_ELEMENT, zero_setup
from llmscale.planning.kernels import KernelSettings, kernel_efficiency, memory_bytes_per_s

#: Known error of tokens/s (tests/planning/test_step_time.py, tests/planning/test_published_runs.py).
RATE_ERROR = (
    "within 7 % for 9 of 10 of the 209 published rows that it was fitted to (A100 and H100, bf16, ZeRO stage 3, 8 to "
    "512 GPUs); on 51 other published runs within 8 % in the median (12 % without the 16 "
    "that one constant was chosen by), 20 % for 9 of 10, and mostly too high"
)
#: GPUs on which published runs were compared with the estimates, by their names in the table (same tests).
GPUS_WITH_RUNS = ("a100-40gb", "a100-80gb", "h100-80gb", "h200")
#: Smallest micro-batch of the fitted rows. With a smaller one a GPU may wait for its next kernel, which is not counted.
SMALLEST_MICRO_BATCH_TOKENS = 4096

#: Forward and backward passes in units of forward passes.
_PASSES = 3
#: Factor of full recomputation, which repeats the forward pass.
_RECOMPUTED = 4 / 3
#: KernelSettings of train.py by default.
OWN_KERNELS = KernelSettings()
#: Share of a link's peak rate that a ring reaches. NCCL assumes 240 of an A100's 300 GB/s and 371 of an H100's 450
#: (src/graph/topo.h, SM80_NVLINK_BW x 12 links, SM90_NVLINK_BW x 18).
_LINK_SHARE = 0.8
#: Seconds of a ring's hop within a node, and between nodes in addition to the network's latency (NCCL,
#: src/graph/tuning.cc, hwLatencies of a ring's Simple protocol).
_NODE_HOP_S = 3.4e-6
_NETWORK_HOP_S = 14e-6
#: Seconds of a hop in NCCL's protocol for small tensors, LL.
_SMALL_NODE_HOP_S = 0.6e-6
_SMALL_NETWORK_HOP_S = 2.7e-6
#: Share of a collective's latency that ranks wait (fitted).
_WAITED = 0.66
#: Passes through the GPU's memory for every byte that a collective gathers or reduces: buckets, casts, and
#: the bandwidth that NCCL takes from kernels beside it (fitted).
_COPIES = 6.7
#: Bytes of a 16-bit parameter that an optimizer step writes, and of a 16-bit gradient.
_WRITTEN_BYTES = 2


def unproven_rates(gpus: Iterable[GPU]) -> Iterator[str]:
    """Yield a line that names the GPUs on which no published run was compared with an estimate of speed."""
    names = [gpu.name for gpu in dict.fromkeys(gpus) if gpu.name not in GPUS_WITH_RUNS]
    if names:
        yield (
            f"No published run on {' or '.join(names)} has checked this estimate: speed and price are extrapolated "
            "from A100 and H100."
        )


def peak_flops(gpu: GPU, precision: Precision) -> float | None:
    """Return the peak FLOP/s in this precision; None if the GPU's fp32 rate is not in the table."""
    return gpu.fp32_flops if precision == "fp32" else gpu.dense_16bit_flops


@dataclass(frozen=True)
class TokenWork:
    """Work of one token's forward and backward pass, recomputation included."""

    matmul_flops: float
    attention_flops: float
    block_bytes: float
    """Memory traffic of the blocks' norms, activations and residuals."""
    head_bytes: float
    """Memory traffic of the loss."""

    @property
    def moved_bytes(self) -> float:
        return self.block_bytes + self.head_bytes


@dataclass(frozen=True)
class ComputeParts:
    """Seconds of one forward and backward pass of a micro-batch."""

    matmul_s: float
    attention_s: float
    block_traffic_s: float
    """Seconds of norms, activations and residuals."""
    loss_s: float
    """Seconds of the loss without its matrix products."""

    @property
    def total_s(self) -> float:
        return self.matmul_s + self.attention_s + self.block_traffic_s + self.loss_s


def _passes_of_tiles(shape: GPTShape, checkpointing: CheckpointingMode) -> int:
    """Return how often an MLP in tiles is computed beside its forward pass and a checkpoint's of matrix products.

    The backward pass of a tile begins with its forward pass. If norms come before, that one is also the
    checkpoint's; else both run, and `selective` keeps no product of a tile (tile_mlps).
    """
    if shape.norm_placement == "pre":
        return 0 if checkpointing == "full" else 1
    return 2 if checkpointing == "selective" else 1


def token_work(
    shape: GPTShape, tokens: int, precision: Precision, checkpointing: CheckpointingMode, kernels: KernelSettings
) -> TokenWork:
    """Return the work per token in a micro-batch of `tokens`."""
    model = shape.architecture
    # `selective` keeps the results of matrix products and attention, and recomputes the operations between them.
    again = _RECOMPUTED if checkpointing == "full" else 1.0
    again_between = 1.0 if checkpointing == "none" else _RECOMPUTED
    of_blocks = model.blocks_work
    of_head = model.head.work
    wide = 2 if precision == "fp32" else 1
    if shape.mlp_tile_tokens:
        tiled = [layer for layer in model.block if layer.name == "mlp"]
    else:
        tiled = []
    in_tiles = shape.n_layer * sum_of_work(tiled).matmul_flops * _passes_of_tiles(shape, checkpointing)
    # Weights beside adapters get no gradients; the adapters' own are too small to count.
    saved = 1 if model.has_adapters else 0
    of_matmuls = (_PASSES * again - saved) * of_blocks.matmul_flops + (_PASSES - saved) * of_head.matmul_flops
    return TokenWork(
        matmul_flops=of_matmuls + in_tiles,
        attention_flops=_PASSES * of_blocks.attention_flops * shape.seq_len * again,
        block_bytes=wide * kernels.element_bytes * of_blocks.elementwise * again_between,
        head_bytes=wide * kernels.logit_bytes(shape.n_embd, tokens) * of_head.elementwise,
    )


def estimate_compute_s(
    shape: GPTShape,
    micro_batch_size: float,
    precision: Precision,
    checkpointing: CheckpointingMode,
    gpu: GPU,
    kernels: KernelSettings = OWN_KERNELS,
) -> float | None:
    """Return seconds of a micro-batch's forward and backward pass, recomputation included; None at an unknown rate.

    `micro_batch_size` is fractional for ranks that divide sequences.
    """
    parts = compute_parts(shape, micro_batch_size, precision, checkpointing, gpu, kernels)
    return None if parts is None else parts.total_s


def compute_parts(
    shape: GPTShape,
    micro_batch_size: float,
    precision: Precision,
    checkpointing: CheckpointingMode,
    gpu: GPU,
    kernels: KernelSettings = OWN_KERNELS,
) -> ComputeParts | None:
    """Return seconds of a micro-batch's passes by kind of work; None if the GPU's rate is unknown."""
    peak = peak_flops(gpu, precision)
    if peak is None:
        return None
    efficiency = kernel_efficiency(gpu)
    tokens = round(micro_batch_size * shape.seq_len)
    of_attention = efficiency.attention(kernels, shape, precision, gpu, checkpointing)
    work = token_work(shape, tokens, precision, checkpointing, kernels)
    return ComputeParts(
        matmul_s=tokens * work.matmul_flops / (peak * efficiency.matmul),
        attention_s=tokens * work.attention_flops / (peak * of_attention),
        block_traffic_s=tokens * work.block_bytes / memory_bytes_per_s(gpu),
        loss_s=tokens * work.head_bytes / memory_bytes_per_s(gpu),
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes and calls of one rank in one optimizer step."""

    gathered_bytes: float
    """Bytes of complete parameters, for each gather from all ranks."""
    reduced_bytes: float
    """Bytes of complete gradients, for each pass of a ring."""
    collectives: int
    """Calls among all ranks."""
    group_gathered_bytes: float = 0.0
    """Bytes of complete parameters, for each gather within an hpZ group."""
    group_collectives: int = 0
    """Calls within a group."""
    group_ranks: int = 1
    """Ranks of an hpZ group."""
    small_collectives: int = 0
    """Calls among all ranks for a single bias or norm."""

    @property
    def group_bytes_per_rank(self) -> float:
        """Return the bytes through a rank's link in one direction, in the ring of its hpZ group."""
        return self.group_gathered_bytes * (self.group_ranks - 1) / self.group_ranks

    def bytes_per_rank(self, ring_ranks: int) -> float:
        """Return the bytes through a rank's link in one direction, in a ring of all ranks with shards."""
        return (self.gathered_bytes + self.reduced_bytes) * (ring_ranks - 1) / ring_ranks


def count_traffic(step: ResolvedStep, *, compiled_blocks: bool = False) -> Traffic:
    """Return the traffic of an optimizer step. Stage 3 gathers a compiled block at once, an eager one by matrix."""
    config = step.engine_config
    micro_steps = step.plan.gradient_accumulation_steps
    elements = step.rank_tensors.num_trainable
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
    """Follow DeepSpeed through a micro-step, where parameters still gathered or prefetched are not gathered again.

    With hpZ a step's first forward pass gathers from all ranks, and leaves the copies for the other passes.
    """
    config = step.engine_config
    held = step.rank_tensors
    if compiled_blocks:
        tensors = _of_compiled_blocks(held.architecture)
    else:
        tensors = held
    micro_steps = step.plan.gradient_accumulation_steps
    group = config.zero.zero_hpz_partition_size
    # A compiled block that recomputes selectively does so within its graph.
    recomputes = step.checkpointing == "full" or (step.checkpointing == "selective" and not compiled_blocks)
    # All micro-steps are alike.
    setup = zero_setup(step).with_micro_steps(1)
    forward, backward = count_gathers(tensors, setup, recomputes)
    everything = Gathers().plus(forward, micro_steps).plus(backward, micro_steps)
    from_all = forward if group > 1 else everything
    from_group = everything.plus(from_all, -1)
    # Gathered one by one after a step (DeepSpeedZeroOptimizer_Stage3._post_step).
    persistent = [tensor.elements for tensor in persistent_parameters(held.all, setup).values()]
    matrices = sum(tensor.kind != "vector" for tensor in held.all)
    trained = held.num_trainable
    scatters = min(-(-trained // max(1, config.zero.reduce_bucket_size)), matrices)
    parameter_bytes = BYTES_PER_ELEMENT[config.model_dtype]
    return Traffic(
        gathered_bytes=(from_all.elements + sum(persistent)) * parameter_bytes,
        reduced_bytes=micro_steps * trained * BYTES_PER_ELEMENT[config.communication_data_type],
        collectives=from_all.calls + micro_steps * scatters,
        small_collectives=len(persistent),
        group_gathered_bytes=from_group.elements * parameter_bytes,
        group_collectives=from_group.calls,
        group_ranks=group,
    )


@lru_cache(maxsize=16)
def _of_compiled_blocks(model: Architecture) -> ParameterTensors:
    """Return the parameters with each block as one module, as DeepSpeed gathers compiled blocks."""
    return ParameterTensors(model.with_combined_blocks())


def ring_bytes_per_s(gpu: GPU, gpus_per_node: int, num_nodes: int, interconnect: Interconnect) -> float:
    """Return the rate of a rank's part of a ring in one direction.

    Between nodes NCCL builds a ring per adapter, and each leaves the node once. So a rank is limited by its link or by
    all adapters of its node together, not by its own adapter.
    """
    if num_nodes == 1:
        return gpu.link_bytes_per_s
    network = interconnect.bytes_per_s_per_node(gpus_per_node)
    if gpus_per_node == 1:
        return network
    return min(gpu.link_bytes_per_s, network)


@dataclass(frozen=True)
class CommunicationTime:
    """Seconds of a step's traffic, before any overlap with the arithmetic."""

    wire_s: float
    """Transfers on the slowest link."""
    waiting_s: float
    """Latency of the collectives."""
    copies_s: float
    """Copies in the GPU's memory."""


def estimate_communication(
    traffic: Traffic, gpu: GPU, gpus_per_node: int, num_nodes: int, interconnect: Interconnect
) -> CommunicationTime:
    """Return the communication time of an optimizer step."""
    ranks = gpus_per_node * num_nodes
    if ranks == 1:
        return CommunicationTime(0.0, 0.0, 0.0)
    copied_bytes = traffic.gathered_bytes + traffic.reduced_bytes + traffic.group_gathered_bytes
    wire_s = traffic.bytes_per_rank(ranks) / ring_bytes_per_s(gpu, gpus_per_node, num_nodes, interconnect)
    hops_s = traffic.collectives * _ring_latency_s(gpus_per_node, num_nodes, interconnect)
    small = (_SMALL_NODE_HOP_S, _SMALL_NETWORK_HOP_S)
    hops_s += traffic.small_collectives * _ring_latency_s(gpus_per_node, num_nodes, interconnect, small)
    if traffic.group_ranks > 1:
        # Groups are neighbouring ranks. A group across nodes uses the network like all ranks.
        is_within = gpus_per_node % traffic.group_ranks == 0
        if is_within:
            nodes = 1
        else:
            nodes = max(2, -(-traffic.group_ranks // gpus_per_node))
        wire_s += traffic.group_bytes_per_rank / ring_bytes_per_s(gpu, gpus_per_node, nodes, interconnect)
        within = traffic.group_ranks // nodes
        hops_s += traffic.group_collectives * _ring_latency_s(within, nodes, interconnect)
    return CommunicationTime(
        wire_s=wire_s / _LINK_SHARE,
        waiting_s=_WAITED * hops_s,
        copies_s=_COPIES * copied_bytes / memory_bytes_per_s(gpu),
    )


def estimate_exchange_s(step: ResolvedStep, gpu: GPU, gpus_per_node: int, interconnect: Interconnect) -> float:
    """Return seconds per step in which ranks that divide sequences exchange tokens for heads; nothing hides them.

    Every block sends q, k, v before attention and the result after it, in the backward pass their gradients, and with
    checkpointing all of it again.
    """
    shape = step.shape
    plan = step.plan
    size = step.plan.ranks.sequence_parallel_size
    if size == 1:
        return 0.0
    heads, kv_heads = plan.ranks.heads_of_rank(shape.n_head, shape.n_kv_head)
    width = 4 if step.precision == "fp32" else 2
    sent_bytes = plan.tokens_per_forward * 2 * (heads + kv_heads) * size * shape.head_dim * width
    # Each of the two messages is copied into the order of ranks, and from it.
    seconds = _exchange_s(sent_bytes, size, gpu, gpus_per_node, interconnect) + 4 * sent_bytes / memory_bytes_per_s(gpu)
    return _num_passes(step) * shape.n_layer * seconds


def estimate_dispatch_s(step: ResolvedStep, gpu: GPU, gpus_per_node: int, interconnect: Interconnect) -> float:
    """Return seconds per step in which ranks that divide experts exchange rows, with equal loads; nothing hides them.

    Every block with experts sends each token's rows to the ranks of its experts and gets the results back, in the
    backward pass their gradients, and with checkpointing both again. The copies in the order of experts, of ranks, and
    back are counted with these, those of the numbers of rows are not.
    """
    shape = step.shape
    plan = step.plan
    size = step.plan.ranks.expert_parallel_size
    if size == 1:
        return 0.0
    width = 4 if step.precision == "fp32" else 2
    sent_bytes = plan.tokens_per_forward * shape.experts_per_token * shape.n_embd * width
    exchange_s = _exchange_s(2 * sent_bytes, size, gpu, gpus_per_node, interconnect)
    blocks = sum(map(shape.is_sparse, range(shape.n_layer)))
    return _num_passes(step) * blocks * (exchange_s + 4 * sent_bytes / memory_bytes_per_s(gpu))


def _num_passes(step: ResolvedStep) -> int:
    """Return how often a step exchanges in each block: forward, backward and recomputed, per micro-batch."""
    return (2 if step.checkpointing == "none" else 3) * step.plan.gradient_accumulation_steps


def _exchange_s(sent_bytes: float, size: int, gpu: GPU, gpus_per_node: int, interconnect: Interconnect) -> float:
    """Return seconds of two all-to-alls among `size` neighbouring ranks, of which each sends `sent_bytes` in both.

    A rank keeps 1 / size of each message; parts for other nodes take the network.
    """
    near = math.gcd(size, gpus_per_node)
    wire_s = sent_bytes * (near - 1) / size / gpu.link_bytes_per_s
    hops_s = 2 * (near - 1) * _NODE_HOP_S
    if size > near:
        network = interconnect.bytes_per_s_per_node(gpus_per_node) / gpus_per_node
        wire_s += sent_bytes * (size - near) / size / network
        hops_s += 2 * (size - near) * (_NETWORK_HOP_S + interconnect.latency_s)
    return wire_s / _LINK_SHARE + _WAITED * hops_s


def _ring_latency_s(
    gpus_per_node: int,
    num_nodes: int,
    interconnect: Interconnect,
    hops_s: tuple[float, float] = (_NODE_HOP_S, _NETWORK_HOP_S),
) -> float:
    """Return the latency of a gather or scatter, once around the ring. `hops_s`: within a node, and between nodes."""
    within_s, across_s = hops_s
    return (gpus_per_node - 1) * num_nodes * within_s + (num_nodes - 1) * (across_s + interconnect.latency_s)


@dataclass(frozen=True)
class HostRates:
    """Rates of a node's memory and disk. The defaults are assumptions, not measurements."""

    memory_bytes_per_s: float = 100e9
    """Rate of an optimizer step on the host, and limit of copies to and from GPUs, for all ranks of a node together: a
    server with two sockets."""
    nvme_bytes_per_s: float = 6e9
    """Rate of reading and writing for all ranks of a node together: one PCIe 4.0 drive."""


def estimate_offload_s(step: ResolvedStep, cluster: Cluster, traffic: Traffic, host: HostRates | None = None) -> float:
    """Return seconds per step that a rank waits for its host: copies, the optimizer step on the CPU, the disk."""
    host = host or HostRates()
    shape = step.shape
    zero = step.engine_config.zero
    ranks_per_node = cluster.gpus_per_node
    width = BYTES_PER_ELEMENT[step.engine_config.model_dtype]
    world_size = step.plan.ranks.world_size
    micro_steps = step.plan.gradient_accumulation_steps
    # Ranks that divide experts have as many states each as ranks that do not.
    share = step.tensors.num_trainable / world_size
    link_bytes = 0.0
    nvme_bytes = 0.0
    seconds = 0.0
    if zero.offload_optimizer.device != "none":
        copies = micro_steps if zero.stage >= 2 else 1
        link_bytes += share * (copies + 1) * width
        step_bytes = step.stored_optimizer.step_bytes_per_weight(shape.architecture)
        seconds += share * ranks_per_node * step_bytes / host.memory_bytes_per_s
        if zero.offload_optimizer.device == "nvme":
            nvme_bytes += share * 2 * step.stored_optimizer.state_bytes_per_weight(shape.architecture)
    if zero.offload_param.device != "none":
        shards = traffic.gathered_bytes / world_size
        link_bytes += shards
        if zero.offload_param.device == "nvme":
            nvme_bytes += shards
    if step.engine_config.cpu_checkpointing:
        activation_width = 4 if step.precision == "fp32" else 2
        saved = step.plan.tokens_per_forward * shape.n_embd * shape.n_layer * activation_width
        link_bytes += 2 * micro_steps * saved
    # All GPUs of a node copy at the same time from one host's memory.
    link = min(cluster.gpu.host_link_bytes_per_s, host.memory_bytes_per_s / ranks_per_node)
    return seconds + link_bytes / link + nvme_bytes * ranks_per_node / host.nvme_bytes_per_s


@dataclass(frozen=True)
class Throughput:
    """Seconds of an optimizer step, the sum of its parts, and its rates."""

    step_s: float
    compute_s: float
    """Forward and backward passes of all micro-steps."""
    communication_s: float
    """Communication that the arithmetic does not hide."""
    optimizer_s: float
    """Optimizer step on the GPU, and the sum of gradients over micro-steps."""
    offload_s: float
    """Copies to and from the host, the optimizer step there, the disk."""
    tokens_per_second: float
    """Rate of all GPUs together, with eager blocks."""
    mfu: float | None
    """Fraction of the 16-bit peak that the model's FLOPs reach, as train.py reports it; None for fp32."""
    compiled_tokens_per_second: float
    """Rate of all GPUs together, with compiled blocks (--compile)."""


def estimate_step(
    step: ResolvedStep,
    cluster: Cluster,
    kernels: KernelSettings = OWN_KERNELS,
    traffic: Traffic | None = None,
) -> Throughput | None:
    """Estimate the time of an optimizer step; None when the GPU's rate in the run's precision is not known.

    `cluster.gpus_per_node` must divide the world size, or be no smaller. `traffic` replaces DeepSpeed's traffic.
    """
    plan = step.plan
    gpu = cluster.gpu
    micro_step_s = _micro_step_s(step, gpu, kernels)
    if micro_step_s is None:
        return None
    compiled_traffic = traffic or count_traffic(step, compiled_blocks=True)
    if traffic is None:
        if kernels.compiled_blocks:
            traffic = compiled_traffic
        else:
            traffic = count_traffic(step)
    ranks_per_node = min(cluster.gpus_per_node, plan.ranks.world_size)
    cluster = replace(cluster, gpus_per_node=ranks_per_node)
    num_nodes = -(-plan.ranks.world_size // ranks_per_node)
    machines = (gpu, ranks_per_node, num_nodes, cluster.interconnect)
    compute_s = micro_step_s * plan.gradient_accumulation_steps
    exchange_s = estimate_exchange_s(step, gpu, ranks_per_node, cluster.interconnect)
    exchange_s += estimate_dispatch_s(step, gpu, ranks_per_node, cluster.interconnect)
    communication_s = _exposed_s(compute_s, estimate_communication(traffic, *machines), traffic, step) + exchange_s
    offload_s = estimate_offload_s(step, cluster, traffic)
    optimizer_s = _optimizer_s(step, gpu)
    step_s = compute_s + communication_s + optimizer_s + offload_s
    compiled_micro_step_s = _micro_step_s(step, gpu, replace(kernels, compiled_blocks=True))
    assert compiled_micro_step_s is not None
    compiled_compute_s = compiled_micro_step_s * plan.gradient_accumulation_steps
    compiled_communication = estimate_communication(compiled_traffic, *machines)
    compiled_s = compiled_compute_s + _exposed_s(compiled_compute_s, compiled_communication, compiled_traffic, step)
    compiled_s += exchange_s + optimizer_s + offload_s
    tokens_per_second = plan.tokens_per_step / step_s
    mfu = tokens_per_second * step.shape.flops_per_token / (plan.ranks.world_size * gpu.dense_16bit_flops)
    return Throughput(
        step_s=step_s,
        compute_s=compute_s,
        communication_s=communication_s,
        optimizer_s=optimizer_s,
        offload_s=offload_s,
        tokens_per_second=tokens_per_second,
        mfu=None if step.precision == "fp32" else mfu,
        compiled_tokens_per_second=plan.tokens_per_step / compiled_s,
    )


def _micro_step_s(step: ResolvedStep, gpu: GPU, kernels: KernelSettings) -> float | None:
    sequences = step.plan.micro_batch_size / step.plan.ranks.sequence_parallel_size
    return estimate_compute_s(step.shape, sequences, step.precision, step.checkpointing, gpu, kernels)


def _exposed_s(compute_s: float, communication: CommunicationTime, traffic: Traffic, step: ResolvedStep) -> float:
    """Return the seconds that communication adds to the arithmetic.

    Transfers beside the arithmetic (overlap_comm: at stage 3 all, below it the reductions) and the arithmetic together
    take the square root of the sum of their squares.
    """
    busy_s = compute_s + communication.copies_s + communication.waiting_s
    beside_s = 0.0
    if step.engine_config.zero.overlap_comm:
        reduced = traffic.reduced_bytes / max(1.0, traffic.gathered_bytes + traffic.reduced_bytes)
        beside_s = communication.wire_s * (1.0 if step.zero_stage == 3 else reduced)
    return math.hypot(busy_s, beside_s) + communication.wire_s - beside_s - compute_s


def _optimizer_s(step: ResolvedStep, gpu: GPU) -> float:
    shape = step.shape
    micro_steps = step.plan.gradient_accumulation_steps
    trained = step.tensors.num_trainable
    # At stage 0 every rank steps all parameters. Muon's matrix products run on the GPU, wherever the states are.
    sharing_ranks = step.plan.ranks.world_size if step.zero_stage else 1
    step_flops = step.optimizer.step_flops(shape.architecture) / sharing_ranks
    seconds = step_flops / (gpu.dense_16bit_flops * kernel_efficiency(gpu).matmul)
    moved_bytes = 0.0
    if step.engine_config.zero.offload_optimizer.device == "none":
        moved_bytes = step.stored_optimizer.step_bytes_per_weight(shape.architecture) + _WRITTEN_BYTES
    moved_bytes *= trained / sharing_ranks
    if step.zero_stage < 2 and micro_steps > 1:
        # Below stage 2 every rank sums complete gradients: the new one is read, the sum is read and written.
        summed_bytes = _WRITTEN_BYTES + 2 * BYTES_PER_ELEMENT[step.engine_config.grad_accum_dtype]
        moved_bytes += micro_steps * summed_bytes * step.rank_tensors.num_trainable
    return seconds + moved_bytes / memory_bytes_per_s(gpu)
