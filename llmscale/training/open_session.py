"""Open a session that can train: join the ranks, build the engine, find the place to begin."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from llmscale.checkpoint.initial_weights import complete_published_weights, keep_published
from llmscale.config.hardware import has_bf16_instructions
from llmscale.data.mixture import keep_sets
from llmscale.engine.collectives import gather, on_all_ranks, on_each_disk, on_main_rank
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.deepspeed_engine import build_engine, check_device, set_learning_rate
from llmscale.engine.device_memory import gpu_capability
from llmscale.engine.device_settings import allow_tf32
from llmscale.engine.loss_scale import explain_smallest_scale, get_scaler_state, set_scaler_state
from llmscale.engine.process_group import World, is_gpu, join_world
from llmscale.engine.train_step import PhaseTimer, set_micro_steps, train_step
from llmscale.engine.zero_shards import (
    group_scalars,
    materialise_optimizer_state,
    refresh_low_precision_weights,
    reset_step_counts,
    set_group_scalars,
    state_views,
    write_back,
)
from llmscale.memory.estimate import estimate_memory
from llmscale.planning.compilation import ASSUMED_STEP_S, Compilation, decide_compilation
from llmscale.terminal.human_numbers import format_duration
from llmscale.terminal.status_line import REPEAT_S, StatusLine
from llmscale.training.inputs import as_plain
from llmscale.training.live_run import Engine, RecentSteps, Run, RunIO, announce, report_on_main
from llmscale.training.live_view import open_view
from llmscale.training.loss_spikes import RollbackRequest
from llmscale.training.metrics import MetricsLog, Tracker, start_trackers
from llmscale.training.publish_run import RunPublisher, find_unpublished, open_publisher
from llmscale.training.rank_agreement import check_ranks_agree, claim_run_folder
from llmscale.training.resume import confirm_start, enter_history, load_initial_state
from llmscale.training.run_folder import (
    CONFIG_NAME,
    RunFolderClaim,
    keep,
    open_start_text,
    save_run_description,
)
from llmscale.training.session import Session, build_actions, open_data, open_validation_splits
from llmscale.training.start import Start
from llmscale.training.step_metrics import StepMeter
from llmscale.training.stop_request import StopRequest, launch_names
from llmscale.training.watchdog import Heartbeat

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

#: Share of --minutes in which steps are timed, and most seconds of it; and the share that is left for the last save.
_TIMED_SHARE = 0.04
_MOST_TIMED_S = 30.0
_END_SHARE = 0.02
#: Time of a sequence's validation relative to that of a training step: a forward pass.
_VALIDATION_SHARE = 1 / 3
#: Most timed steps.
_MOST_TIMED = 50
#: Learning rate, relative to the peak: no warm-up protects these steps, and Muon skips its work at 0.
_LOW_RATE = 1e-3


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
        estimate = estimate_memory(start.resolved, gpu_capability())
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
        if backend:
            compiler = BlockCompiler(backend, start.config.compile_mode)
        else:
            compiler = None
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
    config = start.config
    plan = start.resolved.plan
    minutes = start.config.minutes
    assert minutes is not None
    step_s, timed = _time_steps(start, engine, world, progress)
    left_s = on_main_rank(world.control, lambda: 60 * minutes * (1 - _END_SHARE) - (time.perf_counter() - began))
    # In steps.
    validation = _VALIDATION_SHARE * validated / plan.global_batch_size
    per_step = 1 + (validation / config.val_every if config.val_every else 0.0)
    count = max(1, int((left_s / step_s - validation) / per_step))
    steps = start.first_step + count
    if plan.ramp is not None:
        # The small batches at the beginning take less time.
        seen = start.state.samples_seen if start.state else 0
        steps = max(start.first_step + 1, plan.steps_for(seen + count * plan.global_batch_size))
    rate = f"{plan.tokens_per_step / step_s:,.0f} tokens/s"
    line = (
        f"--minutes {minutes:g} sets {steps:,} step{'s' * (steps > 1)}: {format_duration(max(left_s, 0.0))} are left, "
        f"and a step takes {step_s:.3g} s ({rate}; {timed} timed and undone). Later starts with the "
        "same --minutes keep the number"
    )
    return start.with_steps(steps), line


def _time_steps(start: Start, engine: Engine, world: World, progress: Callable[[], object]) -> tuple[float, int]:
    """Return the seconds of a step of the full batch, equal on every rank, and the number of timed steps. Collective.

    Only a step itself shows how long it takes: communication, offload and the optimizer are part of it. So these are
    complete steps, on made-up tokens: neither the data nor a random state moves. Afterwards weights, optimizer states,
    buffers and the loss scaler are what they were, bit for bit.

    The first one, which allocates and compiles, is not counted, and repeated while fp16 lowers its scale. `progress` is
    called after every step. Synchronises with the device.
    """
    assert start.config.minutes is not None
    limit_s = min(_TIMED_SHARE * 60 * start.config.minutes, _MOST_TIMED_S)

    def step() -> None:
        train_step(deepspeed, micro_batches, world.device, PhaseTimer(world.device))
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        progress()

    resolved = start.resolved
    deepspeed = engine.deepspeed
    micro_batches = _made_up_tokens(start, world)
    with explain_smallest_scale(start.first_step), _undone(deepspeed, is_new=start.state is None):
        set_micro_steps(deepspeed, len(micro_batches))
        set_learning_rate(deepspeed, resolved.optimizer, resolved.schedule.lr * _LOW_RATE)
        for _ in range(_MOST_TIMED):
            step()
            if deepspeed.was_step_applied():  # not skipped by fp16, whose scale was too large
                break
        began = time.perf_counter()
        seconds = 0.0
        count = 0
        while count == 0 or (seconds < limit_s and count < _MOST_TIMED):
            step()
            count += 1
            seconds = on_main_rank(world.control, lambda: time.perf_counter() - began)
    return seconds / count, count


def _made_up_tokens(start: Start, world: World) -> list[torch.Tensor]:
    """Return a rank's micro-batches of a step, each [micro_batch_size, T + 1], equal for ranks that divide them."""
    plan = start.resolved.plan
    generator = torch.Generator()
    generator.manual_seed(plan.ranks.group_of(world.rank))
    size = (plan.micro_batch_size, plan.seq_len + 1)
    steps = plan.gradient_accumulation_steps
    return [torch.randint(start.resolved.shape.vocab_size, size, generator=generator) for _ in range(steps)]


