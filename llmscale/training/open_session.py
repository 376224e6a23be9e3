"""Open a session that can train: join the ranks, build the engine, find the place to begin; and roll it back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmscale.checkpoint.initial_weights import complete_published_weights, keep_published
from llmscale.checkpoint.inventory import Checkpoint, is_of_run
from llmscale.checkpoint.manifest import load_pieces
from llmscale.config.hardware import has_bf16_instructions
from llmscale.config.published import publish_keys
from llmscale.data.loader import Feed, FeedPlan
from llmscale.data.mixture import MixedShards, keep_sets
from llmscale.data.order.sample_order import RankLayout
from llmscale.data.shards.token_shards import TokenShards, WindowReader
from llmscale.data.validation import ValidationSplit, open_validation
from llmscale.engine.collectives import gather, on_all_ranks, on_each_disk, on_main_rank
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.deepspeed_engine import build_engine, check_device
from llmscale.engine.device_memory import device_memory_bytes, gpu_capability
from llmscale.engine.device_settings import allow_tf32
from llmscale.engine.network import find_node_network
from llmscale.engine.process_group import World, is_gpu, join_world
from llmscale.engine.train_step import get_scaler_state
from llmscale.errors import CheckpointError
from llmscale.planning.compilation import Compilation, decide_compilation
from llmscale.terminal.status_line import REPEAT_S, StatusLine
from llmscale.terminal.table import output_width, wrap_line
from llmscale.training.changes import change_lines, finished_lines, hyperparameters
from llmscale.training.evaluate_steps import EvaluateTasks, SampleText, Validate
from llmscale.training.heartbeat import Heartbeat
from llmscale.training.inputs import as_plain
from llmscale.training.live_run import Engine, Run, RunIO, StepAction
from llmscale.training.live_view import Display, open_display
from llmscale.training.log_steps import LogSteps
from llmscale.training.loss_spikes import (
    RollbackRequest,
    WatchSpikes,
    checkpoint_before,
    rollback_advice,
    steps_to_skip,
)
from llmscale.training.memory_report import estimate_line, estimate_run
from llmscale.training.metrics import MetricsLog
from llmscale.training.nonfinite import StopOnNonfinite
from llmscale.training.overfit_check import JudgeOverfit
from llmscale.training.profiler import ProfileSteps
from llmscale.training.publish_run import open_publisher
from llmscale.training.rank_agreement import check_ranks_agree, claim_run_folder
from llmscale.training.resume import confirm_start, enter_history, load_checkpoint, load_initial_state
from llmscale.training.run_folder import CONFIG_NAME, RunFolderClaim, keep, save_run_description
from llmscale.training.sample_stream import cache_limit_bytes
from llmscale.training.save_checkpoints import SaveCheckpoints
from llmscale.training.session import Session
from llmscale.training.start import Start
from llmscale.training.startup_reports import ReportCompilation, ReportMemory, ReportStartup, describe_run
from llmscale.training.step_metrics import StepMeter
from llmscale.training.stop_request import StopRequest, launch_names
from llmscale.training.stragglers import RecentSteps, WatchStragglers
from llmscale.training.trackers import StartedTrackers, start_trackers
from llmscale.untrusted.terminal import print_visible

#: Rollbacks of one start; a run that needs more has another problem than a batch.
_MAX_ROLLBACKS = 5


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
        return _open_session(start, stop, heartbeat, clock, claim)
    except BaseException:
        claim.give_up()
        raise


def _open_session(
    start: Start, stop: StopRequest, heartbeat: Heartbeat, clock: StartupClock, claim: RunFolderClaim
) -> Session:
    def progress() -> None:
        heartbeat.beat("starting")

    start, world = _join_ranks(start, clock, progress)
    report = report_on_main(world, clock.announcer)
    with clock.phase("ranks", "claiming the run folder", after_s=REPEAT_S):
        config, world = start.config, replace(world, disks=claim_run_folder(claim, world))
        publisher = open_publisher(config.run, config.keep_every, world, report, stop.received.append)
        if publisher:
            claim.before_release.append(publisher.close)
    with clock.phase("checkpoint check", "looking for a checkpoint to resume", after_s=REPEAT_S):
        start = confirm_start(start, world, report)
    start = replace(start, compilation=_decide_compilation(start, world))
    with clock.phase("data", "opening the data"):
        # Before the engine: the feed's workers are forked while this process is small, and read ahead meanwhile.
        feed, validation = _open_data(start, world)
    with clock.phase("estimate", "estimating the memory", after_s=REPEAT_S):
        estimate = estimate_run(start, gpu_capability())
    with clock.phase("engine", f"building the engine, ZeRO stage {start.resolved.zero_stage}"):
        compiler = _build_compiler(start)
        deepspeed = build_engine(start.config, start.resolved, compiler)
        configured_scaler = get_scaler_state(deepspeed)
    after_s = 0.0 if start.source is not None or start.weights is not None else REPEAT_S
    with clock.phase("checkpoint load", "loading the weights", after_s=after_s):
        load_initial_state(start, deepspeed, world, report, progress)
    with clock.phase("trackers", "starting the trackers", after_s=REPEAT_S):
        trackers = _start_trackers(start, world)
    clock.announcer.begin("opening the run's records", after_s=REPEAT_S)
    history = enter_history(start, world, report)
    launches = sorted({name for names in gather(world.control, launch_names(os.environ)) for name in names})
    on_each_disk(world.control, world.disks, lambda: claim.describe(lambda: _describe(start, launches)))
    meter = StepMeter(world.device)
    # Without the list of checkpoints, which is long in a long run.
    run = Run(replace(start, found=None), world, validation, history, estimate, clock.seconds)
    state = run.state
    engine = Engine(
        deepspeed=deepspeed,
        compiler=compiler,
        configured_scaler=configured_scaler,
        feed=feed,
        meter=meter,
        recent=RecentSteps(world),
        skipped_before=state.skipped_steps if state else 0,
    )
    log = _open_log(start, meter, trackers, claim, stop) if world.is_main else None
    wandb_run_id = trackers.wandb_run_id or (state.wandb_run_id if state else None)
    io = RunIO(claim, log, wandb_run_id, report, publisher)
    clock.announcer.begin("preparing what happens at steps", after_s=REPEAT_S)
    with meter.pause("starting"):
        _announce(run, io)
        rollback = RollbackRequest()
        session = Session(run, engine, io, rollback, stop, *_build_actions(run, engine, io, rollback, stop))
        for action in session.actions:
            action.begin(run.first_step)
        if publisher:
            publisher.start(_find_unpublished(start, world))
    if run.first_step < run.resolved.total_steps:
        clock.announcer.begin(f"{'compiling the blocks and ' if compiler else ''}taking the first step")
    return session


def _build_compiler(start: Start) -> BlockCompiler | None:
    backend, mode = start.compilation.backend, start.config.compile_mode
    return BlockCompiler(backend, mode) if backend else None


def _find_unpublished(start: Start, world: World) -> Path | None:
    """Return the checkpoint to resume if it is this run's and the store does not have it. Collective."""
    source = start.source

    def find() -> Path | None:
        if source is None or not start.inputs.resumes or not is_of_run(source.path, start.config.run):
            return None
        pieces = load_pieces(source.path)
        return None if pieces and pieces.remote else source.path

    return on_main_rank(world.control, find)


