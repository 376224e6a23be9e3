"""What the throughput model says of each part of a step, for comparison with a measured one. No torch."""

from __future__ import annotations

from llmscale.config.hardware import GPU, Cluster
from llmscale.config.interconnect import INTERCONNECTS
from llmscale.config.resolve import ResolvedRun
from llmscale.planning.compute_time import compute_parts
from llmscale.planning.kernels import Kernels
from llmscale.planning.throughput import estimate_step


def predict_step_parts(
    resolved: ResolvedRun, gpu: GPU, *, gpus_per_node: int, compiled_blocks: bool
) -> dict[str, float]:
    """Seconds of one optimizer step on one GPU by part; empty where the GPU's rate in this precision is not known.

    A step that offloads, or that crosses nodes whose network nobody named, has no "communication" here: the model
    knows no phase of the first by itself, and of the second no rate.
    """
    plan, kernels = resolved.plan, Kernels(compiled_blocks=compiled_blocks)
    args = (resolved.shape, plan.micro_batch_size, resolved.precision, resolved.checkpointing, gpu, kernels)
    compute = compute_parts(*args)
    # Within a node none of them is used.
    throughput = estimate_step(resolved, Cluster(gpu, gpus_per_node, INTERCONNECTS[0]), kernels)
    if compute is None or throughput is None:
        return {}
    micro_steps = plan.gradient_accumulation_steps
    parts = {
        "matrix products": micro_steps * compute.matmul_s,
        "attention": micro_steps * compute.attention_s,
        "norms and other operations": micro_steps * compute.block_traffic_s,
        "loss": micro_steps * compute.loss_s,
        "optimizer": throughput.optimizer_s,
    }
    if plan.ranks.world_size <= gpus_per_node and not throughput.offload_s:
        parts["communication"] = throughput.communication_s
    return parts