@contextmanager
def _undone(engine: DeepSpeedEngine, *, is_new: bool) -> Iterator[None]:
    """Restore everything that steps inside change. Collective."""
    materialise_optimizer_state(engine)
    if is_new:
        reset_step_counts(engine)
    views = {key: view.local.to("cpu", copy=True) for key, view in state_views(engine, with_frozen=False).items()}
    scalars = group_scalars(engine)
    scaler = get_scaler_state(engine)
    counts = engine.global_steps, engine.skipped_steps
    yield
    changed = state_views(engine, with_frozen=False)
    for key, view in changed.items():
        view.local.copy_(views[key])
    write_back(engine, changed)
    set_group_scalars(engine, scalars)
    refresh_low_precision_weights(engine)
    set_scaler_state(engine, scaler)
    engine.global_steps, engine.skipped_steps = counts


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
    if world.is_main:
        log = _open_log(run.start, meter, trackers, stop)
    else:
        log = None
    of_checkpoint = run.state.wandb_run_id if run.state else None
    wandb_run_id = next((tracker.run_id for tracker in trackers if tracker.run_id), of_checkpoint)
    if world.is_main:
        write = open_start_text(run.config.run)
    else:
        write = None

    def detail(line: str) -> None:
        if write:
            write(line)
        if run.config.verbose:
            report(line)

    return RunIO(claim, log, wandb_run_id, report, detail, publisher)


def _begin(run: Run, engine: Engine, io: RunIO, stop: StopRequest) -> Session:
    """Announce the run, and begin its actions and its publication. Collective."""
    announce(run, io)
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
        if not is_gpu():
            start = _on_cpu(start, world, report_on_main(world, clock.announcer))
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
    has_bf16 = on_main_rank(world.control, has_bf16_instructions)
    wanted = start.resolved.precision
    start = start.on_cpu(has_bf16=has_bf16)
    if not has_bf16 and wanted in ("bf16", "autocast"):
        is_asked = start.resolved.precision == wanted
        if is_asked:
            chosen = f"WARNING: {wanted}, though it"
        else:
            chosen = "precision: fp32, because --precision bf16"
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


def _describe(start: Start, launches: Sequence[str]) -> None:
    folder = start.config.run
    is_new = start.state is None or not (folder / CONFIG_NAME).exists()
    resolved = {**start.resolved.as_dict(), "dataset": start.sets.fingerprint}
    config = as_plain(start.config)
    ds_config = start.resolved.ds_config
    save_run_description(folder, config, resolved, ds_config, is_new=is_new, launches=launches)
    keep(lambda: keep_sets(start.sets, folder), folder, "the tokenizer", is_new=is_new)

    def keep_model() -> None:
        source = start.source.path if start.source else None
        keep_published(start.weights, start.resolved.plan.seq_len, source, folder, start.config)

    keep(keep_model, folder, "the published model's configuration", is_new=is_new)


def _start_trackers(start: Start, world: World) -> tuple[Tracker, ...]:
    """Start the trackers on rank 0. Collective."""

    def begin() -> tuple[Tracker, ...]:
        run_id = start.state.wandb_run_id if start.state else None
        return start_trackers(start.config, start.resolved, first_step=start.first_step, wandb_run_id=run_id)

    return on_all_ranks(world.control, lambda: begin() if world.is_main else ())


def _open_log(start: Start, meter: StepMeter, trackers: Sequence[Tracker], stop: StopRequest) -> MetricsLog:
    """Open the log with its view, which is closed however the process ends."""
    resolved = start.resolved
    ranks = start.resolved.plan.ranks.world_size
    words = [start.config.run.name, start.config.model, f"ZeRO-{resolved.zero_stage}", resolved.precision]
    title = " · ".join([*words, f"{ranks} rank{'s' if ranks > 1 else ''}"])
    view = open_view(title, resolved.total_steps, meter, plain=start.config.plain, variables=os.environ)
    log = MetricsLog(start.config.run, resolved.total_steps, trackers, view)
    stop.before_sudden_end.append(log.close_view)
    stop.before_early_end.insert(0, log.close_view)
    return log