def _build_actions(
    run: Run, engine: Engine, io: RunIO, rollback: RollbackRequest, stop: StopRequest
) -> tuple[list[StepAction], SaveCheckpoints]:
    """Return the actions of a run in their order at one step, and the checkpoints, which come last. Collective."""
    config, world = run.config, run.world
    watchers = [WatchSpikes(run, io, rollback, stop).check] if world.is_main else []
    watchers += [WatchStragglers(world, io.log, io.report).check] if world.world_size > 1 else []
    log = LogSteps(run, engine, io, watchers)
    actions: list[StepAction] = []
    if config.profile:
        actions.append(ProfileSteps(run, engine, io, config.profile, is_rollback=rollback.num_rollbacks > 0))
    actions += [ReportStartup(run, io)]
    if engine.compiler is not None:
        actions.append(ReportCompilation(run, io, engine.compiler))
    actions += [ReportMemory(run, io), log, StopOnNonfinite(run, engine, io, judges_at=log.due)]
    if config.overfit_batch is not None:
        actions.append(JudgeOverfit(run, io))
    if run.validation:
        actions.append(Validate(run, engine, io))
    if run.start.tasks:
        actions.append(EvaluateTasks(run, engine, io))
    if config.sample_every or config.eval_every:
        actions.append(SampleText(run, engine, io))
    return actions, SaveCheckpoints(run, engine, io, rollback, actions)


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
    return replace(start, inputs=replace(start.inputs, weights=weights)), world


