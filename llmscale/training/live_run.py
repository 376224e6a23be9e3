"""A run while it trains, in three parts: what is fixed, the engine, and its files. Actions after steps, and its lines.

A step keeps its loss and gradient norm on the device. At logged steps, where the host synchronises anyway, the losses
of all steps since the last one and every rank's timings go through the all-reduce that the logged loss needs. So all
ranks know every step, without an additional synchronisation or message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.checkpoint.manifest import History
from llmscale.checkpoint.run_state import RunState
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
from llmscale.config.hf_model import is_published
from llmscale.config.resolve import ResolvedRun
from llmscale.config.run_config import RunConfig
from llmscale.config.user_paths import shown
from llmscale.data.loader import Feed, MicroBatch
from llmscale.data.validation import ValidationSplit, describe_samples
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.device_memory import device_memory_bytes
from llmscale.engine.device_settings import describe_settings
from llmscale.engine.process_group import World
from llmscale.memory.estimate import MemoryEstimate
from llmscale.terminal.human_numbers import count_nouns
from llmscale.terminal.status_line import StatusLine
from llmscale.terminal.table import output_width, wrap_line
from llmscale.training.inputs import DEMO_TEXT, parse_skip
from llmscale.training.metrics import MetricsLog
from llmscale.training.publish_run import RunPublisher
from llmscale.training.run_folder import START_TEXT_NAME, RunFolderClaim
from llmscale.training.sample_stream import SampleStream, saved_skips
from llmscale.training.start import Start, change_lines, estimate_line, finished_lines, hyperparameters
from llmscale.training.step_metrics import StepMeter
from llmscale.untrusted.terminal import print_visible

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

#: Steps kept between two logged ones; of more, the oldest are not judged.
_MAX_STEPS = 1024


@dataclass(frozen=True)
class Run:
    """Everything that is fixed from the first step of a start, or of a rollback, to the last."""

    start: Start
    world: World
    validation: tuple[ValidationSplit, ...]
    """Validation splits; empty without validation."""
    history: History
    """History that the steps to come belong to."""
    estimate: MemoryEstimate
    """Estimate of one rank's GPU memory; None for an optimizer without one."""
    startup_s: dict[str, float]
    """Seconds per phase of the start."""

    @cached_property
    def config(self) -> RunConfig:
        return self.start.config

    @cached_property
    def resolved(self) -> ResolvedRun:
        return self.start.resolved

    @cached_property
    def stream(self) -> SampleStream:
        return self.start.stream

    @cached_property
    def state(self) -> RunState | None:
        """State of the checkpoint that it resumes; None for a new run."""
        return self.start.state

    @cached_property
    def first_step(self) -> int:
        """Optimizer steps done before this start."""
        return self.start.first_step

    def samples_seen(self, step: int) -> int:
        """Return the samples trained on since step 0 after `step` optimizer steps."""
        return self.stream.samples_after(step)

    def micro_steps(self, step: int) -> int:
        """Return this rank's forward passes of the step after `step` optimizer steps."""
        return self.resolved.plan.micro_steps(self.batch_size(step))

    def batch_size(self, step: int) -> int:
        """Return the sequences of the step after `step` optimizer steps, over all ranks."""
        return self.samples_seen(step + 1) - self.samples_seen(step)

    def loss_weight(self, step: int) -> float:
        """Return the weight of a micro-batch, not a filler, in the step after `step` optimizer steps."""
        return self.resolved.plan.loss_weight(self.batch_size(step))

    def seq_len(self, step: int) -> int:
        """Return the tokens of a sequence in the step after `step` optimizer steps."""
        return self.resolved.plan.length_after(self.samples_seen(step))

    def tokens_seen(self, step: int) -> int:
        """Return the tokens trained on since step 0 after `step` optimizer steps."""
        return self.samples_seen(step) * self.resolved.plan.seq_len


