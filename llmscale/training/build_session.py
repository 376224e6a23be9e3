"""From a prepared run to a session that can train: join the ranks, build the engine, find the place to begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from llmscale.checkpoint.load import load_engine, load_weights
from llmscale.checkpoint.locate import find_checkpoint
from llmscale.checkpoint.manifest import History
from llmscale.checkpoint.retention import remove_leftovers
from llmscale.checkpoint.run_state import RunState
from llmscale.checkpoint.save import CheckpointSaver
from llmscale.config.run_config import RunConfig
from llmscale.data.sample_log import SampleRecorder, next_session
from llmscale.data.tokenizers.tokenizer import load_set_tokenizer
from llmscale.engine.collectives import on_main_rank, together
from llmscale.engine.deepspeed_engine import build_engine, check_precision
from llmscale.engine.loss_scaling import set_scaler_state
from llmscale.engine.process_group import World, is_gpu, join_world
from llmscale.evaluate.text import generate_text
from llmscale.training.changes import change_lines, finished_lines, hyperparameters
from llmscale.training.memory_report import estimate_line, estimate_run
from llmscale.training.metrics import MetricsLog
from llmscale.training.rank_fingerprint import check_one_run_folder, check_ranks_agree, check_same_checkpoint
from llmscale.training.resume import ResumePoint, enter_history, find_named_checkpoint, find_resume_point
from llmscale.training.run_claim import RunFolderClaim
from llmscale.training.run_data import open_feed, open_validation, run_order
from llmscale.training.run_folder import CONFIG_NAME, save_run_description
from llmscale.training.run_inputs import PreparedRun, as_plain
from llmscale.training.session import Session, report_on_main
from llmscale.training.startup_summary import describe_run
from llmscale.training.stop_request import StopRequest
from llmscale.training.throughput import device_memory_bytes
from llmscale.training.wandb_run import WandbLog, start_wandb

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from wandb.sdk.wandb_run import Run

#: Tokens per sample printed during training.
SAMPLE_TOKENS = 48


@dataclass
class StartupClock:
    """Seconds per phase of the start."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


def open_session(run: PreparedRun, stop: StopRequest, began: float) -> Session:
    """Everything up to the first step. Collective. Raises LlmscaleError on every rank when it cannot start on one."""
    claim = RunFolderClaim(run.config.run)
    stop.before_early_end.append(claim.give_up)
    try:
        return _open_session(run, stop, began, claim)
    except BaseException:
        claim.give_up()
        raise


def _open_session(run: PreparedRun, stop: StopRequest, began: float, claim: RunFolderClaim) -> Session:
    clock = StartupClock({"checks and imports": time.perf_counter() - began})
    run = run if is_gpu() else run.on_cpu()
    config = run.config
    with clock.phase("ranks"):
        world = join_world()
        report = report_on_main(world)
        together(world.control, lambda: check_precision(run.resolved.precision))
        check_ranks_agree(run, world)
        on_main_rank(world.control, claim.take)
        check_one_run_folder(claim, world)
    with clock.phase("checkpoint check"):
        point = find_resume_point(config, lambda saved: run_identity(run, saved), world.control, report)
        source = together(world.control, lambda: _source_of_weights(config, point))
        check_same_checkpoint(source, world)
        on_main_rank(world.control, lambda: _clean(config.run, report))
    state = point.state if point else None
    first_step, first_sample = (state.step, state.samples_seen) if state else (0, 0)
    saved_order = state.saved_order if state else None
    with clock.phase("data"):
        # Before the engine: the feed's workers are forked while this process is still small, and read ahead meanwhile.
        feed = together(
            world.control, lambda: open_feed(run, world, start_sample=first_sample, saved_order=saved_order)
        )
        validation_shards = together(world.control, lambda: open_validation(run))
    now = hyperparameters(run)
    estimate = estimate_run(run)
    with clock.phase("engine"):
        engine = build_engine(config, run.resolved)
    with clock.phase("checkpoint load"):
        _load(run, engine, point, world, report)
    wandb_run = _start_wandb(run, world, state)
    history = enter_history(config.run, point, world.control, report)
    on_main_rank(world.control, lambda: claim.describe(lambda: _describe(run, is_new=point is None)))
    describe_run(run, world, feed.order.num_samples, report)
    report(estimate_line(estimate, device_memory_bytes()))
    if state:
        for line in (*change_lines(state, run, now), *finished_lines(state, run)):
            report(line)
    return Session(
        run=run,
        world=world,
        engine=engine,
        feed=feed,
        validation_shards=validation_shards,
        saver=_saver(run, history, claim, report),
        open_recorder=lambda step: _recorder(run, world, claim, step),
        log=_metrics_log(run, wandb_run, claim) if world.is_main else None,
        stop=stop,
        first_step=first_step,
        first_sample=first_sample,
        skipped_before=state.skipped_steps if state else 0,
        identity=run_identity(run, saved_order),
        hyperparameters=now,
        estimate=estimate,
        wandb_run_id=wandb_run.id if wandb_run else (state.wandb_run_id if state else None),
        sample_text=_sampler(run, engine) if config.sample_every else None,
        report=report,
        startup_s=clock.seconds,
        claim=claim,
        history=history,
    )


