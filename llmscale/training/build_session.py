"""From a prepared run to a session that can train: join the ranks, build the engine, find the place to begin."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmscale.checkpoint.locate import find_checkpoint
from llmscale.checkpoint.retention import remove_leftovers
from llmscale.checkpoint.run_state import RunState
from llmscale.config.hardware import has_bf16_instructions
from llmscale.config.hf_model import is_published
from llmscale.config.run_config import RunConfig
from llmscale.data.loader import Feed, FeedPlan
from llmscale.data.mixture import MixedShards, keep_sets
from llmscale.data.order.sample_order import RankLayout
from llmscale.data.shards.token_shards import TokenShards, WindowReader
from llmscale.data.validation import ValidationSplit, open_validation
from llmscale.engine.collectives import on_main_rank, together
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.deepspeed_engine import build_engine, check_device
from llmscale.engine.device_memory import device_memory_bytes, gpu_capability
from llmscale.engine.device_settings import allow_tf32
from llmscale.engine.loss_scaling import get_scaler_state
from llmscale.engine.node_network import find_node_network
from llmscale.engine.process_group import World, is_gpu, join_world
from llmscale.planning.compilation import Compilation, decide_compilation
from llmscale.terminal.announcer import REPEAT_S, Announcer
from llmscale.terminal.table import output_width, wrap_line
from llmscale.training.actions.save_checkpoints import SaveCheckpoints
from llmscale.training.changes import change_lines, finished_lines, hyperparameters
from llmscale.training.display.display import Display
from llmscale.training.display.live_view import open_display
from llmscale.training.fill_engine import fill_engine
from llmscale.training.heartbeat import Heartbeat
from llmscale.training.live_run import LiveRun
from llmscale.training.memory_report import estimate_line, estimate_run
from llmscale.training.metrics import MetricsLog
from llmscale.training.published_weights import complete_published_weights, keep_published
from llmscale.training.rank_fingerprint import (
    check_ranks_agree,
    check_same_checkpoint,
    check_same_weights,
    claim_one_run_folder,
)
from llmscale.training.recent_steps import RecentSteps
from llmscale.training.resume import ResumePoint, enter_history, find_resume_point
from llmscale.training.run_claim import RunFolderClaim
from llmscale.training.run_data import SampleStream, build_stream, cache_limit_bytes, run_identity
from llmscale.training.run_folder import CONFIG_NAME, keep, save_run_description
from llmscale.training.run_inputs import PreparedRun, as_plain
from llmscale.training.session import Session
from llmscale.training.spikes import SpikeRequests
from llmscale.training.startup_summary import describe_run
from llmscale.training.step_actions import build_actions
from llmscale.training.stop_request import StopRequest
from llmscale.training.throughput import StepMeter
from llmscale.training.trackers.start_trackers import StartedTrackers, start_trackers
from llmscale.untrusted.terminal import print_visible


@dataclass
class StartupClock:
    """Seconds per phase of the start, which are announced; those that are short as a rule only when they are not."""

    announcer: Announcer
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, words: str, *, after_s: float = 0.0) -> Iterator[None]:
        self.announcer.begin(words, after_s=after_s)
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def open_session(
    run: PreparedRun, stop: StopRequest, heartbeat: Heartbeat, began: float, announcer: Announcer
) -> Session:
    """Everything up to the first step, which is announced last. Collective. Raises LlmscaleError on every rank when it
    cannot start on one."""
    claim = RunFolderClaim(run.config.run)
    stop.before_early_end.append(claim.give_up)
    try:
        clock = StartupClock(announcer, {"checks and imports": time.perf_counter() - began})
        return _open_session(run, stop, heartbeat, clock, claim)
    except BaseException:
        claim.give_up()
        raise


def _open_session(
    run: PreparedRun, stop: StopRequest, heartbeat: Heartbeat, clock: StartupClock, claim: RunFolderClaim
) -> Session:
    def progress() -> None:
        heartbeat.beat("starting")

    run, world = _join_ranks(run, clock, progress)
    report = report_on_main(world, clock.announcer)
    with clock.phase("ranks", "claiming the run folder", after_s=REPEAT_S):
        claim_one_run_folder(claim, world)
    with clock.phase("checkpoint check", "looking for a checkpoint to go on from", after_s=REPEAT_S):
        point = choose_checkpoint(run, world, report)
    state = point.state if point else None
    run = replace(run, compilation=_decide_compilation(run, world, state))
    with clock.phase("data", "opening the data"):
        # Before the engine: the feed's workers are forked while this process is still small, and read ahead meanwhile.
        stream = together(world.control, lambda: build_stream(run, state))
        feed, validation = open_data(run, world, stream, state)
    with clock.phase("estimate", "estimating the memory", after_s=REPEAT_S):
        estimate = estimate_run(run, gpu_capability())
    with clock.phase("engine", f"building the engine, ZeRO stage {run.resolved.zero_stage}"):
        compiler = BlockCompiler(run.compilation.backend) if run.compilation.backend else None
        engine = build_engine(run.config, run.resolved, compiler)
        configured_scaler = get_scaler_state(engine)
    has_weights = point is not None or run.config.init_from is not None
    with clock.phase("checkpoint load", "loading the weights", after_s=0.0 if has_weights else REPEAT_S):
        fill_engine(run, engine, point, world, report, progress)
    with clock.phase("trackers", "starting the trackers", after_s=REPEAT_S):
        trackers = _start_trackers(run, world, state)
    clock.announcer.begin("opening the run's records", after_s=REPEAT_S)
    history = enter_history(run.config.run, point, world.control, report)
    on_main_rank(world.control, lambda: claim.describe(lambda: _describe(run, point)))
    meter = StepMeter(world.device)
    live = LiveRun(
        run=run,
        world=world,
        engine=engine,
        compiler=compiler,
        configured_scaler=configured_scaler,
        stream=stream,
        feed=feed,
        validation=validation,
        state=state,
        history=history,
        claim=claim,
        log=_open_log(run, meter, trackers, claim, stop) if world.is_main else None,
        wandb_run_id=trackers.wandb_run_id or (state.wandb_run_id if state else None),
        estimate=estimate,
        startup_s=clock.seconds,
        meter=meter,
        recent=RecentSteps(world),
        spikes=SpikeRequests(),
        report=report,
    )
    return _begin(live, stop, clock.announcer)


def _join_ranks(run: PreparedRun, clock: StartupClock, progress: Callable[[], object]) -> tuple[PreparedRun, World]:
    """Ranks that mean the same, with the weights that the run begins with on each of their disks. Collective."""
    with clock.phase("ranks", "joining the ranks"):
        world = join_world()
        run = run if is_gpu() else _on_cpu(run, world, report_on_main(world, clock.announcer))
        allow_tf32(run.resolved.precision)
        together(world.control, lambda: check_device(run.resolved))
        check_ranks_agree(run, world)
    if run.weights is None:
        return run, world
    with clock.phase("published weights", "fetching and checking the published weights"):
        weights = complete_published_weights(run.weights, run.sets.first, world, progress)
    return replace(run, weights=weights), world


def _on_cpu(run: PreparedRun, world: World, report: Callable[[str], None]) -> PreparedRun:
    """Return the run as these CPUs train it, and report whether they are slow in its precision. Collective."""
    has_bf16, wanted = on_main_rank(world.control, has_bf16_instructions), run.resolved.precision
    run = run.on_cpu(has_bf16=has_bf16)
    if not has_bf16 and wanted in ("bf16", "autocast"):
        is_asked = run.resolved.precision == wanted
        chosen = f"WARNING: {wanted}, though it" if is_asked else "precision: fp32, because --precision bf16"
        report(f"{chosen} is slow on this CPU, which has no bf16 instructions")
    return run


def choose_checkpoint(run: PreparedRun, world: World, report: Callable[[str], None]) -> ResumePoint | None:
    """The checkpoint that the run goes on from; what interrupted saves left in its folder goes. Collective."""
    point = find_resume_point(run.config, lambda state: run_identity(run, state), world.control, report)
    source = together(world.control, lambda: _source_of_weights(run.config, point))
    check_same_checkpoint(source, world)
    if run.weights is not None:
        check_same_weights(run.weights, world)
    on_main_rank(world.control, lambda: _clean(run.config.run, report))
    return point


def open_data(
    run: PreparedRun, world: World, stream: SampleStream, state: RunState | None
) -> tuple[Feed, tuple[ValidationSplit, ...]]:
    """Return training samples from where the run continues, and the validation splits if they are used. Collective."""
    start_sample = state.samples_seen if state else 0
    feed = together(world.control, lambda: open_feed(run, world, stream, start_sample=start_sample))
    if not run.config.val_every:
        return feed, ()
    sets = run.sets.as_recorded(stream.identity)
    return feed, together(world.control, lambda: open_validation(sets, run.config.val_samples))


def open_feed(run: PreparedRun, world: World, stream: SampleStream, *, start_sample: int) -> Feed:
    """Return this rank's micro-batches from sample `start_sample` of the run on. Raises DataError when a shard has
    changed."""
    plan, limit_bytes = run.resolved.plan, cache_limit_bytes(run.config)
    shards: WindowReader = MixedShards(run.sets.locations, "train", limit_bytes)
    if run.sets.recipe is None:
        shards = TokenShards(run.sets.first, "train", cache_limit_bytes=limit_bytes)
    return Feed(
        shards,
        stream.order,
        FeedPlan(RankLayout(world.rank, world.ranks_per_node), plan.micro_batch_size, plan.gradient_accumulation_steps),
        start_sample=start_sample,
        num_workers=run.config.num_workers,
        pin_memory=is_gpu(),
    )


def _decide_compilation(run: PreparedRun, world: World, state: RunState | None) -> Compilation:
    """The main rank's GPU counts, for ZeRO-3 gathers the weights of compiled blocks in other portions. Collective."""
    steps_left = run.resolved.total_steps - (state.step if state else 0)
    return on_main_rank(
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


def _announce(live: LiveRun) -> None:
    """What is about to be trained, and what a continued run does differently."""
    run, report = live.run, live.report
    describe_run(live)
    report(estimate_line(live.estimate, device_memory_bytes()))
    if live.state:
        for line in (*change_lines(live.state, run, hyperparameters(run)), *finished_lines(live.state, run)):
            report(line)


def _begin(live: LiveRun, stop: StopRequest, announcer: Announcer) -> Session:
    """Everything is there: what happens at steps may begin. Collective."""
    announcer.begin("preparing what happens at steps", after_s=REPEAT_S)
    with live.meter.pause("starting"):
        _announce(live)
        actions = build_actions(live, stop)
        session = Session(live, stop, actions, SaveCheckpoints(live, actions))
        for action in actions:
            action.begin(live.first_step)
    if live.first_step < live.run.resolved.total_steps:
        announcer.begin(f"{'compiling the blocks and ' if live.compiler else ''}taking the first step")
    return session


def report_on_main(world: World, announcer: Announcer) -> Callable[[str], None]:
    """Return what prints a line on stdout from the main rank, in the place of what is announced, and wraps it."""

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
    """The checkpoint that fills the engine; None for a run that begins from nothing."""
    if point is not None:
        return point.folder
    return (
        None if config.init_from is None or is_published(config.init_from) else find_checkpoint(Path(config.init_from))
    )


def _clean(run_folder: Path, report: Callable[[str], None]) -> None:
    for line in remove_leftovers(run_folder):
        report(line)


def _start_trackers(run: PreparedRun, world: World, state: RunState | None) -> StartedTrackers:
    """On the main rank, those asked for. Collective."""

    def start() -> StartedTrackers:
        return start_trackers(
            run.config,
            lambda: as_plain(run.config) | run.resolved.as_dict(),
            first_step=state.step if state else 0,
            wandb_run_id=state.wandb_run_id if state else None,
        )

    return together(world.control, lambda: start() if world.is_main else StartedTrackers())


def _open_log(
    run: PreparedRun, meter: StepMeter, trackers: StartedTrackers, claim: RunFolderClaim, stop: StopRequest
) -> MetricsLog:
    """With the display of its steps, which is closed however the process ends."""
    display = _open_display(run, meter)
    stop.before_sudden_end.append(display.close)
    stop.before_early_end.insert(0, display.close)
    return MetricsLog(run.config.run, run.resolved.total_steps, trackers.trackers, display, check=claim.check)


def _open_display(run: PreparedRun, meter: StepMeter) -> Display:
    resolved, ranks = run.resolved, run.resolved.plan.ranks.world_size
    words = [run.config.run.name, run.config.model, f"ZeRO-{resolved.zero_stage}", resolved.precision]
    title = " · ".join([*words, f"{ranks} rank{'s' if ranks > 1 else ''}"])
    return open_display(title, resolved.total_steps, meter, plain=run.config.plain, variables=os.environ)
