"""Open a session that can train: join the ranks, build the engine, find the place to begin; and roll it back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmscale.checkpoint.initial_weights import complete_published_weights, keep_published
from llmscale.checkpoint.inventory import Checkpoint, find_checkpoint, is_of_run, remove_leftovers
from llmscale.checkpoint.manifest import load_pieces
from llmscale.checkpoint.run_state import RunState
from llmscale.config.hardware import has_bf16_instructions
from llmscale.config.hf_model import is_published
from llmscale.config.run_config import RunConfig
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
from llmscale.training.live_run import Engine, Run, RunIO, StepAction
from llmscale.training.live_view import Display, open_display
from llmscale.training.log_steps import LogSteps, RecordSamples
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
from llmscale.training.prepare_run import PreparedRun, as_plain
from llmscale.training.profiler import ProfileSteps
from llmscale.training.publish_run import open_publisher
from llmscale.training.rank_agreement import (
    check_ranks_agree,
    check_same_checkpoint,
    check_same_weights,
    claim_run_folder,
)
from llmscale.training.resume import (
    ResumePoint,
    enter_history,
    find_resume_point,
    load_checkpoint,
    load_initial_state,
)
from llmscale.training.run_folder import CONFIG_NAME, RunFolderClaim, keep, save_run_description
from llmscale.training.sample_stream import SampleStream, build_stream, cache_limit_bytes, run_identity
from llmscale.training.save_checkpoints import SaveCheckpoints
from llmscale.training.session import Session
from llmscale.training.startup_reports import ReportCompilation, ReportMemory, ReportStartup, describe_run
from llmscale.training.step_metrics import StepMeter
from llmscale.training.stop_request import StopRequest
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


def open_session(
    run: PreparedRun, stop: StopRequest, heartbeat: Heartbeat, began: float, announcer: StatusLine
) -> Session:
    """Do everything up to the first step. Collective. Raises LlmscaleError on every rank if one cannot start."""
    claim = RunFolderClaim(run.config.run)
    stop.before_early_end.append(claim.give_up)
    try:
        clock = StartupClock(announcer, {"checks and imports": time.perf_counter() - began})
        return _open_session(run, stop, heartbeat, clock, claim)
    except BaseException:
        claim.give_up()
        raise


def _open_session(
    prepared: PreparedRun, stop: StopRequest, heartbeat: Heartbeat, clock: StartupClock, claim: RunFolderClaim
) -> Session:
    def progress() -> None:
        heartbeat.beat("starting")

    prepared, world = _join_ranks(prepared, clock, progress)
    report = report_on_main(world, clock.announcer)
    with clock.phase("ranks", "claiming the run folder", after_s=REPEAT_S):
        config, world = prepared.config, replace(world, disks=claim_run_folder(claim, world))
        publisher = open_publisher(config.run, config.keep_every, world, report, stop.received.append)
        if publisher:
            claim.before_release.append(publisher.close)
    with clock.phase("checkpoint check", "looking for a checkpoint to resume", after_s=REPEAT_S):
        point = _choose_checkpoint(prepared, world, report)
    state = point.state if point else None
    prepared = replace(prepared, compilation=_decide_compilation(prepared, world, state))
    with clock.phase("data", "opening the data"):
        # Before the engine: the feed's workers are forked while this process is small, and read ahead meanwhile.
        stream = on_all_ranks(world.control, lambda: build_stream(prepared, state))
        feed, validation = _open_data(prepared, world, stream, state)
    with clock.phase("estimate", "estimating the memory", after_s=REPEAT_S):
        estimate = estimate_run(prepared, gpu_capability())
    with clock.phase("engine", f"building the engine, ZeRO stage {prepared.resolved.zero_stage}"):
        compiler = _build_compiler(prepared)
        deepspeed = build_engine(prepared.config, prepared.resolved, compiler)
        configured_scaler = get_scaler_state(deepspeed)
    after_s = 0.0 if point is not None or prepared.config.init_from is not None else REPEAT_S
    with clock.phase("checkpoint load", "loading the weights", after_s=after_s):
        load_initial_state(prepared, deepspeed, point, world, report, progress)
    with clock.phase("trackers", "starting the trackers", after_s=REPEAT_S):
        trackers = _start_trackers(prepared, world, state)
    clock.announcer.begin("opening the run's records", after_s=REPEAT_S)
    history = enter_history(prepared.config.run, point, world, report)
    on_each_disk(world.control, world.disks, lambda: claim.describe(lambda: _describe(prepared, point)))
    meter = StepMeter(world.device)
    run = Run(prepared, world, stream, validation, state, history, estimate, clock.seconds)
    engine = Engine(
        deepspeed=deepspeed,
        compiler=compiler,
        configured_scaler=configured_scaler,
        feed=feed,
        meter=meter,
        recent=RecentSteps(world),
        skipped_before=state.skipped_steps if state else 0,
    )
    log = _open_log(prepared, meter, trackers, claim, stop) if world.is_main else None
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
            publisher.start(_find_unpublished(prepared.config.run, point, world))
    if run.first_step < run.resolved.total_steps:
        clock.announcer.begin(f"{'compiling the blocks and ' if compiler else ''}taking the first step")
    return session


def _build_compiler(prepared: PreparedRun) -> BlockCompiler | None:
    backend, mode = prepared.compilation.backend, prepared.config.compile_mode
    return BlockCompiler(backend, mode) if backend else None


def _find_unpublished(run: Path, point: ResumePoint | None, world: World) -> Path | None:
    """Return the checkpoint to resume if it is this run's and the store does not have it. Collective."""

    def find() -> Path | None:
        if point is None or not is_of_run(point.folder, run):
            return None
        pieces = load_pieces(point.folder)
        return None if pieces and pieces.remote else point.folder

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
    actions += [RecordSamples(run, io), ReportStartup(run, io)]
    if engine.compiler is not None:
        actions.append(ReportCompilation(run, io, engine.compiler))
    actions += [ReportMemory(run, io), log, StopOnNonfinite(run, engine, io, judges_at=log.due)]
    if config.overfit_batch is not None:
        actions.append(JudgeOverfit(run, io))
    if run.validation:
        actions.append(Validate(run, engine, io))
    if run.prepared.tasks:
        actions.append(EvaluateTasks(run, engine, io))
    if config.sample_every or config.eval_every:
        actions.append(SampleText(run, engine, io))
    return actions, SaveCheckpoints(run, engine, io, rollback, actions)