def run_identity(run: PreparedRun, saved_order: Mapping[str, object] | None) -> dict[str, object]:
    """What a checkpoint of this run records as unchangeable."""
    order = run_order(run, saved_order)
    return run.identity(dict(order.identity(run.location.manifest.fingerprint)))


def _describe(run: PreparedRun, *, is_new: bool) -> None:
    folder = run.config.run
    is_new = is_new or not (folder / CONFIG_NAME).exists()
    save_run_description(folder, as_plain(run.config), run.resolved.as_dict(), run.resolved.ds_config, is_new=is_new)


def _saver(run: PreparedRun, history: History, claim: RunFolderClaim, report: Callable[[str], None]) -> CheckpointSaver:
    config = run.config
    return CheckpointSaver(
        config.run,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        in_background=config.async_save,
        report=report,
        history=history,
        check_run_folder=claim.check,
    )


def _source_of_weights(config: RunConfig, point: ResumePoint | None) -> Path | None:
    """The checkpoint that fills the engine; None for a run that begins from nothing."""
    if point is not None:
        return point.folder
    return None if config.init_from is None else find_checkpoint(config.init_from)


def _clean(run_folder: Path, report: Callable[[str], None]) -> None:
    for line in remove_leftovers(run_folder):
        report(line)


def _load(
    run: PreparedRun,
    engine: DeepSpeedEngine,
    point: ResumePoint | None,
    world: World,
    report: Callable[[str], None],
) -> None:
    """Fill the engine from the checkpoint, or from another run's weights."""
    if point is None:
        if run.config.init_from is not None:
            folder = find_named_checkpoint(run.config.init_from, "--init-from", world.control, report)
            load_weights(engine, folder, world.control)
            report(f"weights from {folder}; everything else starts at step 0")
        return
    load_engine(engine, point.folder, point.state, world.control)
    set_scaler_state(engine, point.state.loss_scaler)
    report(f"continuing from {point.folder}: step {point.state.step}, {point.state.tokens_seen:,} tokens seen")
    if point.state.precision != run.resolved.precision:
        report(
            f"precision changes from {point.state.precision} to {run.resolved.precision}: fp32 master weights and "
            "optimizer states are taken over exactly; a loss scaler, where there is one, starts from its configuration"
        )


def _start_wandb(run: PreparedRun, world: World, state: RunState | None) -> Run | None:
    config = run.config
    started: list[Run] = []
    if config.wandb:
        on_main_rank(
            world.control,
            lambda: started.append(
                start_wandb(
                    config.run,
                    project=config.wandb_project,
                    name=config.wandb_name or config.run.name,
                    config=as_plain(config) | run.resolved.as_dict(),
                    run_id=state.wandb_run_id if state else None,
                )
            ),
        )
    return started[0] if started else None


def _recorder(run: PreparedRun, world: World, claim: RunFolderClaim, first_step: int) -> SampleRecorder | None:
    """One session number for all ranks, chosen by the main rank."""
    if not run.config.record_samples:
        return None
    numbers = [next_session(run.config.run) if world.is_main else -1]
    dist.broadcast_object_list(numbers, src=0, group=world.control)
    place = {"session": numbers[0], "rank": world.rank, "world_size": world.world_size, "start_step": first_step}
    return together(world.control, lambda: SampleRecorder(run.config.run, **place, check=claim.check))


def _metrics_log(run: PreparedRun, wandb_run: Run | None, claim: RunFolderClaim) -> MetricsLog:
    wandb_log = WandbLog(wandb_run) if wandb_run else None
    return MetricsLog(run.config.run, run.resolved.total_steps, wandb_log, check=claim.check)


def _sampler(run: PreparedRun, engine: DeepSpeedEngine) -> Callable[[], str]:
    """Generates on every rank alike, because ZeRO-3 gathers weights in every forward pass."""
    tokenizer = load_set_tokenizer(run.location.folder, run.location.manifest)
    prompt = run.config.sample_prompt

    def generate() -> str:
        pieces = generate_text(
            engine.module,
            tokenizer,
            prompt,
            max_new_tokens=SAMPLE_TOKENS,
            temperature=0.8,
            top_k=50,
            top_p=None,
            seed=run.config.seed,
        )
        return prompt + "".join(pieces)

    return generate
