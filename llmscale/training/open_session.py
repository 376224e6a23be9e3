"""Open a session that can train: join the ranks, build the engine, find the place to begin."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

from llmscale.checkpoint.initial_weights import complete_published_weights, keep_published
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
from llmscale.config.hardware import has_bf16_instructions
from llmscale.config.hf_model import is_published
from llmscale.config.run_config import RunConfig
from llmscale.config.run_keys import publish_keys
from llmscale.config.user_paths import shown
from llmscale.data.mixture import keep_sets
from llmscale.data.validation import describe_samples
from llmscale.engine.collectives import gather, on_all_ranks, on_each_disk, on_main_rank
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.deepspeed_engine import build_engine, check_device
from llmscale.engine.device_memory import device_memory_bytes, gpu_capability
from llmscale.engine.device_settings import allow_tf32, describe_settings
from llmscale.engine.process_group import World, is_gpu, join_world
from llmscale.engine.timed_steps import time_steps
from llmscale.engine.train_step import PhaseTimer, explain_smallest_scale, get_scaler_state
from llmscale.planning.compilation import ASSUMED_STEP_S, Compilation, decide_compilation
from llmscale.terminal.human_numbers import count_nouns
from llmscale.terminal.status_line import REPEAT_S, StatusLine
from llmscale.terminal.table import output_width, wrap_line
from llmscale.training.inputs import DEMO_TEXT, as_plain, parse_skip
from llmscale.training.live_run import Engine, RecentSteps, Run, RunIO
from llmscale.training.live_view import open_display
from llmscale.training.loss_spikes import RollbackRequest
from llmscale.training.metrics import MetricsLog, Tracker, start_trackers
from llmscale.training.publish_run import RunPublisher, find_unpublished, open_publisher
from llmscale.training.resume import (
    check_ranks_agree,
    claim_run_folder,
    confirm_start,
    enter_history,
    load_initial_state,
)
from llmscale.training.run_folder import (
    CONFIG_NAME,
    START_TEXT_NAME,
    RunFolderClaim,
    keep,
    open_start_text,
    save_run_description,
)
from llmscale.training.sample_stream import saved_skips
from llmscale.training.session import Session, build_actions, open_data, open_validation_splits
from llmscale.training.start import Start, change_lines, estimate_line, estimate_run, finished_lines, hyperparameters
from llmscale.training.step_metrics import StepMeter, format_duration
from llmscale.training.stop_request import StopRequest, launch_names
from llmscale.training.watchdog import Heartbeat
from llmscale.untrusted.terminal import print_visible


@dataclass
class StartupClock:
    """Announces the phases of a start, and measures their seconds."""

    announcer: StatusLine
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, words: str, *, after_s: float = 0.0) -> Iterator[None]:
        """Announce and measure a phase; one that is usually short, only after `after_s` seconds."""
        self.announcer.begin(words, after_s=after_s)
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def open_session(start: Start, stop: StopRequest, heartbeat: Heartbeat, began: float, announcer: StatusLine) -> Session:
    """Do everything up to the first step. Collective. Raises LlmscaleError on every rank if one cannot start."""
    claim = RunFolderClaim(start.config.run)
    stop.before_early_end.append(claim.give_up)
    try:
        clock = StartupClock(announcer, {"checks and imports": time.perf_counter() - began})
        return _open_session(start, stop, heartbeat, clock, claim, began)
    except BaseException:
        claim.give_up()
        raise


def _open_session(
    start: Start, stop: StopRequest, heartbeat: Heartbeat, clock: StartupClock, claim: RunFolderClaim, began: float
) -> Session:
    def progress() -> None:
        heartbeat.beat("starting")

    start, world = _join_ranks(start, clock, progress)
    report = report_on_main(world, clock.announcer)
    with clock.phase("ranks", "claiming the run folder", after_s=REPEAT_S):
        world = replace(world, disks=claim_run_folder(claim, world))
        publisher = open_publisher(start.config.run, start.config.keep_every, world, report, stop.received.append)
        if publisher:
            claim.before_release.append(publisher.close)
    with clock.phase("checkpoint check", "looking for a checkpoint to resume", after_s=REPEAT_S):
        start = confirm_start(start, world, report)
    start = replace(start, compilation=_decide_compilation(start, world))
    with clock.phase("estimate", "estimating the memory", after_s=REPEAT_S):
        estimate = estimate_run(start, gpu_capability())
    with clock.phase("data", "opening the validation data", after_s=REPEAT_S):
        validation = open_validation_splits(start, world)
    engine = _open_engine(start, world, clock)
    after_s = 0.0 if start.source is not None or start.weights is not None else REPEAT_S
    with clock.phase("checkpoint load", "loading the weights", after_s=after_s):
        load_initial_state(start, engine.deepspeed, world, report, progress)
    if start.is_open:
        validated = sum(split.num_samples for split in validation)
        with clock.phase("timing", "timing steps for --minutes"), engine.meter.pause("starting"):
            start, line = _with_timed_steps(start, engine, world, began, validated, progress)
        report(line)
        if start.sets.recipe:
            # Where the proportions of a mixture change depends on the steps of the run.
            engine.feed.close()
            engine = replace(engine, feed=open_data(start, world))
    with clock.phase("trackers", "starting the trackers", after_s=REPEAT_S):
        trackers = _start_trackers(start, world)
    clock.announcer.begin("opening the run's records", after_s=REPEAT_S)
    history = enter_history(start, world, report)
    # Without the list of checkpoints, which is long in a long run.
    run = Run(replace(start, listing=None), world, validation, history, estimate, clock.seconds)
    io = _open_io(run, engine.meter, trackers, claim, publisher, report, stop)
    clock.announcer.begin("preparing what happens at steps", after_s=REPEAT_S)
    with engine.meter.pause("starting"):
        session = _begin(run, engine, io, stop)
    if run.first_step < run.resolved.total_steps:
        clock.announcer.begin(f"{'compiling the blocks and ' if engine.compiler else ''}taking the first step")
    return session


def _open_engine(start: Start, world: World, clock: StartupClock) -> Engine:
    """Open the data, and build the engine with random weights. Collective."""
    with clock.phase("data", "opening the data"):
        # First: the feed's workers are forked while this process is small, and read ahead meanwhile.
        feed = open_data(start, world)
    with clock.phase("engine", f"building the engine, ZeRO stage {start.resolved.zero_stage}"):
        backend = start.compilation.backend
        compiler = BlockCompiler(backend, start.config.compile_mode) if backend else None
        deepspeed = build_engine(start.config, start.resolved, compiler)
    return Engine(
        deepspeed=deepspeed,
        compiler=compiler,
        configured_scaler=get_scaler_state(deepspeed),
        feed=feed,
        meter=StepMeter(PhaseTimer(world.device)),
        recent=RecentSteps(world),
        skipped_before=start.state.skipped_steps if start.state else 0,
    )


#: Share of --minutes in which steps are timed, and most seconds of it; and the share that is left for the last save.
_TIMED_SHARE, _MOST_TIMED_S, _END_SHARE = 0.04, 30.0, 0.02
#: Time of a sequence's validation relative to that of a training step: a forward pass.
_VALIDATION_SHARE = 1 / 3


def _with_timed_steps(
    start: Start,
    engine: Engine,
    world: World,
    began: float,
    validated: int,
    progress: Callable[[], object],
) -> tuple[Start, str]:
    """Return the start with the steps that --minutes have room for, and a line about them. Collective.

    `validated`: sequences of a validation. Raises ConfigError if the schedule does not fit into the steps.
    """
    config, plan, minutes = start.config, start.resolved.plan, start.config.minutes
    assert minutes is not None
    with explain_smallest_scale(start.first_step):
        timed = time_steps(
            engine.deepspeed,
            start.resolved,
            world,
            min(_TIMED_SHARE * 60 * minutes, _MOST_TIMED_S),
            is_new=start.state is None,
            progress=progress,
        )
    left_s = on_main_rank(world.control, lambda: 60 * minutes * (1 - _END_SHARE) - (time.perf_counter() - began))
    # In steps.
    validation = _VALIDATION_SHARE * validated / plan.global_batch_size
    per_step = 1 + (validation / config.val_every if config.val_every else 0.0)
    count = max(1, int((left_s / timed.step_s - validation) / per_step))
    steps = start.first_step + count
    if plan.ramp is not None:
        # The small batches at the beginning take less time.
        seen = start.state.samples_seen if start.state else 0
        steps = max(start.first_step + 1, plan.steps_for(seen + count * plan.global_batch_size))
    rate = f"{plan.tokens_per_step / timed.step_s:,.0f} tokens/s"
    line = (
        f"--minutes {minutes:g} sets {steps:,} step{'s' * (steps > 1)}: {format_duration(max(left_s, 0.0))} are left, "
        f"and a step takes {timed.step_s:.3g} s ({rate}; {timed.count} timed and undone). Later starts with the "
        "same --minutes keep the number"
    )
    return start.with_steps(steps), line


def _open_io(
    run: Run,
    meter: StepMeter,
    trackers: Sequence[Tracker],
    claim: RunFolderClaim,
    publisher: RunPublisher | None,
    report: Callable[[str], None],
    stop: StopRequest,
) -> RunIO:
    """Describe the run in its folder, and open the log there on rank 0. Collective."""
    world = run.world
    launches = sorted({name for names in gather(world.control, launch_names(os.environ)) for name in names})
    on_each_disk(world.control, world.disks, lambda: _describe(run.start, launches))
    log = _open_log(run.start, meter, trackers, stop) if world.is_main else None
    of_checkpoint = run.state.wandb_run_id if run.state else None
    wandb_run_id = next((tracker.run_id for tracker in trackers if tracker.run_id), of_checkpoint)
    write = open_start_text(run.config.run) if world.is_main else None

    def detail(line: str) -> None:
        if write:
            write(line)
        if run.config.verbose:
            report(line)

    return RunIO(claim, log, wandb_run_id, report, detail, publisher)


def _begin(run: Run, engine: Engine, io: RunIO, stop: StopRequest) -> Session:
    """Announce the run, and begin its actions and its publication. Collective."""
    _announce(run, io)
    rollback = RollbackRequest()
    session = Session(run, engine, io, rollback, stop, *build_actions(run, engine, io, rollback, stop))
    for action in session.actions:
        action.begin(run.first_step)
    if io.publisher:
        source = run.start.source if run.start.resumes else None
        io.publisher.start(on_main_rank(run.world.control, lambda: find_unpublished(source, run.config.run)))
    return session


def _join_ranks(start: Start, clock: StartupClock, progress: Callable[[], object]) -> tuple[Start, World]:
    """Join ranks that were started alike, and complete the published weights on each of their disks. Collective."""
    with clock.phase("ranks", "joining the ranks"):
        world = join_world()
        start = start if is_gpu() else _on_cpu(start, world, report_on_main(world, clock.announcer))
        allow_tf32(start.resolved.precision)
        on_all_ranks(world.control, lambda: check_device(start.resolved))
        check_ranks_agree(start, world)
    if start.weights is None:
        return start, world
    with clock.phase("published weights", "fetching and checking the published weights"):
        weights = complete_published_weights(start.weights, start.sets.first, world, progress)
    return replace(start, weights=weights), world


def _on_cpu(start: Start, world: World, report: Callable[[str], None]) -> Start:
    """Return the start as these CPUs train it, and report a precision that is slow on them. Collective."""
    has_bf16, wanted = on_main_rank(world.control, has_bf16_instructions), start.resolved.precision
    start = start.on_cpu(has_bf16=has_bf16)
    if not has_bf16 and wanted in ("bf16", "autocast"):
        is_asked = start.resolved.precision == wanted
        chosen = f"WARNING: {wanted}, though it" if is_asked else "precision: fp32, because --precision bf16"
        report(f"{chosen} is slow on this CPU, which has no bf16 instructions")
    return start


def _decide_compilation(start: Start, world: World) -> Compilation:
    """Decide on rank 0, because ZeRO-3 gathers the weights of compiled blocks in other portions. Collective."""
    steps_left = start.resolved.total_steps - start.first_step
    if start.is_open:
        assert start.config.minutes is not None
        steps_left = round(60 * start.config.minutes / ASSUMED_STEP_S)
    decision = on_main_rank(
        world.control,
        lambda: decide_compilation(start.config.compile, start.resolved, world.device.type, steps_left),
    )
    if start.config.compile_mode == "default":
        return decision
    effect = start.config.compile_mode if decision.backend == "inductor" else "--compile-mode has no effect"
    return replace(decision, why=f"{decision.why}; {effect}")


def _announce(run: Run, io: RunIO) -> None:
    """Print what is about to be trained, and what changed since the checkpoint; detail every choice of the start."""
    ds, resolved = run.resolved.ds, run.resolved
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
    config, resolved, world, sets = run.config, run.resolved, run.world, run.start.sets
    steps, plan, tokens = resolved.total_steps, resolved.plan, run.tokens_seen(resolved.total_steps)
    reshaped = None if is_published(config.model) else describe_preset(config.model, resolved.shape)
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
    shape, tensors = run.resolved.shape, run.resolved.tensors
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
    world, resolved, shape, ranks = run.world, run.resolved, run.resolved.shape, run.resolved.plan.ranks
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
    config, resolved, plan = run.config, run.resolved, run.resolved.plan
    yield "; ".join([f"batch: {plan.describe()}", *describe_batch(config, resolved.ds)])
    cheaper = plan.with_fewest_fillers()
    if cheaper is not None:
        size, share = cheaper.micro_batch_size, cheaper.filler_share
        yield f"       --micro-batch-size {size} needs the fewest fillers: {share:.0%} more work than the batch itself"
    yield f"gradients: {describe_gradients(plan, resolved.ds_config)}"
    clipping = cast("float", resolved.ds_config["gradient_clipping"])
    yield f"optimizer: {describe_optimizer(config, resolved.schedule, clipping)}"
    if chosen := describe_steps(config, resolved, run.start.sets.num_train_samples):
        yield f"steps: {resolved.total_steps:,} ({chosen})"


def _data_lines(run: Run) -> Iterator[str]:
    start, config = run.start, run.config
    manifest, num_samples = start.sets.manifest, start.sets.num_train_samples
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
    permanent = f", those of every {config.keep_every:,} steps permanently" if config.keep_every else ""
    ends = f"every {' or '.join(every)} and at the end" if every else "at the end"
    return f"checkpoints {ends}, the last {config.keep_last} kept{permanent}"


def report_on_main(world: World, announcer: StatusLine) -> Callable[[str], None]:
    """Return a function that prints a wrapped line on rank 0, in the place of the announcement."""

    def report(line: str) -> None:
        if world.is_main:
            announcer.clear()
            for part in wrap_line(line, output_width()):
                print_visible(part, flush=True)

    return report


def _describe(start: Start, launches: Sequence[str]) -> None:
    folder = start.config.run
    is_new = start.state is None or not (folder / CONFIG_NAME).exists()
    resolved = {**start.resolved.as_dict(), "dataset": start.sets.fingerprint}
    config, ds_config = as_plain(start.config), start.resolved.ds_config
    save_run_description(folder, config, resolved, ds_config, is_new=is_new, launches=launches)
    keep(lambda: keep_sets(start.sets, folder), folder, "the tokenizer", is_new=is_new)

    def keep_model() -> None:
        source = start.source.path if start.source else None
        keep_published(start.weights, start.resolved.plan.seq_len, source, folder, start.config)

    keep(keep_model, folder, "the published model's configuration", is_new=is_new)


def _start_trackers(start: Start, world: World) -> tuple[Tracker, ...]:
    """Start the trackers on rank 0. Collective."""

    def begin() -> tuple[Tracker, ...]:
        return start_trackers(
            start.config,
            lambda: publish_keys(as_plain(start.config)) | start.resolved.as_dict(),
            first_step=start.first_step,
            wandb_run_id=start.state.wandb_run_id if start.state else None,
        )

    return on_all_ranks(world.control, lambda: begin() if world.is_main else ())


def _open_log(start: Start, meter: StepMeter, trackers: Sequence[Tracker], stop: StopRequest) -> MetricsLog:
    """Open the log with its display, which is closed however the process ends."""
    resolved, ranks = start.resolved, start.resolved.plan.ranks.world_size
    words = [start.config.run.name, start.config.model, f"ZeRO-{resolved.zero_stage}", resolved.precision]
    title = " · ".join([*words, f"{ranks} rank{'s' if ranks > 1 else ''}"])
    display = open_display(title, resolved.total_steps, meter, plain=start.config.plain, variables=os.environ)
    stop.before_sudden_end.append(display.close)
    stop.before_early_end.insert(0, display.close)
    return MetricsLog(start.config.run, start.resolved.total_steps, trackers, display)