def _join_ranks(run: PreparedRun, clock: StartupClock, progress: Callable[[], object]) -> tuple[PreparedRun, World]:
    """Join ranks that were started alike, and complete the published weights on each of their disks. Collective."""
    with clock.phase("ranks", "joining the ranks"):
        world = join_world()
        run = run if is_gpu() else _on_cpu(run, world, report_on_main(world, clock.announcer))
        allow_tf32(run.resolved.precision)
        on_all_ranks(world.control, lambda: check_device(run.resolved))
        check_ranks_agree(run, world)
    if run.weights is None:
        return run, world
    with clock.phase("published weights", "fetching and checking the published weights"):
        weights = complete_published_weights(run.weights, run.sets.first, world, progress)
    return replace(run, weights=weights), world


def _on_cpu(run: PreparedRun, world: World, report: Callable[[str], None]) -> PreparedRun:
    """Return the run as these CPUs train it, and report a precision that is slow on them. Collective."""
    has_bf16, wanted = on_main_rank(world.control, has_bf16_instructions), run.resolved.precision
    run = run.on_cpu(has_bf16=has_bf16)
    if not has_bf16 and wanted in ("bf16", "autocast"):
        is_asked = run.resolved.precision == wanted
        chosen = f"WARNING: {wanted}, though it" if is_asked else "precision: fp32, because --precision bf16"
        report(f"{chosen} is slow on this CPU, which has no bf16 instructions")
    return run