def _on_cpu(start: Start, world: World, report: Callable[[str], None]) -> Start:
    """Return the start as these CPUs train it, and report a precision that is slow on them. Collective."""
    has_bf16, wanted = on_main_rank(world.control, has_bf16_instructions), start.resolved.precision
    start = start.on_cpu(has_bf16=has_bf16)
    if not has_bf16 and wanted in ("bf16", "autocast"):
        is_asked = start.resolved.precision == wanted
        chosen = f"WARNING: {wanted}, though it" if is_asked else "precision: fp32, because --precision bf16"
        report(f"{chosen} is slow on this CPU, which has no bf16 instructions")
    return start


def _open_data(start: Start, world: World) -> tuple[Feed, tuple[ValidationSplit, ...]]:
    """Return the feed at the run's position, and the validation splits if they are used. Collective."""
    start_sample = start.state.samples_seen if start.state else 0
    feed = on_all_ranks(world.control, lambda: open_feed(start, world, start_sample=start_sample))
    if not start.config.val_every:
        return feed, ()
    sets = start.sets.as_recorded(start.stream.identity)
    return feed, on_all_ranks(world.control, lambda: open_validation(sets, start.config.val_samples))


def open_feed(start: Start, world: World, *, start_sample: int) -> Feed:
    """Return this rank's micro-batches from sample `start_sample` on, those of all ranks that divide its sequences.

    Raises DataError if a shard has changed.
    """
    plan, limit_bytes = start.resolved.plan, cache_limit_bytes(start.config)
    layout = RankLayout(plan.ranks.group_of(world.rank), plan.ranks.groups_per_node(world.ranks_per_node))
    shards: WindowReader
    if start.sets.recipe is None:
        shards = TokenShards(start.sets.first, "train", cache_limit_bytes=limit_bytes)
    else:
        shards = MixedShards(start.sets.locations, "train", limit_bytes)
    return Feed(
        shards,
        start.stream.order,
        FeedPlan(
            layout,
            plan.micro_batch_size,
            plan.gradient_accumulation_steps,
            start.stream.batches,
            plan.global_batch_size,
        ),
        start_sample=start_sample,
        num_workers=start.config.num_workers,
        pin_memory=is_gpu(),
    )


def _decide_compilation(start: Start, world: World) -> Compilation:
    """Decide on rank 0, because ZeRO-3 gathers the weights of compiled blocks in other portions. Collective."""
    steps_left = start.resolved.total_steps - start.first_step
    decision = on_main_rank(
        world.control,
        lambda: decide_compilation(
            start.config.compile,
            start.resolved,
            device_type=world.device.type,
            device_name=world.device_name,
            steps_left=steps_left,
            gpus_per_node=max(world.ranks_per_node),
            network=find_node_network(),
        ),
    )
    if start.config.compile_mode == "default":
        return decision
    effect = start.config.compile_mode if decision.backend == "inductor" else "--compile-mode has no effect"
    return replace(decision, why=f"{decision.why}; {effect}")


def _announce(run: Run, io: RunIO) -> None:
    """Print what is about to be trained, and what changed since the checkpoint."""
    describe_run(run, io.report)
    io.report(estimate_line(run.estimate, device_memory_bytes()))
    if run.state:
        changes = change_lines(run.state, run.start, hyperparameters(run.start))
        for line in (*changes, *finished_lines(run.state, run.start)):
            io.report(line)


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


def _start_trackers(start: Start, world: World) -> StartedTrackers:
    """Start the trackers on rank 0. Collective."""

    def begin() -> StartedTrackers:
        return start_trackers(
            start.config,
            lambda: publish_keys(as_plain(start.config)) | start.resolved.as_dict(),
            first_step=start.first_step,
            wandb_run_id=start.state.wandb_run_id if start.state else None,
        )

    return on_all_ranks(world.control, lambda: begin() if world.is_main else StartedTrackers())


