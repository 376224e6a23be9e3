"""What is about to be trained, in a few lines before step 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from llmscale.config.choices import batch_words, gradient_words, optimizer_words, preset_words, steps_words
from llmscale.config.hf_model import is_published
from llmscale.engine.process_group import World
from llmscale.training.run_inputs import PreparedRun


def describe_run(run: PreparedRun, world: World, num_samples: int, report: Callable[[str], None]) -> None:
    """What is about to be trained, before step 1, with what was decided and not asked for."""
    config, resolved, manifest = run.config, run.resolved, run.location.manifest
    shape, plan, ds_config = resolved.shape, resolved.plan, resolved.ds_config
    for warning in resolved.ds.warnings:
        report(f"WARNING: {warning}")
    report(
        f"model: {shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}, context {shape.seq_len}, "
        f"{shape.num_parameters:,} parameters, {shape.flops_per_token:.3e} FLOPs per token"
    )
    reshaped = f"its shape is from {config.model}" if is_published(config.model) else preset_words(config.model, shape)
    if reshaped:
        report(f"       {reshaped}")
    if shape.has_document_mask:
        report(f"       {_documents(run)}")
    report(
        f"engine: ZeRO stage {resolved.zero_stage}, {resolved.precision}, activation checkpointing "
        f"{resolved.checkpointing}, {world.world_size} ranks on {len(world.ranks_per_node)} node(s), "
        f"{world.device_name}"
    )
    report(f"blocks: {run.compilation.describe()}")
    report("; ".join([f"batch: {plan.describe()}", *batch_words(config)]))
    report(f"gradients: {gradient_words(plan, ds_config)}")
    report(f"optimizer: {optimizer_words(config, resolved.schedule, cast('float', ds_config['gradient_clipping']))}")
    report(
        f"data: {run.location.name}, {num_samples:,} samples of {manifest.seq_len} tokens ({manifest.tokenizer}), "
        f"{num_samples / plan.global_batch_size:,.1f} steps per epoch; {_validation(run)}"
    )
    chosen = steps_words(config, resolved, num_samples)
    report(
        f"run: {resolved.total_steps:,} steps{f' ({chosen})' if chosen else ''}, {resolved.total_tokens:,} tokens, "
        f"{resolved.total_steps * plan.global_batch_size / num_samples:.2f} epochs; folder {config.run}, "
        f"{_checkpoints(run)}"
    )


def _documents(run: PreparedRun) -> str:
    shape, split = run.resolved.shape, run.location.manifest.splits["train"]
    mean = split.num_tokens / max(1, split.num_documents)
    least = shape.architecture.flops_per_token(min(shape.seq_len, round(mean)))
    return (
        f"documents do not see each other: {mean:,.0f} tokens each on average, of which {least:.3e} FLOPs per token "
        "would be the count; here and in the MFU it is that of the whole context"
    )


def _validation(run: PreparedRun) -> str:
    config, split = run.config, run.location.manifest.splits.get("val")
    if split is None:
        return "no validation, the set has no split for it"
    if not config.val_every:
        return "no validation (--val-every 0)"
    used = min(config.val_samples, split.num_samples)
    return f"validation every {config.val_every:,} steps on {used:,} of {split.num_samples:,} samples"


def _checkpoints(run: PreparedRun) -> str:
    config = run.config
    every = [f"every {config.save_every:,} steps"] if config.save_every else []
    every += [f"every {config.save_every_minutes:g} minutes"] if config.save_every_minutes else []
    kept = f", those of every {config.keep_every:,} steps for ever" if config.keep_every else ""
    return f"checkpoints {' and '.join([*every, 'at the end'])}, the last {config.keep_last} kept{kept}"
