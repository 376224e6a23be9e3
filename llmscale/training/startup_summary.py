"""What is about to be trained, in a few lines before step 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from llmscale.config.describe_defaults import (
    describe_batch,
    describe_gradients,
    describe_optimizer,
    describe_preset,
    describe_steps,
    warn_of_learning_rate,
)
from llmscale.config.hf_model import is_published
from llmscale.data.validation import describe_samples
from llmscale.engine.device_settings import describe_settings
from llmscale.training.live_run import LiveRun
from llmscale.training.run_data import SampleStream
from llmscale.training.run_inputs import PreparedRun


def describe_run(live: LiveRun) -> None:
    """Print what is about to be trained, before step 1, with every choice that was not asked for."""
    run, world, stream, report = live.run, live.world, live.stream, live.report
    config, resolved, manifest = run.config, run.resolved, run.sets.manifest
    num_samples = run.sets.num_train_samples
    shape, plan, ds_config = resolved.shape, resolved.plan, resolved.ds_config
    hpz = hpz_warnings(resolved.ds.zero_hpz_partition_size, world.ranks_per_node)
    for warning in (*resolved.ds.warnings, *hpz):
        report(f"WARNING: {warning}")
    report(
        f"model: {shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}, context {shape.seq_len}, "
        f"{shape.num_parameters:,} parameters, {shape.flops_per_token:.3e} FLOPs per token"
    )
    reshaped = (
        f"its shape is from {config.model}" if is_published(config.model) else describe_preset(config.model, shape)
    )
    if reshaped:
        report(f"       {reshaped}")
    if shape.has_document_mask:
        report(f"       {_documents(run)}")
    report(
        f"engine: ZeRO stage {resolved.zero_stage}, {resolved.precision}, activation checkpointing "
        f"{resolved.checkpointing}, {world.world_size} ranks on {len(world.ranks_per_node)} nodes, "
        f"{world.device_name}"
    )
    report(f"blocks: {run.compilation.describe()}")
    if world.device.type != "cpu":
        report(describe_settings())
    report("; ".join([f"batch: {plan.describe()}", *describe_batch(config)]))
    report(f"gradients: {describe_gradients(plan, ds_config)}")
    report(f"optimizer: {describe_optimizer(config, resolved.schedule, cast('float', ds_config['gradient_clipping']))}")
    if high_rate := warn_of_learning_rate(config, resolved.schedule):
        report(f"WARNING: {high_rate}")
    report(
        f"data: {run.sets.name}, {num_samples:,} samples of {manifest.seq_len} tokens ({manifest.tokenizer}), "
        f"{num_samples / plan.global_batch_size:,.1f} steps per epoch; {_validation(live)}"
    )
    if run.tasks:
        tasks = ", ".join(f"{task.name} ({len(task.items):,} items)" for task in run.tasks)
        report(f"      evaluation every {config.eval_every:,} steps on {tasks}")
    for line in (*mix_lines(run, stream), *skip_lines(stream)):
        report(f"      {line}")
    chosen = describe_steps(config, resolved, num_samples)
    total = stream.samples_after(resolved.total_steps)
    report(
        f"run: {resolved.total_steps:,} steps{f' ({chosen})' if chosen else ''}, {total * plan.seq_len:,} tokens, "
        f"{total / num_samples:.2f} epochs; folder {config.run}, {_checkpoints(run)}"
    )


def mix_lines(run: PreparedRun, stream: SampleStream) -> Iterator[str]:
    """Yield how often each set of a mix is seen, and its part in each stage."""
    if stream.mix is None:
        return
    drawn, stages = stream.drawn(stream.samples_after(run.resolved.total_steps)), stream.mix.stages
    width = max(map(len, run.sets.names))
    for place, (name, location) in enumerate(zip(run.sets.names, run.sets.locations, strict=True)):
        size = location.manifest.splits["train"].num_samples
        parts = " then ".join(f"{stage.shares[place] / sum(stage.shares):.2%}" for stage in stages)
        yield (
            f"{name:{width}}  {parts} of the samples: {drawn[place]:,} in this run, {drawn[place] / size:.2f} epochs "
            f"of {size:,}"
        )
    if len(stages) > 1:
        begins = ", ".join(f"{stage.begin:,}" for stage in stages[1:])
        yield f"{'':{width}}  the proportions change after {begins} samples"


def skip_lines(stream: SampleStream) -> Iterator[str]:
    """What the run leaves out."""
    for skip in stream.skips:
        yield f"left out: steps {skip.steps} of --skip-steps, samples {skip.begin:,} to {skip.end - 1:,} of the stream"


def hpz_warnings(group: int, ranks_per_node: Sequence[int]) -> Iterator[str]:
    """What is wasted when groups of that many neighbouring ranks keep second copies of the parameters."""
    if group > 1 and len(ranks_per_node) == 1:
        yield f"zero_hpz_partition_size {group} saves no traffic on one node; the second copies only take memory."
    elif group > 1 and any(ranks % group for ranks in ranks_per_node):
        yield (
            f"zero_hpz_partition_size {group}: the groups do not lie within nodes of {min(ranks_per_node)} ranks, and "
            "gather their second copies over the network. Set it to the number of ranks per node."
        )


def _documents(run: PreparedRun) -> str:
    shape, splits = run.resolved.shape, [at.manifest.splits["train"] for at in run.sets.locations]
    mean = sum(split.num_tokens for split in splits) / max(1, sum(split.num_documents for split in splits))
    least = shape.architecture.flops_per_token(min(shape.seq_len, round(mean)))
    return (
        f"documents do not see each other: {mean:,.0f} tokens each on average, of which {least:.3e} FLOPs per token "
        "would be the count; here and in the MFU it is that of the whole context"
    )


def _validation(live: LiveRun) -> str:
    run, config = live.run, live.run.config
    available = sum(at.manifest.splits["val"].num_samples for at in run.sets.with_split("val"))
    if not available:
        return "no validation, the set has no split for it"
    if not config.val_every:
        return "no validation (--val-every 0)"
    return f"validation every {config.val_every:,} steps on {describe_samples(live.validation)} of {available:,}"


def _checkpoints(run: PreparedRun) -> str:
    config = run.config
    every = [f"every {config.save_every:,} steps"] if config.save_every else []
    every += [f"every {config.save_every_minutes:g} minutes"] if config.save_every_minutes else []
    kept = f", those of every {config.keep_every:,} steps for ever" if config.keep_every else ""
    return f"checkpoints {' and '.join([*every, 'at the end'])}, the last {config.keep_last} kept{kept}"
