"""Reports while a run trains: start-up, compilation, memory, validation, tasks, sampled text, --overfit-batch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from llmscale.checkpoint.manifest import Validation
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
from llmscale.config.hardware import Cluster, measured_gpu, usable_precision
from llmscale.config.hf_model import is_published
from llmscale.config.user_paths import shown
from llmscale.data.tokenizers.load_tokenizer import load_set_tokenizer
from llmscale.data.validation import (
    ValidationBatch,
    ValidationSplit,
    describe_samples,
    mean_bits_per_byte,
    validation_batches,
)
from llmscale.engine.collectives import gather, on_all_ranks, on_main_rank
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.device_memory import device_memory_bytes, gpu_capability, measured_memory
from llmscale.engine.device_settings import describe_settings
from llmscale.error_handling import say
from llmscale.evaluate.generate import SamplingSettings, encode_prompt, generate_text
from llmscale.evaluate.scoring import Row, RowScore, batches_by_length, in_order, score_batch
from llmscale.evaluate.tasks import EncodedTask, TaskFile, encode_task
from llmscale.numerics.first_steps import FirstSteps
from llmscale.planning.recommend import largest_preset
from llmscale.terminal.human_numbers import count_nouns
from llmscale.training.inputs import DEMO_TEXT, parse_skip
from llmscale.training.live_run import Engine, Run, RunIO, StepAction, StepResult
from llmscale.training.resume import describe_ranks
from llmscale.training.run_folder import START_TEXT_NAME
from llmscale.training.sample_stream import saved_skips
from llmscale.training.start import Start, measured_line

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


#: Steps of this start that --check-numerics compares, if fp16 skips none.
_COMPARED_STEPS = 2
#: Steps of this start after which memory is measured: DeepSpeed allocates more after the first.
_MEASURED_STEP = 2


def describe_run(run: Run, io: RunIO) -> None:
    """Print the run before step 1 in a few lines, and detail every choice that the user did not make."""
    for warning in _warnings(run):
        io.report(f"WARNING: {warning}")
    if not run.config.verbose:
        for line in _summary(run):
            io.report(line)
    for describe in (_model_lines, _engine_lines, _batch_lines, _optimizer_lines, _data_lines, _length_line):
        for line in describe(run):
            io.detail(line)


def _warnings(run: Run) -> Iterator[str]:
    ds, resolved = run.resolved.ds, run.resolved
    yield from (*ds.warnings, *ds.batch_notices(resolved.plan))
    yield from hpz_warnings(ds.zero_hpz_partition_size, run.world.ranks_per_node)
    yield from filter(None, (warn_of_learning_rate(run.config, resolved.schedule), warn_of_router(resolved.shape)))


def _summary(run: Run) -> Iterator[str]:
    """Yield what is trained, on which data, for how long, and where it is written."""
    config, resolved, world, sets = run.config, run.resolved, run.world, run.start.sets
    steps, plan, tokens = resolved.total_steps, resolved.plan, _count_tokens(run)
    yield (
        f"model: {_describe_size(run)}; ZeRO stage {resolved.zero_stage}, {resolved.precision}, "
        f"{count_nouns(world.world_size, 'rank')}, {world.device_name}"
    )
    demo = "the demo, Python's documentation (--text FOLDER trains on yours)"
    source = demo if config.text == DEMO_TEXT else config.text or sets.name
    yield (
        f"data: {source}: {sets.num_train_samples * plan.seq_len:,} tokens of a vocabulary of "
        f"{sets.manifest.vocab_size:,}"
    )
    yield (
        f"run: {count_nouns(steps, 'step')} of {plan.global_batch_size * plan.seq_len:,} tokens, {tokens:,} in all, "
        f"{tokens / plan.seq_len / sets.num_train_samples:.2f} epochs; {_validation(run)}"
    )
    begins = f"from step {run.first_step:,}" if run.state else "a new run"
    yield f"folder: {shown(config.run)}, {begins}, {_checkpoints(run.start)}; {START_TEXT_NAME} has every choice"


def _describe_size(run: Run) -> str:
    """Return the model's name and size, with the reason of a size that is not the name's."""
    config, shape = run.config, run.resolved.shape
    reshaped = None if is_published(config.model) else describe_preset(config.model, shape)
    return reshaped or f"{config.model}, {describe_parameters(shape)}"


def _count_tokens(run: Run) -> int:
    """Return the tokens that the run trains on from step 0 to its end."""
    return run.stream.samples_after(run.resolved.total_steps) * run.resolved.plan.seq_len


def _model_lines(run: Run) -> Iterator[str]:
    resolved, shape = run.resolved, run.resolved.shape
    yield (
        f"model: {shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}, context {shape.seq_len}, "
        f"{describe_parameters(shape)}, {shape.flops_per_token:.3e} FLOPs per token"
    )
    yield f"       {_describe_size(run)}"
    if resolved.tensors.frozen:
        yield f"       {resolved.tensors.num_trainable:,} parameters are trained, the others frozen"
    if shape.has_document_mask:
        yield f"       {_documents(run.start)}"


def _engine_lines(run: Run) -> Iterator[str]:
    world, resolved, shape, ranks = run.world, run.resolved, run.resolved.shape, run.resolved.plan.ranks
    yield (
        f"engine: ZeRO stage {resolved.zero_stage}, {resolved.precision}, activation checkpointing "
        f"{resolved.checkpointing}, {world.world_size} ranks on {len(world.ranks_per_node)} nodes, "
        f"{world.device_name}"
    )
    if ranks.sequence_parallel_size > 1:
        yield f"        {ranks.describe_split(shape.seq_len, shape.n_head, shape.n_kv_head)}"
    if ranks.expert_parallel_size > 1:
        yield (
            f"        {ranks.expert_parallel_size} ranks divide the experts of a block: "
            f"{ranks.experts_of_rank(shape.num_experts)} of {shape.num_experts} each, held by "
            f"{ranks.expert_shard_ranks} ranks"
        )
    yield f"blocks: {run.start.compilation.describe()}"
    if world.device.type != "cpu":
        yield describe_settings()


def _batch_lines(run: Run) -> Iterator[str]:
    resolved, plan = run.resolved, run.resolved.plan
    yield "; ".join([f"batch: {plan.describe()}", *describe_batch(run.config, resolved.ds)])
    cheaper = plan.with_fewest_fillers()
    if cheaper is not None:
        size, share = cheaper.micro_batch_size, cheaper.filler_share
        yield f"       --micro-batch-size {size} needs the fewest fillers: {share:.0%} more work than the batch itself"
    yield f"gradients: {describe_gradients(plan, resolved.ds_config)}"


def _optimizer_lines(run: Run) -> Iterator[str]:
    config, schedule = run.config, run.resolved.schedule
    clipping = cast("float", run.resolved.ds_config["gradient_clipping"])
    yield f"optimizer: {describe_optimizer(config, schedule, clipping)}"


def _data_lines(run: Run) -> Iterator[str]:
    start, config, world = run.start, run.config, run.world
    manifest, num_samples = start.sets.manifest, start.sets.num_train_samples
    yield (
        f"data: {start.sets.name}, {num_samples:,} samples of {manifest.seq_len} tokens ({manifest.tokenizer}), "
        f"{num_samples / run.resolved.plan.global_batch_size:,.1f} steps per epoch; {_validation(run)}"
    )
    if config.text == DEMO_TEXT:
        gpu_bytes, nodes = device_memory_bytes(), world.ranks_per_node
        gpu = measured_gpu(world.device_name, gpu_bytes, gpu_capability()) if gpu_bytes else None
        yield f"      {describe_demo(config.model, Cluster(gpu, max(nodes), num_nodes=len(nodes)) if gpu else None)}"
    if start.tasks:
        tasks = ", ".join(f"{task.name} ({len(task.items):,} items)" for task in start.tasks)
        yield f"      evaluation every {config.eval_every:,} steps on {tasks}"
    for line in (*_mix_lines(run), *_skip_lines(run)):
        yield f"      {line}"


def _length_line(run: Run) -> Iterator[str]:
    resolved, num_samples = run.resolved, run.start.sets.num_train_samples
    chosen = describe_steps(run.config, resolved, num_samples)
    tokens = _count_tokens(run)
    yield (
        f"run: {resolved.total_steps:,} steps{f' ({chosen})' if chosen else ''}, "
        f"{tokens:,} tokens, {tokens / resolved.plan.seq_len / num_samples:.2f} epochs; "
        f"folder {shown(run.config.run)}, {_checkpoints(run.start)}"
    )


def describe_demo(model: str, cluster: Cluster | None) -> str:
    """Return a line that this run is a demo, with the flags of a real one on these GPUs; `cluster` is None on CPUs."""
    line = (
        f"this is the demo: {model} on the documentation of Python. A real run has --data FOLDER (of `llmscale data "
        "prepare`) or --text FOLDER"
    )
    if cluster is None:
        return f"{line}, and on GPUs a larger --model: `llmscale estimate --gpu list`"
    gpu = cluster.gpu
    largest = largest_preset(cluster, usable_precision(None, gpu))
    if not gpu.pattern or largest is None:
        return f"{line}, and a --model that `llmscale estimate` recommends for these GPUs"
    nodes = f" --num-nodes {cluster.num_nodes}" if cluster.num_nodes > 1 else ""
    command = f"llmscale estimate --model {largest} --gpu {gpu.name} --num-gpus {cluster.gpus_per_node}{nodes}"
    return f"{line}, and a larger --model: {cluster.in_words()} train up to {largest} (`{command}`)"


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
    every = [f"{config.save_every:,} steps"] if config.save_every else []
    minutes = config.minutes_between_saves
    every += [f"{minutes:g} minutes"] if minutes else []
    permanent = f", those of every {config.keep_every:,} steps permanently" if config.keep_every else ""
    ends = f"every {' or '.join(every)} and at the end" if every else "at the end"
    return f"checkpoints {ends}, the last {config.keep_last} kept{permanent}"


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
        self._io.detail(f"start-up: {phases} = {sum(seconds.values()):.1f} s")


class CheckNumerics(StepAction):
    """Compares the first steps of this start with plain arithmetic, and prints one line."""

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        self._run, self._engine, self._io = run, engine, io
        self._watch: FirstSteps | None = None
        self._left = _COMPARED_STEPS

    def begin(self, step: int) -> None:
        run = self._run
        if step >= run.resolved.total_steps:
            return
        self._watch = FirstSteps(
            run.config,
            run.resolved,
            self._engine.deepspeed,
            run.world.control,
            micro_steps=run.micro_steps(step),
            is_compiled=self._engine.compiler is not None,
            is_new=run.state is None,
        )
        size = self._watch.copies_bytes / 2**30
        share = self._watch.share_copied
        self._io.report(
            f"--check-numerics copies {share:.0%} of the weights and their gradients: {size:.2f} GiB a rank"
        )

    def due(self, step: int) -> bool:
        return self._watch is not None

    def run(self, result: StepResult) -> None:
        watch = self._watch
        assert watch is not None
        if result.was_skipped:
            watch.skip()
            return
        step = result.step - 1
        with self._engine.meter.pause("profiling"):
            watch.judge(step, self._run.resolved.schedule.learning_rate(step))
        self._left -= 1
        if not self._left or result.step == self._run.resolved.total_steps:
            self.close()
            line = watch.describe()
            self._io.report(line)
            self._io.log_event("numerics", step=result.step, result=line)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


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
            self._io.detail(f"blocks: {graphs} compiled in {compiler.compile_s:.1f} s")
        # Ranks do not meet at a later failure, so each reports its own.
        compiler.on_failure = lambda failure: say(
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
        self._io.detail(measured_line(estimate, measured))
        estimated = estimate.allocated_bytes
        self._io.log_event("memory", step=result.step, estimated_bytes=estimated, **asdict(measured))


#: Share of H at or below which a batch counts as learned, and the loss that suffices for repetitive text.
_LEARNED_SHARE, _LEARNED_LOSS = 0.5, 0.1
#: Relative fall below which a loss counts as unchanged.
_UNCHANGED = 0.02


class JudgeOverfit(StepAction):
    """Compares the last step's loss with the first step's, and reports the verdict."""

    def __init__(self, run: Run, io: RunIO) -> None:
        self._run, self._io = run, io
        self._first_loss = self._entropy = math.nan

    def due(self, step: int) -> bool:
        return step in (1, self._run.resolved.total_steps)

    def run(self, result: StepResult) -> None:
        """Read the loss of all ranks, and judge the last one. Collective. Synchronises with the device."""
        run, control = self._run, self._run.world.control
        loss = float(np.mean(gather(control, float(result.loss))))
        if result.step == 1:
            size = run.resolved.shape.padded_vocab_size
            batches = [batch.target_ids().numpy() for batch in result.micro_batches if not batch.is_filler]
            counts = np.bincount(np.concatenate([np.empty(0, np.int64), *batches]), minlength=size)
            self._first_loss, self._entropy = loss, entropy(np.sum(gather(control, counts), axis=0))
        if result.step == run.resolved.total_steps:
            has_learned, why = judge_overfit(self._first_loss, loss, self._entropy)
            samples, steps = run.resolved.plan.global_batch_size, count_nouns(result.step, "step")
            verdict = f"{'learned' if has_learned else 'did not learn'}: the loss of the same {samples:,} samples {why}"
            self._io.report(f"{verdict} ({steps}, --lr {run.resolved.schedule.lr:g})")
            self._io.log_event("overfit", step=result.step, has_learned=has_learned, reason=why)


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy in nats of a distribution given by counts, [n]."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def judge_overfit(first: float, last: float, context_free: float) -> tuple[bool, str]:
    """Return whether a batch was learned, and what its loss did. Losses are in nats per token; `context_free` is H."""
    moved = f"from {first:.4f} to {last:.4f}"
    if not last <= first * (1 + _UNCHANGED):
        return False, f"rose {moved}. Lower --lr, or raise --warmup-steps"
    if last > first * (1 - _UNCHANGED):
        return False, f"stayed ({moved}). Likely causes: --lr is far too low, or no gradient reaches the weights"
    fell = f"fell {moved}, and a model that ignores the context stays above {context_free:.4f}"
    if last <= max(_LEARNED_SHARE * context_free, _LEARNED_LOSS):
        return True, fell
    if last < context_free:
        return False, f"{fell}. It learns, but has not memorised the batch: give more --steps, or another --lr"
    return False, (
        f"{fell}. Give more --steps or a higher --lr; if that does not help, attention or positions pass nothing on, "
        "or the targets do not follow from the context"
    )


_SAMPLING = SamplingSettings(max_new_tokens=48, temperature=0.8, top_k=50, top_p=None)


class Validate(StepAction):
    """Measures the validation loss every --val-every steps and after the last one."""

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        self._run, self._engine, self._io, self._splits = run, engine, io, run.validation
        self._newest: tuple[int, Validation] | None = None

    def due(self, step: int) -> bool:
        return step % self._run.config.val_every == 0 or step == self._run.resolved.total_steps

    def run(self, result: StepResult) -> None:
        world = self._run.world
        with self._engine.meter.pause("evaluating"):
            # Everything is read first: a rank that cannot read must not leave the others in a forward pass.
            batches = on_all_ranks(world.control, lambda: [self._read(split) for split in self._splits])
            size = self._run.resolved.plan.ranks.sequence_parallel_size
            losses = [validation_loss(self._engine.deepspeed, of_split, world.device, size) for of_split in batches]
        total = sum(num_samples for _, num_samples in losses)
        mean = sum(loss * num_samples for loss, num_samples in losses) / total
        samples = f"{total} of {self._run.start.sets.fingerprint}"
        self._newest = (result.step, Validation(mean, samples)) if math.isfinite(mean) else None
        if self._io.log:
            names = [split.name for split in self._splits]
            by_set = {name: loss for name, (loss, _) in zip(names, losses, strict=True) if name}
            in_bits = mean_bits_per_byte(losses, [split.bytes_per_token for split in self._splits])
            self._io.log.log_validation(result.step, mean, total, by_set, in_bits, describe_samples(self._splits))

    def after(self, step: int) -> Validation | None:
        """Return the validation after a step, if it was measured there and is finite."""
        return self._newest[1] if self._newest and self._newest[0] == step else None

    def _read(self, split: ValidationSplit) -> list[ValidationBatch]:
        layout, micro_batch_size = self._engine.feed.plan.layout, self._run.resolved.plan.micro_batch_size
        return list(validation_batches(split.shards, layout, micro_batch_size, split.num_samples))


def validation_loss(
    engine: DeepSpeedEngine, batches: Iterable[ValidationBatch], device: torch.device, ranks_of_sequence: int = 1
) -> tuple[float, int]:
    """Return the mean loss in nats per token over all ranks' batches, and the number of sequences. Collective.

    Every rank must bring equally many batches: ZeRO-3 gathers weights in every forward pass.
    """
    totals = torch.zeros(3, dtype=torch.float64)
    engine.eval()
    with torch.no_grad():
        for batch in batches:
            tokens = batch.tokens.to(device)
            loss = engine(tokens[:, :-1], tokens[:, 1:], **batch.counted(device))
            sums = [float(loss) * batch.weight, batch.target_weight, batch.weight]
            totals += torch.tensor(sums, dtype=torch.float64)
    engine.train()
    totals = totals.to(device)
    dist.all_reduce(totals)
    return float(totals[0] / totals[1]), int(totals[2]) // ranks_of_sequence


class EvaluateTasks(StepAction):
    """Evaluates tasks every --eval-every steps and after the last one, their items distributed over all ranks.

    Every rank gets all scores and computes the same results. A forward pass has at most the tokens of one of training,
    and the logits of as many at a time as the loss: it takes no more memory than a validation.
    """

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        self._run, self._engine, self._io = run, engine, io
        self._tasks = on_all_ranks(run.world.control, lambda: self._encode(run.start.tasks))

    def due(self, step: int) -> bool:
        return step % self._run.config.eval_every == 0 or step == self._run.resolved.total_steps

    def run(self, result: StepResult) -> None:
        with self._engine.meter.pause("evaluating"):
            results = [task.values(self._score(task.rows)) for task in self._tasks]
        if self._io.log:
            for task, values in zip(self._tasks, results, strict=True):
                self._io.log.log_evaluation(result.step, task.file.name, values, len(task.file.items))

    def _encode(self, files: Sequence[TaskFile]) -> list[EncodedTask]:
        location, seq_len = self._run.start.sets.first, self._run.resolved.shape.seq_len
        tokenizer = load_set_tokenizer(location.folder, location.manifest)
        return [encode_task(file, tokenizer, seq_len) for file in files]

    def _score(self, rows: Sequence[Row]) -> list[RowScore]:
        """Score rows in batches that the ranks take in turn. Collective.

        A rank without a batch left scores one that does not count: ZeRO-3 gathers weights in every forward pass.
        """
        plan, world = self._run.resolved.plan, self._run.world
        group, num_groups = plan.ranks.group_of(world.rank), plan.ranks.data_parallel_size
        max_tokens = plan.micro_batch_size * plan.seq_len
        batches = batches_by_length(rows, max_tokens, max_tokens)
        mine: list[tuple[int, RowScore]] = []
        self._engine.deepspeed.eval()
        with torch.no_grad():
            for start in range(0, len(batches), num_groups):
                number = start + group
                batch = batches[number if number < len(batches) else 0]
                scores = score_batch(self._forward, [rows[index] for index in batch], world.device)
                if number < len(batches) and plan.ranks.is_first(world.rank):
                    mine += zip(batch, scores, strict=True)
        self._engine.deepspeed.train()
        return in_order(pair for of_rank in gather(world.control, mine) for pair in of_rank)

    def _forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores: Tensor = self._engine.deepspeed(tokens, targets, each_token=True)
        split = self._engine.deepspeed.module.split
        return scores if split is None else split.gather_scores(scores, targets.shape[1])


class SampleText(StepAction):
    """Samples text every --sample-every steps, and whenever the model is evaluated; rank 0 prints.

    Every rank generates, because ZeRO-3 gathers weights in every forward pass. All use rank 0's choice of each token:
    ranks that rounded differently would end at different tokens, and one would wait for weights indefinitely.
    """

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        self._run, self._engine, self._io = run, engine, io
        location = run.start.sets.first
        self._tokenizer = on_all_ranks(
            run.world.control, lambda: load_set_tokenizer(location.folder, location.manifest)
        )

    def due(self, step: int) -> bool:
        config, total_steps = self._run.config, self._run.resolved.total_steps
        if config.eval_every and step == total_steps:
            return True
        return any(every and step % every == 0 for every in (config.sample_every, config.eval_every))

    def run(self, result: StepResult) -> None:
        run, prompts = self._run, self._run.start.prompts
        # The model would not see more than its context.
        tokens_of = [encode_prompt(self._tokenizer, prompt)[-run.resolved.shape.seq_len :] for prompt in prompts]
        texts = [""] * len(prompts)
        with self._engine.meter.pause("evaluating"):
            chunks = generate_text(
                self._engine.deepspeed.module,
                self._tokenizer,
                tokens_of,
                _SAMPLING,
                seeds=[run.config.seed] * len(prompts),
                agree=lambda tokens: on_main_rank(run.world.control, lambda: tokens),
            )
            for chunk in chunks:
                texts[chunk.number] += chunk.text
        if self._io.log:
            for prompt, text in zip(prompts, texts, strict=True):
                self._io.log.log_sample(result.step, prompt, prompt + text)