@dataclass(frozen=True)
class Engine:
    """Everything that a step changes on this rank."""

    deepspeed: DeepSpeedEngine
    compiler: BlockCompiler | None
    """Compiler of the blocks; None if they run eagerly."""
    configured_scaler: dict[str, float] | None
    """State with which fp16's loss scaler begins; None in other precisions."""
    feed: Feed
    meter: StepMeter
    recent: RecentSteps
    skipped_before: int
    """Steps that fp16 overflow skipped before this start."""

    @property
    def skipped_steps(self) -> int:
        """Steps that fp16 overflow has skipped since step 0."""
        return self.skipped_before + self.deepspeed.skipped_steps


@dataclass(frozen=True)
class RunIO:
    """The run's folder, log and console."""

    claim: RunFolderClaim
    """Claim on the run folder; rank 0 holds its lock until the session ends."""
    log: MetricsLog | None
    """Log on rank 0, None elsewhere."""
    wandb_run_id: str | None
    """Id of rank 0's wandb run; on other ranks, or without --wandb, the checkpoint's."""
    report: Callable[[str], None]
    """Prints one line on rank 0."""
    detail: Callable[[str], None]
    """Writes one line to start.txt on rank 0, and prints it with --verbose."""
    publisher: RunPublisher | None = None
    """Publisher of a run in a store."""

    def log_event(self, event: str, **values: object) -> None:
        """Record an event on rank 0."""
        if self.log:
            self.log.log_event(event, **values)


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step on this rank."""

    step: int
    """Optimizer steps done, this one included."""
    micro_batches: list[MicroBatch]
    """Batches that this rank trained on."""
    loss: Tensor
    """This rank's mean loss in nats per token: a scalar on the device, not read yet."""
    was_skipped: bool
    """True if DeepSpeed left the weights unchanged because of overflow."""
    grad_norm: Tensor | float | None = None
    """Global norm before clipping, not read yet; None if DeepSpeed computed none."""


class StepAction(ABC):
    """Something that happens after some steps, such as logging. Every rank calls every method at the same step."""

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        self._run = run
        self._engine = engine
        self._io = io

    def begin(self, step: int) -> None:  # noqa: B027  most need no beginning
        """Training begins after `step`."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Return whether to run after `step`, counted from 1; equal on all ranks if the action is collective."""

    @abstractmethod
    def run(self, result: StepResult) -> None:
        """Run the action."""

    def close(self) -> None:  # noqa: B027  most need no end
        """The session ends, perhaps by an error on this rank alone: no collectives."""


class RankTimes(NamedTuple):
    """Timings of one rank, in seconds."""

    step_s: float
    """Time per step in the previous logging interval."""
    data_wait_s: float
    """Wait for data per step in the previous logging interval."""
    arithmetic_s: float
    """Time of a forward pass, or a part of one, without waiting for other ranks; 0 if not measured."""


@dataclass(frozen=True)
class RecentStep:
    """One step, equal on every rank."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    """Mean over the global batch, in nats per token."""
    grad_norm: float | None
    """Global norm before clipping; None if DeepSpeed computed none."""


@dataclass(frozen=True)
class LoggedWindow:
    """Everything that the ranks exchange at a logged step."""

    steps: tuple[RecentStep, ...]
    """Steps since the last logged one, the newest last."""
    rank_times: tuple[RankTimes, ...]
    """Timings by rank."""
    extra: tuple[float, ...]
    """Means over the ranks of the caller's scalars."""


class RecentSteps:
    """This rank's steps since the last exchange."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.losses: deque[Tensor] = deque(maxlen=_MAX_STEPS)
        """This rank's mean losses, scalars on the device."""
        self.norms: deque[Tensor | float | None] = deque(maxlen=_MAX_STEPS)
        """Global gradient norms, on the device where DeepSpeed leaves them there."""
        self.window = LoggedWindow((), (), ())
        """The result of the last exchange."""

    def exchange(self, step: int, times: RankTimes, extra: Sequence[Tensor] = ()) -> LoggedWindow:
        """Average the losses since the last call over all ranks and collect their timings, in one all-reduce.

        `step` is the newest step; `extra` are further scalars to average. Collective. Synchronises with the device.
        """
        ranks = self._world.world_size
        num_steps = len(self.losses)
        means = torch.stack([*self.losses, *extra]).float() / ranks
        timings = torch.zeros(ranks, len(times))
        timings[self._world.rank] = torch.tensor(times)  # the other rows are the other ranks'
        packed = torch.cat((means, timings.flatten().to(means.device)))
        dist.all_reduce(packed)
        values = packed[: len(means)].tolist()
        norms = _as_floats(self.norms)
        first = step - num_steps + 1
        self.window = LoggedWindow(
            tuple(RecentStep(first + i, values[i], norms[i]) for i in range(num_steps)),
            tuple(RankTimes(*row) for row in packed[len(means) :].view_as(timings).tolist()),
            tuple(values[num_steps:]),
        )
        self.losses.clear()
        self.norms.clear()
        return self.window


