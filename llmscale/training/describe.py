"""What is about to be trained, in five lines before step 1."""

from __future__ import annotations

from collections.abc import Callable

from llmscale.engine.distributed import World
from llmscale.training.prepared_run import PreparedRun


def describe_run(run: PreparedRun, world: World, num_samples: int, report: Callable[[str], None]) -> None:
    """What is about to be trained, before step 1."""
    shape, plan, manifest = run.resolved.shape, run.resolved.plan, run.location.manifest
    for warning in run.ds.warnings:
        report(f"WARNING: {warning}")
    report(
        f"model: {shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}, context {shape.seq_len}, "
        f"{shape.num_parameters:,} parameters, {shape.flops_per_token:.3e} FLOPs per token"
    )
    report(
        f"engine: ZeRO stage {run.zero_stage}, {run.precision}, activation checkpointing {run.checkpointing}, "
        f"{world.world_size} ranks on {len(world.ranks_per_node)} node(s), {world.device_name}"
    )
    report(f"batch: {plan.describe()}")
    report(
        f"data: {run.location.name}, {num_samples:,} samples of {manifest.seq_len} tokens ({manifest.tokenizer}), "
        f"{num_samples / plan.global_batch_size:,.1f} steps per epoch"
    )
    report(
        f"run: {run.resolved.total_steps:,} steps, {run.resolved.total_tokens:,} tokens, "
        f"{run.resolved.total_steps * plan.global_batch_size / num_samples:.2f} epochs; folder {run.config.run}"
    )