def _open_log(
    start: Start, meter: StepMeter, trackers: StartedTrackers, claim: RunFolderClaim, stop: StopRequest
) -> MetricsLog:
    """Open the log with its display, which is closed however the process ends."""
    display = _open_display(start, meter)
    stop.before_sudden_end.append(display.close)
    stop.before_early_end.insert(0, display.close)
    return MetricsLog(start.config.run, start.resolved.total_steps, trackers.trackers, display, check=claim.check)


def _open_display(start: Start, meter: StepMeter) -> Display:
    resolved, ranks = start.resolved, start.resolved.plan.ranks.world_size
    words = [start.config.run.name, start.config.model, f"ZeRO-{resolved.zero_stage}", resolved.precision]
    title = " · ".join([*words, f"{ranks} rank{'s' if ranks > 1 else ''}"])
    return open_display(title, resolved.total_steps, meter, plain=start.config.plain, variables=os.environ)


def roll_back(session: Session, heartbeat: Heartbeat) -> bool:
    """Go back to the checkpoint before a loss spike, within the same processes, and skip the spike's batches.

    Does everything that a start with `--resume CHECKPOINT --skip-steps A:B` would do, with the same code; only the
    process group and the engine stay. Returns whether the session is at an earlier step now; if not, rank 0 asks to
    stop and reports how to continue by hand. Collective. Raises LlmscaleError like a start.
    """
    heartbeat.beat("starting")
    publisher = session.io.publisher
    with session.engine.meter.pause("starting"), publisher.dropping if publisher else nullcontext():
        has_rolled_back = _roll_back(session)
    heartbeat.beat("starting")
    return has_rolled_back


def _roll_back(session: Session) -> bool:
    began, run, engine, io, rollback = time.perf_counter(), session.run, session.engine, session.io, session.rollback
    control = run.world.control
    spike = next(wanted for wanted in gather(control, rollback.rollback_from) if wanted is not None)
    rollback.rollback_from = None
    rollback.finish_saving()
    before = on_main_rank(control, lambda: checkpoint_before(run, spike[0]))
    if before is None:
        return _stop_at_spike(session, None, spike, "no checkpoint is older")
    if rollback.num_rollbacks >= _MAX_ROLLBACKS:
        return _stop_at_spike(session, before, spike, f"the run has gone back {_MAX_ROLLBACKS} times already")
    skipped = steps_to_skip(run, spike)
    config = run.config.model_copy(update={"skip_steps": [*run.config.skip_steps, skipped]})
    start = replace(run.start, inputs=replace(run.start.inputs, config=config))
    io.report(f"going back from step {session.step} to {before.path.name}; the batches of steps {skipped} are left out")
    try:
        start = confirm_start(start, run.world, io.report, at=before.path)
    except CheckpointError as error:
        return _stop_at_spike(session, before, spike, str(error))
    assert start.source is not None and start.state is not None
    engine.feed.close()
    feed, validation = _open_data(start, run.world)
    load_checkpoint(engine.deepspeed, start.source, run.world, engine.configured_scaler)
    engine.deepspeed.skipped_steps = 0
    history = enter_history(start, run.world, io.report)
    io.log_event("go_back", step=session.step, to_step=start.state.step, spike=spike[0], skip_steps=skipped)
    if io.log:
        io.log.roll_back(start.state.step)
    rollback.num_rollbacks += 1
    seconds = {"going back": time.perf_counter() - began}
    run = Run(replace(start, found=None), run.world, validation, history, run.estimate, seconds)
    recent = RecentSteps(run.world)
    engine = replace(engine, feed=feed, recent=recent, skipped_before=start.state.skipped_steps)
    session.continue_from(run, engine, *_build_actions(run, engine, io, rollback, session.stop))
    return True


def _stop_at_spike(session: Session, before: Checkpoint | None, spike: tuple[int, int], problem: str) -> bool:
    if session.run.world.is_main:
        session.stop.received.append(f"--on-spike skip, which cannot go back from step {spike[0]}: {problem}")
        session.io.report(rollback_advice(session.run, before, spike))
    return False