def _as_floats(norms: Sequence[Tensor | float | None]) -> list[float | None]:
    """Copy all norms from the device at once."""
    if norms and all(isinstance(norm, Tensor) for norm in norms):
        stacked: list[float | None] = torch.stack([norm.detach().reshape(()) for norm in norms]).tolist()  # type: ignore[union-attr]
        return stacked
    return [None if norm is None else float(norm) for norm in norms]


def report_on_main(world: World, announcer: StatusLine) -> Callable[[str], None]:
    """Return a function that prints a wrapped line on rank 0, in the place of the announcement."""

    def report(line: str) -> None:
        if world.is_main:
            announcer.clear()
            for part in wrap_line(line, output_width()):
                print_visible(part, flush=True)

    return report


def announce(run: Run, io: RunIO) -> None:
    """Print what is about to be trained, and what changed since the checkpoint; detail every choice of the start."""
    ds = run.resolved.ds
    resolved = run.resolved
    of_groups = hpz_warnings(ds.zero_hpz_partition_size, run.world.ranks_per_node)
    of_keys = (warn_of_learning_rate(run.config, resolved.schedule), warn_of_router(resolved.shape))
    for warning in (*ds.warnings, *ds.batch_notices(resolved.plan), *of_groups, *filter(None, of_keys)):
        io.report(f"WARNING: {warning}")
    summary = [*_summary(run)]
    for line in (*summary, *_model_lines(run), *_engine_lines(run), *_batch_lines(run), *_data_lines(run)):
        io.detail(line)
    if not run.config.verbose:
        for line in summary:
            io.report(line)
    io.detail(estimate_line(run.estimate, device_memory_bytes()))
    if run.state:
        changes = change_lines(run.state, run.start, hyperparameters(run.start))
        for line in (*changes, *finished_lines(run.state, run.start)):
            io.report(line)