def _choose_checkpoint(run: PreparedRun, world: World, report: Callable[[str], None]) -> ResumePoint | None:
    """Return the checkpoint to resume, and remove what interrupted saves left in the run folder. Collective."""
    point = find_resume_point(run.config, lambda state: run_identity(run, state), world, report)
    source = on_all_ranks(world.control, lambda: _source_of_weights(run.config, point))
    check_same_checkpoint(source, world)
    if run.weights is not None:
        check_same_weights(run.weights, world)

    def clean() -> None:
        for line in remove_leftovers(run.config.run):
            report(line)

    on_each_disk(world.control, world.disks, clean)
    return point


def _open_data(
    run: PreparedRun, world: World, stream: SampleStream, state: RunState | None
) -> tuple[Feed, tuple[ValidationSplit, ...]]:
    """Return the feed at the run's position, and the validation splits if they are used. Collective."""
    start_sample = state.samples_seen if state else 0
    feed = on_all_ranks(world.control, lambda: open_feed(run, world, stream, start_sample=start_sample))
    if not run.config.val_every:
        return feed, ()
    sets = run.sets.as_recorded(stream.identity)
    return feed, on_all_ranks(world.control, lambda: open_validation(sets, run.config.val_samples))


def open_feed(run: PreparedRun, world: World, stream: SampleStream, *, start_sample: int) -> Feed:
    """Return this rank's micro-batches from sample `start_sample` on, those of all ranks that divide its sequences.

    Raises DataError if a shard has changed.
    """
    plan, limit_bytes = run.resolved.plan, cache_limit_bytes(run.config)
    layout = RankLayout(plan.ranks.group_of(world.rank), plan.ranks.groups_per_node(world.ranks_per_node))
    shards: WindowReader = MixedShards(run.sets.locations, "train", limit_bytes)
    if run.sets.recipe is None:
        shards = TokenShards(run.sets.first, "train", cache_limit_bytes=limit_bytes)
    return Feed(
        shards,
        stream.order,
        FeedPlan(layout, plan.micro_batch_size, plan.gradient_accumulation_steps, stream.batches, plan.global_batch_size),
        start_sample=start_sample,
        num_workers=run.config.num_workers,
        pin_memory=is_gpu(),
    )


def _decide_compilation(run: PreparedRun, world: World, state: RunState | None) -> Compilation:
    """Decide on rank 0, because ZeRO-3 gathers the weights of compiled blocks in other portions. Collective."""
    steps_left = run.resolved.total_steps - (state.step if state else 0)
    decision = on_main_rank(
        world.control,
        lambda: decide_compilation(
            run.config.compile,
            run.resolved,
            device_type=world.device.type,
            device_name=world.device_name,
            steps_left=steps_left,
            gpus_per_node=max(world.ranks_per_node),
            network=find_node_network(),
        ),
    )
    if run.config.compile_mode == "default":
        return decision
    effect = run.config.compile_mode if decision.backend == "inductor" else "--compile-mode has no effect"
    return replace(decision, why=f"{decision.why}; {effect}")


def _announce(run: Run, io: RunIO) -> None:
    """Print what is about to be trained, and what changed since the checkpoint."""
    describe_run(run, io.report)
    io.report(estimate_line(run.estimate, device_memory_bytes()))
    if run.state:
        prepared = run.prepared
        for line in (
            *change_lines(run.state, prepared, hyperparameters(prepared)),
            *finished_lines(run.state, prepared),
        ):
            io.report(line)


def report_on_main(world: World, announcer: StatusLine) -> Callable[[str], None]:
    """Return a function that prints a wrapped line on rank 0, in the place of the announcement."""

    def report(line: str) -> None:
        if world.is_main:
            announcer.clear()
            for part in wrap_line(line, output_width()):
                print_visible(part, flush=True)

    return report


