"""Reports of a start: the summary before step 1, then start-up times, compilation and measured memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import cast

from llmscale.config.describe_defaults import (
    describe_batch,
    describe_gradients,
    describe_optimizer,
    describe_parameters,
    describe_preset,
    describe_steps,
    warn_of_learning_rate,
    warn_of_router,
)
from llmscale.config.hardware import GPU, find_gpu, has_bf16
from llmscale.config.hf_model import is_published
from llmscale.config.run_urls import shown
from llmscale.data.validation import describe_samples
from llmscale.engine.collectives import gather
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.device_memory import device_memory_bytes, gpu_capability, measured_memory
from llmscale.engine.device_settings import describe_settings
from llmscale.files.buffered_log import warn_on_stderr
from llmscale.planning.recommend import largest_preset
from llmscale.planning.search import Machines
from llmscale.terminal.human_numbers import count_nouns
from llmscale.training.inputs import DEMO_TEXT, parse_skip
from llmscale.training.live_run import Run, RunIO, StepAction, StepResult
from llmscale.training.memory_report import measured_line
from llmscale.training.rank_agreement import describe_ranks
from llmscale.training.sample_stream import saved_skips
from llmscale.training.start import Start

#: Steps of this start after which memory is measured: DeepSpeed allocates more after the first.
_MEASURED_STEP = 2


def describe_run(run: Run, report: Callable[[str], None]) -> None:
    """Print the run before step 1, with every choice that the user did not make."""
    start, world, config, resolved = run.start, run.world, run.config, run.resolved
    manifest, num_samples = start.sets.manifest, start.sets.num_train_samples
    shape, plan, ds_config = resolved.shape, resolved.plan, resolved.ds_config
    hpz = hpz_warnings(resolved.ds.zero_hpz_partition_size, world.ranks_per_node)
    for warning in (*resolved.ds.warnings, *resolved.ds.batch_notices(plan), *hpz):
        report(f"WARNING: {warning}")
    report(
        f"model: {shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}, context {shape.seq_len}, "
        f"{describe_parameters(shape)}, {shape.flops_per_token:.3e} FLOPs per token"
    )
    reshaped = (
        f"its shape is from {config.model}" if is_published(config.model) else describe_preset(config.model, shape)
    )
    if reshaped:
        report(f"       {reshaped}")
    if resolved.tensors.frozen:
        report(f"       {resolved.tensors.num_trainable:,} parameters are trained, the others frozen")
    if shape.has_document_mask:
        report(f"       {_documents(start)}")
    report(
        f"engine: ZeRO stage {resolved.zero_stage}, {resolved.precision}, activation checkpointing "
        f"{resolved.checkpointing}, {world.world_size} ranks on {len(world.ranks_per_node)} nodes, "
        f"{world.device_name}"
    )
    if plan.ranks.sequence_parallel_size > 1:
        report(f"        {plan.ranks.describe_split(shape.seq_len, shape.n_head, shape.n_kv_head)}")
    if plan.ranks.expert_parallel_size > 1:
        report(
            f"        {plan.ranks.expert_parallel_size} ranks divide the experts of a block: "
            f"{plan.ranks.experts_of_rank(shape.num_experts)} of {shape.num_experts} each, held by "
            f"{plan.ranks.expert_shard_ranks} ranks"
        )
    report(f"blocks: {start.compilation.describe()}")
    if world.device.type != "cpu":
        report(describe_settings())
    report("; ".join([f"batch: {plan.describe()}", *describe_batch(config, resolved.ds)]))
    cheaper = plan.with_fewest_fillers()
    if cheaper is not None:
        size, share = cheaper.micro_batch_size, cheaper.filler_share
        report(
            f"       --micro-batch-size {size} needs the fewest fillers: {share:.0%} more work than the batch itself"
        )
    report(f"gradients: {describe_gradients(plan, ds_config)}")
    report(f"optimizer: {describe_optimizer(config, resolved.schedule, cast('float', ds_config['gradient_clipping']))}")
    for warning in filter(None, (warn_of_learning_rate(config, resolved.schedule), warn_of_router(shape))):
        report(f"WARNING: {warning}")
    report(
        f"data: {start.sets.name}, {num_samples:,} samples of {manifest.seq_len} tokens ({manifest.tokenizer}), "
        f"{num_samples / plan.global_batch_size:,.1f} steps per epoch; {_validation(run)}"
    )
    if config.text == DEMO_TEXT:
        gpu_bytes, nodes = device_memory_bytes(), world.ranks_per_node
        machines = Machines(len(nodes), max(nodes), gpu_bytes, None, gpu_capability()) if gpu_bytes else None
        report(f"      {describe_demo(config.model, machines, find_gpu(world.device_name))}")
    if start.tasks:
        tasks = ", ".join(f"{task.name} ({len(task.items):,} items)" for task in start.tasks)
        report(f"      evaluation every {config.eval_every:,} steps on {tasks}")
    for line in (*_mix_lines(run), *_skip_lines(run)):
        report(f"      {line}")
    chosen = describe_steps(config, resolved, num_samples)
    total = run.stream.samples_after(resolved.total_steps)
    report(
        f"run: {resolved.total_steps:,} steps{f' ({chosen})' if chosen else ''}, {total * plan.seq_len:,} tokens, "
        f"{total / num_samples:.2f} epochs; folder {shown(config.run)}, {_checkpoints(start)}"
    )


def describe_demo(model: str, machines: Machines | None, gpu: GPU | None) -> str:
    """Return a line that this run is a demo, with the flags of a real one on these GPUs; `machines` is None on CPUs."""
    line = (
        f"this is the demo: {model} on the documentation of Python. A real run has --data FOLDER (of `llmscale data "
        "prepare`) or --text FOLDER"
    )
    if machines is None:
        return f"{line}, and on GPUs a larger --model: `llmscale estimate --gpu list`"
    largest = largest_preset(machines, "bf16" if has_bf16(machines.capability) else "fp16")
    if gpu is None or largest is None:
        return f"{line}, and a --model that `llmscale estimate` recommends for these GPUs"
    nodes = f" --num-nodes {machines.num_nodes}" if machines.num_nodes > 1 else ""
    command = f"llmscale estimate --model {largest} --gpu {gpu.name} --num-gpus {machines.gpus_per_node}{nodes}"
    return f"{line}, and a larger --model: {machines.in_words(gpu.name)} train up to {largest} (`{command}`)"


def _mix_lines(run: Run) -> Iterator[str]:
    """Yield the samples and epochs of each dataset of a mixture, and its share in each stage."""
    sets, stream = run.start.sets, run.stream
    if stream.mix is None:
        return
    counts, stages = stream.samples_by_set(stream.samples_after(run.resolved.total_steps)), stream.mix.stages
    width = max(map(len, sets.names))
    for place, (name, location) in enumerate(zip(sets.names, sets.locations, strict=True)):
        size = location.manifest.splits["train"].num_samples
        parts = " then ".join(f"{stage.shares[place] / sum(stage.shares):.2%}" for stage in stages)
        yield (
            f"{name:{width}}  {parts} of the samples: {counts[place]:,} in this run, {counts[place] / size:.2f} epochs "
            f"of {size:,}"
        )
    if len(stages) > 1:
        begins = ", ".join(f"{stage.begin:,}" for stage in stages[1:])
        yield f"{'':{width}}  the proportions change after {begins} samples"


def _skip_lines(run: Run) -> Iterator[str]:
    repeated = {skip.steps for skip in saved_skips(run.state.identity)} if run.state else set[str]()
    repeated &= {f"{first}:{behind}" for first, behind in map(parse_skip, run.config.skip_steps)}
    for skip in run.stream.skips:
        line = f"left out: steps {skip.steps} of --skip-steps, samples {skip.begin:,} to {skip.end - 1:,} of the stream"
        if skip.steps in repeated:
            first, behind = parse_skip(skip.steps)
            line += (
                "; an earlier start left them out, and the repeated flag leaves out nothing more: for what those steps "
                f"are now, name another range, such as {first}:{behind + 1}"
            )
        yield line


def hpz_warnings(group: int, ranks_per_node: Sequence[int]) -> Iterator[str]:
    """Yield a warning if second copies of the parameters in groups of `group` neighbouring ranks are wasteful."""
    if group > 1 and len(ranks_per_node) == 1:
        yield f"zero_hpz_partition_size {group} saves no traffic on one node; the second copies only take memory."
    elif group > 1 and any(ranks % group for ranks in ranks_per_node):
        yield (
            f"zero_hpz_partition_size {group}: the groups cross the borders of nodes of {min(ranks_per_node)} ranks, "
            "and gather their second copies over the network. Set it to the number of ranks per node."
        )


def _documents(run: Start) -> str:
    shape, splits = run.resolved.shape, [at.manifest.splits["train"] for at in run.sets.locations]
    mean = sum(split.num_tokens for split in splits) / max(1, sum(split.num_documents for split in splits))
    least = shape.architecture.flops_per_token(min(shape.seq_len, round(mean)))
    return (
        f"documents do not see each other: {mean:,.0f} tokens each on average, of which {least:.3e} FLOPs per token "
        "would be the count; here and in the MFU it is that of the whole context"
    )


def _validation(run: Run) -> str:
    available = sum(at.manifest.splits["val"].num_samples for at in run.start.sets.with_split("val"))
    if not available:
        return "no validation, the set has no split for it"
    if not run.config.val_every:
        return f"no validation ({'--overfit-batch' if run.config.overfit_batch else '--val-every 0'})"
    return f"validation every {run.config.val_every:,} steps on {describe_samples(run.validation)} of {available:,}"


def _checkpoints(run: Start) -> str:
    config = run.config
    if config.overfit_batch is not None:
        return f"no checkpoints: each step trains on the same {count_nouns(config.overfit_batch, 'sample')}"
    every = [f"every {config.save_every:,} steps"] if config.save_every else []
    every += [f"every {config.save_every_minutes:g} minutes"] if config.save_every_minutes else []
    kept = f", those of every {config.keep_every:,} steps permanently" if config.keep_every else ""
    return f"checkpoints {' and '.join([*every, 'at the end'])}, the last {config.keep_last} kept{kept}"


class ReportStartup(StepAction):
    """Prints the time of each phase of the start after its first step."""

    def __init__(self, run: Run, io: RunIO) -> None:
        self._run, self._io = run, io
        self._began = 0.0

    def begin(self, step: int) -> None:
        self._began = time.perf_counter()

    def due(self, step: int) -> bool:
        return step == self._run.first_step + 1

    def run(self, result: StepResult) -> None:
        seconds = {**self._run.startup_s, "first step": time.perf_counter() - self._began}
        phases = " + ".join(f"{name} {taken:.1f}" for name, taken in seconds.items())
        self._io.report(f"start-up: {phases} = {sum(seconds.values()):.1f} s")


class ReportCompilation(StepAction):
    """Prints graphs and seconds of the compiler after the first step, or the ranks on which it failed."""

    def __init__(self, run: Run, io: RunIO, compiler: BlockCompiler) -> None:
        self._run, self._io, self._compiler = run, io, compiler

    def due(self, step: int) -> bool:
        return step == self._run.first_step + 1

    def run(self, result: StepResult) -> None:
        report, compiler, rank = self._io.report, self._compiler, self._run.world.rank
        failures = gather(self._run.world.control, compiler.failure)
        failed = [rank for rank, failure in enumerate(failures) if failure is not None]
        if failed:
            report(
                f"WARNING: the compiler failed on {describe_ranks(failed)}, whose blocks run eagerly: "
                f"{failures[failed[0]]}. --compile off does not try."
            )
        elif not compiler.graphs:
            report("WARNING: torch compiled nothing, as where TORCHDYNAMO_DISABLE is set; blocks run eagerly.")
        if compiler.graphs:
            graphs = f"{compiler.graphs} graph{'s' if compiler.graphs > 1 else ''}"
            report(f"blocks: {graphs} compiled in {compiler.compile_s:.1f} s")
        # Ranks do not meet at a later failure, so each reports its own.
        compiler.on_failure = lambda failure: warn_on_stderr(
            f"WARNING: the compiler failed on rank {rank}, whose blocks run eagerly from now on: {failure}."
        )


class ReportMemory(StepAction):
    """Prints and records the measured peak of GPU memory beside the estimate; nothing on a CPU."""

    def __init__(self, run: Run, io: RunIO) -> None:
        self._run, self._io = run, io

    def due(self, step: int) -> bool:
        return step == self._run.first_step + _MEASURED_STEP

    def run(self, result: StepResult) -> None:
        measured, estimate = measured_memory(), self._run.estimate
        if measured is None:
            return
        self._io.report(measured_line(estimate, measured))
        estimated = estimate.allocated_bytes if estimate else None
        self._io.log_event("memory", step=result.step, estimated_bytes=estimated, **asdict(measured))