def _summary(run: Run) -> Iterator[str]:
    """Yield what is trained, on which data, for how long, and where it is written."""
    config = run.config
    resolved = run.resolved
    world = run.world
    sets = run.start.sets
    steps = resolved.total_steps
    plan = resolved.plan
    tokens = run.tokens_seen(resolved.total_steps)
    if is_published(config.model):
        reshaped = None
    else:
        reshaped = describe_preset(config.model, resolved.shape)
    size = reshaped or f"{config.model}, {describe_parameters(resolved.shape)}"
    yield (
        f"model: {size}; ZeRO stage {resolved.zero_stage}, {resolved.precision}, "
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
    yield f"folder: {shown(config.run)}, {begins}, {_checkpoints(config)}; {START_TEXT_NAME} has every choice"


def _model_lines(run: Run) -> Iterator[str]:
    shape = run.resolved.shape
    tensors = run.resolved.tensors
    yield (
        f"shape: {shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}, context {shape.seq_len}, "
        f"{describe_parameters(shape)}, {shape.flops_per_token:.3e} FLOPs per token"
    )
    if tensors.frozen:
        yield f"       {tensors.num_trainable:,} parameters are trained, the others frozen"
    if shape.has_document_mask:
        splits = [location.manifest.splits["train"] for location in run.start.sets.locations]
        mean = sum(split.num_tokens for split in splits) / max(1, sum(split.num_documents for split in splits))
        least = shape.architecture.flops_per_token(min(shape.seq_len, round(mean)))
        yield (
            f"       documents do not see each other: {mean:,.0f} tokens each on average, of which {least:.3e} FLOPs "
            "per token would be the count; here and in the MFU it is that of the whole context"
        )


def _engine_lines(run: Run) -> Iterator[str]:
    world = run.world
    resolved = run.resolved
    shape = run.resolved.shape
    ranks = run.resolved.plan.ranks
    yield (
        f"engine: activation checkpointing {resolved.checkpointing}, {world.world_size} ranks on "
        f"{len(world.ranks_per_node)} nodes"
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
    config = run.config
    resolved = run.resolved
    plan = run.resolved.plan
    yield "; ".join([f"batch: {plan.describe()}", *describe_batch(config, resolved.ds)])
    cheaper = plan.with_fewest_fillers()
    if cheaper is not None:
        size = cheaper.micro_batch_size
        share = cheaper.filler_share
        yield f"       --micro-batch-size {size} needs the fewest fillers: {share:.0%} more work than the batch itself"
    yield f"gradients: {describe_gradients(plan, resolved.ds_config)}"
    clipping = cast("float", resolved.ds_config["gradient_clipping"])
    yield f"optimizer: {describe_optimizer(config, resolved.schedule, clipping)}"
    if resolved.ds.keys.has_bf16_states:
        yield "           master weights and moments are bf16: changes below its rounding are lost"
    if chosen := describe_steps(config, resolved, run.start.sets.num_train_samples):
        yield f"steps: {resolved.total_steps:,} ({chosen})"


def _data_lines(run: Run) -> Iterator[str]:
    start = run.start
    config = run.config
    manifest = start.sets.manifest
    num_samples = start.sets.num_train_samples
    yield (
        f"samples: {start.sets.name}, {num_samples:,} of {manifest.seq_len} tokens ({manifest.tokenizer}), "
        f"{num_samples / run.resolved.plan.global_batch_size:,.1f} steps per epoch"
    )
    if config.text == DEMO_TEXT:
        yield (
            f"      this is the demo: {config.model} on the documentation of Python. A real run has --data FOLDER (of "
            "`llmscale data prepare`) or --text FOLDER, and on GPUs a larger --model: `llmscale estimate --gpu list`"
        )
    if start.tasks:
        tasks = ", ".join(f"{task.name} ({len(task.items):,} items)" for task in start.tasks)
        yield f"      evaluation every {config.eval_every:,} steps on {tasks}"
    for line in (*_mix_lines(run), *_skip_lines(run)):
        yield f"      {line}"


def _mix_lines(run: Run) -> Iterator[str]:
    """Yield the samples and epochs of each dataset of a mixture, and its share in each stage."""
    sets = run.start.sets
    stream = run.stream
    if stream.mix is None:
        return
    counts = stream.samples_by_set(stream.samples_after(run.resolved.total_steps))
    stages = stream.mix.stages
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
    if run.state:
        repeated = {skip.steps for skip in saved_skips(run.state.identity)}
    else:
        repeated = set[str]()
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


def _validation(run: Run) -> str:
    available = sum(at.manifest.splits["val"].num_samples for at in run.start.sets.with_split("val"))
    if not available:
        return "no validation, the set has no split for it"
    if not run.config.val_every:
        return f"no validation ({'--overfit-batch' if run.config.overfit_batch else '--val-every 0'})"
    return f"validation every {run.config.val_every:,} steps on {describe_samples(run.validation)} of {available:,}"


def _checkpoints(config: RunConfig) -> str:
    if config.overfit_batch is not None:
        return f"no checkpoints: each step trains on the same {count_nouns(config.overfit_batch, 'sample')}"
    every = [f"{config.save_every:,} steps"] if config.save_every else []
    minutes = config.minutes_between_saves
    every += [f"{minutes:g} minutes"] if minutes else []
    if config.keep_every:
        permanent = f", those of every {config.keep_every:,} steps permanently"
    else:
        permanent = ""
    if every:
        ends = f"every {' or '.join(every)} and at the end"
    else:
        ends = "at the end"
    return f"checkpoints {ends}, the last {config.keep_last} kept{permanent}"