def _describe(run: PreparedRun, point: ResumePoint | None) -> None:
    folder = run.config.run
    is_new = point is None or not (folder / CONFIG_NAME).exists()
    source = _source_of_weights(run.config, point)
    resolved = {**run.resolved.as_dict(), "dataset": run.sets.fingerprint}
    save_run_description(folder, as_plain(run.config), resolved, run.resolved.ds_config, is_new=is_new)
    keep(lambda: keep_sets(run.sets, folder), folder, "the tokenizer", is_new=is_new)

    def keep_model() -> None:
        keep_published(run.weights, run.resolved.plan.seq_len, source, folder)

    keep(keep_model, folder, "the published model's configuration", is_new=is_new)


def _source_of_weights(config: RunConfig, point: ResumePoint | None) -> Path | None:
    """Return the checkpoint whose weights the engine loads, if any."""
    if point is not None:
        return point.folder
    if config.init_from is None or is_published(config.init_from):
        return None
    return find_checkpoint(Path(config.init_from))


def _start_trackers(run: PreparedRun, world: World, state: RunState | None) -> StartedTrackers:
    """Start the trackers on rank 0. Collective."""

    def start() -> StartedTrackers:
        return start_trackers(
            run.config,
            lambda: as_plain(run.config) | run.resolved.as_dict(),
            first_step=state.step if state else 0,
            wandb_run_id=state.wandb_run_id if state else None,
        )

    return on_all_ranks(world.control, lambda: start() if world.is_main else StartedTrackers())


def _open_log(
    run: PreparedRun, meter: StepMeter, trackers: StartedTrackers, claim: RunFolderClaim, stop: StopRequest
) -> MetricsLog:
    """Open the log with its display, which is closed however the process ends."""
    display = _open_display(run, meter)
    stop.before_sudden_end.append(display.close)
    stop.before_early_end.insert(0, display.close)
    return MetricsLog(run.config.run, run.resolved.total_steps, trackers.trackers, display, check=claim.check)


def _open_display(run: PreparedRun, meter: StepMeter) -> Display:
    resolved, ranks = run.resolved, run.resolved.plan.ranks.world_size
    words = [run.config.run.name, run.config.model, f"ZeRO-{resolved.zero_stage}", resolved.precision]
    title = " · ".join([*words, f"{ranks} rank{'s' if ranks > 1 else ''}"])
    return open_display(title, resolved.total_steps, meter, plain=run.config.plain, variables=os.environ)


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
    control, prepared = run.world.control, run.prepared
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
    prepared = replace(prepared, config=config)
    io.report(f"going back from step {session.step} to {before.path.name}; the batches of steps {skipped} are left out")
    wanted = config.model_copy(update={"resume": str(before.path), "init_from": None})
    try:
        point = _choose_checkpoint(replace(prepared, config=wanted, weights=None), run.world, io.report)
    except CheckpointError as error:
        return _stop_at_spike(session, before, spike, str(error))
    assert point is not None
    engine.feed.close()
    stream = build_stream(prepared, point.state)
    feed, validation = _open_data(prepared, run.world, stream, point.state)
    load_checkpoint(engine.deepspeed, point, run.world, engine.configured_scaler)
    engine.deepspeed.skipped_steps = 0
    history = enter_history(config.run, point, run.world, io.report)
    io.log_event("go_back", step=session.step, to_step=point.state.step, spike=spike[0], skip_steps=skipped)
    if io.log:
        io.log.roll_back(point.state.step)
    rollback.num_rollbacks += 1
    seconds = {"going back": time.perf_counter() - began}
    run = Run(prepared, run.world, stream, validation, point.state, history, run.estimate, seconds)
    recent = RecentSteps(run.world)
    engine = replace(engine, feed=feed, recent=recent, skipped_before=point.state.skipped_steps)
    session.continue_from(run, engine, *_build_actions(run, engine, io, rollback, session.stop))
    return True


def _stop_at_spike(session: Session, before: Checkpoint | None, spike: tuple[int, int], problem: str) -> bool:
    if session.run.world.is_main:
        session.stop.received.append(f"--on-spike skip, which cannot go back from step {spike[0]}: {problem}")
        session.io.report(rollback_advice(session.run, before, spike))
    return False
