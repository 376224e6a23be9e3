"""One process's part of a training run, from the first step of this start to the last, and its rollbacks.

Checkpoints: every --save-every steps, by the clock, and at the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
import torch

from llmscale.checkpoint.manifest import Checkpoint
from llmscale.checkpoint.run_state import RunState
from llmscale.checkpoint.save import CheckpointSaver, Snapshot, copy_out
from llmscale.checkpoint.tensor_files import engine_fragments
from llmscale.config.user_paths import shown
from llmscale.data.loader import Feed, FeedPlan, MicroBatch
from llmscale.data.mixture import MixedShards
from llmscale.data.order.permutation import ids_checksum
from llmscale.data.order.sample_order import RankLayout
from llmscale.data.shards.token_shards import TokenShards, WindowReader
from llmscale.data.validation import ValidationSplit, open_validation
from llmscale.engine.collectives import StepVote, gather, on_all_ranks, on_main_rank, vote
from llmscale.engine.deepspeed_engine import set_learning_rate
from llmscale.engine.loss_scale import explain_smallest_scale, get_scaler_state
from llmscale.engine.process_group import World, is_gpu, leave_world
from llmscale.engine.random_numbers import seed_step
from llmscale.engine.train_step import CountedTargets, set_micro_steps, train_step
from llmscale.engine.zero_shards import MASTER, group_scalars
from llmscale.errors import CheckpointError, DataError, LlmscaleError
from llmscale.training.inputs import as_plain
from llmscale.training.live_run import Engine, RecentSteps, Run, RunIO, StepAction, StepResult
from llmscale.training.log_steps import LogSteps, ReportPace, WatchStragglers
from llmscale.training.loss_spikes import (
    RollbackRequest,
    StopOnNonfinite,
    WatchSpikes,
    check_weights,
    checkpoint_before,
    rollback_advice,
    steps_to_skip,
)
from llmscale.training.reports import (
    CheckNumerics,
    EvaluateTasks,
    JudgeOverfit,
    ProfileSteps,
    ReportCompilation,
    ReportMemory,
    ReportStartup,
    SampleText,
    Validate,
)
from llmscale.training.resume import confirm_start, enter_history, load_checkpoint
from llmscale.training.run_folder import record_failure
from llmscale.training.sample_stream import cache_limit_bytes
from llmscale.training.start import Start, hyperparameters
from llmscale.training.stop_request import (
    EXIT_RESTART,
    StopOfRank,
    StopRequest,
    explain_lost_peer,
    is_left_by_others,
)
from llmscale.training.watchdog import Heartbeat

#: Rollbacks of one start; a run that needs more has another problem than a batch.
_MAX_ROLLBACKS = 5


@dataclass
class Session:
    """The operations of train.py's loop. Every rank calls every method at the same step."""

    run: Run
    engine: Engine
    io: RunIO
    rollback: RollbackRequest
    stop: StopRequest
    actions: Sequence[StepAction]
    """Actions that may be due after a step, in order; checkpoints come last."""
    checkpoints: SaveCheckpoints

    def __post_init__(self) -> None:
        self.step = self.run.first_step
        """Optimizer steps done."""
        self._ids_checksum = 0
        self._checks_ids = False
        self._log = _log_of(self.actions)
        self._num_targets = 0
        """Targets of the step: of this rank before `decide`, of the global batch after it."""
        self._fetch_failure: Exception | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lost = None
        if error is not None and not self.stop.ends_early:
            # Now: whoever ends later is not to blame.
            if isinstance(error, LlmscaleError):
                lost = None
            else:
                lost = explain_lost_peer(error)
            record_failure(self.run.config.run, lost or error, step=self.step, rank=self.run.world.rank)
        self.engine.feed.close()
        for action in self.actions:
            action.close()
        if self.io.log:
            self.io.log.close()
        self.io.claim.close()
        if kind is None:
            leave_world()
        if lost is not None:
            raise lost from error

    def continue_from(
        self, run: Run, engine: Engine, actions: Sequence[StepAction], checkpoints: SaveCheckpoints
    ) -> None:
        """Continue at another step of the run. Collective."""
        for action in self.actions:
            action.close()
        self.run = run
        self.engine = engine
        self.actions = actions
        self.checkpoints = checkpoints
        self._log = _log_of(actions)
        self.step = run.first_step
        for action in actions:
            action.begin(self.step)

    def fetch(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step. A failure waits for `decide`, which tells every rank."""
        run = self.run
        engine = self.engine
        engine.meter.phases.mark("data_wait")
        try:
            batches = [next(engine.feed) for _ in range(run.micro_steps(step))]
        except Exception as error:
            self._fetch_failure = error
            return []
        finally:
            engine.meter.phases.mark("other")
        check_every = run.config.check_every
        self._checks_ids = check_every > 0 and (step - run.first_step) % check_every == 0
        # Ranks that divide sequences have the same ones.
        is_first = run.resolved.plan.ranks.is_first(run.world.rank)
        counts = is_first and self._checks_ids
        if counts:
            self._ids_checksum = ids_checksum(torch.cat([batch.sample_ids for batch in batches]).numpy())
        else:
            self._ids_checksum = 0
        if is_first and engine.feed.has_mask:
            self._num_targets = sum(batch.num_targets for batch in batches)
        else:
            self._num_targets = 0
        return batches

    def decide(self, step: int) -> StepVote:
        """Vote on whether to stop, save or roll back before this step, and check that all ranks have their data.

        Collective.
        """
        decision = vote(
            self.run.world.control,
            stop=bool(self.stop.received),
            save=self.checkpoints.due_by_clock(),
            rollback=self.rollback.rollback_from is not None,
            log=self._log is not None and self._log.due_by_clock(),
            ids_checksum=self._ids_checksum,
            targets=self._num_targets,
            failure=self._fetch_failure,
        )
        if self._log is not None and decision.log:
            self._log.add(step + 1)
        if self._checks_ids:
            self._check_ids(step, decision.ids_sum)
        self._num_targets = decision.targets
        return decision

    def rolls_back_at_end(self) -> bool:
        """Vote on whether to roll back from the last step. Collective."""
        wanted = self.rollback.rollback_from is not None
        decision = vote(self.run.world.control, stop=bool(self.stop.received), rollback=wanted)
        return decision.rollback and not decision.stop

    def train(self, step: int, batches: list[MicroBatch], weights: Sequence[float] | None = None) -> StepResult:
        """Run one optimizer step, with other `weights` of the micro-batches' losses than the step's, if given."""
        run = self.run
        engine = self.engine
        deepspeed = self.engine.deepspeed
        resolved = run.resolved
        counted = None
        if engine.feed.has_mask:
            num_samples = run.batch_size(step)
            num_targets = self._num_targets
            if weights is not None:  # of a part of the batch, in one process
                num_samples = sum(len(batch.sample_ids) for batch in batches)
                num_targets = sum(batch.num_targets for batch in batches)
            scale = num_samples * resolved.plan.seq_len / max(num_targets, 1)
            counted = CountedTargets([batch.is_target for batch in batches], scale)
        seed_step(run.config.seed, step, run.world.rank)
        set_learning_rate(deepspeed, resolved.optimizer, resolved.schedule.learning_rate(step))
        set_micro_steps(deepspeed, len(batches))
        skipped_before = deepspeed.skipped_steps
        with explain_smallest_scale(step):
            tokens = [batch.tokens for batch in batches]
            timer = engine.meter.phases
            if run.resolved.plan.lengths is None:
                seq_len = None
            else:
                seq_len = run.seq_len(step)
            if weights is None:
                weight = run.loss_weight(step)
                weights = [0.0 if batch.is_filler else weight for batch in batches]
            loss = train_step(deepspeed, tokens, run.world.device, timer, seq_len, weights, counted)
        self.step = step + 1
        engine.meter.count_step()
        engine.recent.losses.append(loss)
        norm = deepspeed.get_global_grad_norm()
        engine.recent.norms.append(norm)
        return StepResult(self.step, batches, loss, deepspeed.skipped_steps > skipped_before, norm)

    def run_actions(self, result: StepResult) -> None:
        """Run everything that is due after a step: log, validate, sample, save."""
        for action in (*self.actions, self.checkpoints):
            if action.due(result.step):
                action.run(result)

    def log_last(self) -> None:
        """Log the last step before a stop, so that the lines that follow are about the same step. Collective."""
        losses = self.engine.recent.losses
        if self._log is not None and losses:
            self._log.run(StepResult(self.step, [], losses[-1], False))

    def save(self) -> None:
        """Save a checkpoint between two steps, unless this step is saved."""
        self.checkpoints.save(self.step)

    def finish(self) -> int:
        """Save the last step unless it is saved, wait until it is on disk, and return the exit status.

        Collective. Raises CheckpointError on failure.
        """
        run = self.run
        io = self.io
        total = self.run.resolved.total_steps
        if io.log:
            io.log.close_view()
        if self.step > run.first_step and run.config.overfit_batch is None:
            self.checkpoints.finish(self.step)
        if io.publisher:
            io.publisher.finish()
        if self.step >= total:
            reasons = []
        else:
            reasons = gather(run.world.control, self.stop.of_this_rank())
        if reasons:
            why = f"stopped by {_first_reason(reasons)}"
        else:
            why = "finished"
        if spike := self.rollback.rollback_from:
            io.report(f"--on-spike skip did not go back from the loss spike at step {spike[0]}: the run stops")
            io.report(rollback_advice(run, checkpoint_before(run, spike[0]), spike))
        io.report(f"{why} at step {self.step} of {total}; run folder: {shown(run.config.run)}")
        io.log_event(why.split()[0], step=self.step, reason=why)
        return EXIT_RESTART if reasons and is_left_by_others(reasons, os.environ) else 0

    def _check_ids(self, step: int, ids_sum: int) -> None:
        """Raise DataError unless the ranks' samples are exactly the global batch that the order gives this step."""
        positions = np.arange(self.run.samples_seen(step), self.run.samples_seen(step + 1), dtype=np.int64)
        expected = ids_checksum(self.engine.feed.order.sample_ids(positions))
        if ids_sum != expected % 2**62:
            raise DataError(
                f"step {step}: the samples that the ranks hold are not the global batch of this step. Do all nodes "
                "have the same dataset and the same version of llmscale?"
            )


def _log_of(actions: Sequence[StepAction]) -> LogSteps | None:
    return next((action for action in actions if isinstance(action, LogSteps)), None)


def _first_reason(stops: Sequence[StopOfRank]) -> str:
    """Return why the ranks stop: rank 0's reason, or the first rank's that has one."""
    rank, reason = next((rank, stop.reason) for rank, stop in enumerate(stops) if stop.reason is not None)
    return f"{reason} on rank {rank}" if rank else reason


def build_actions(
    run: Run, engine: Engine, io: RunIO, rollback: RollbackRequest, stop: StopRequest
) -> tuple[list[StepAction], SaveCheckpoints]:
    """Return the actions of a run in their order at one step, and the checkpoints, which come last. Collective."""
    config = run.config
    world = run.world
    if world.is_main:
        watchers = [WatchSpikes(run, io, rollback, stop).check]
    else:
        watchers = []
    watchers += [WatchStragglers(world, io.log, io.report).check] if world.world_size > 1 else []
    log = LogSteps(run, engine, io, watchers)
    actions: list[StepAction] = []
    if config.profile:
        actions.append(ProfileSteps(run, engine, io, is_rollback=rollback.num_rollbacks > 0))
    if config.check_numerics and not rollback.num_rollbacks:
        actions.append(CheckNumerics(run, engine, io))
    actions += [ReportStartup(run, engine, io)]
    if engine.compiler is not None:
        actions.append(ReportCompilation(run, engine, io))
    actions += [ReportMemory(run, engine, io), log, StopOnNonfinite(run, engine, io, judges_at=log.due)]
    if world.is_main:
        actions.append(ReportPace(run, engine, io))
    if config.overfit_batch is not None:
        actions.append(JudgeOverfit(run, engine, io))
    if run.validation:
        actions.append(Validate(run, engine, io))
    if run.start.tasks:
        actions.append(EvaluateTasks(run, engine, io))
    if config.sample_every or config.eval_every:
        actions.append(SampleText(run, engine, io))
    return actions, SaveCheckpoints(run, engine, io, rollback, actions)


def open_data(start: Start, world: World) -> Feed:
    """Return the feed at the run's position. Collective."""
    start_sample = start.state.samples_seen if start.state else 0
    return on_all_ranks(world.control, lambda: open_feed(start, world, start_sample=start_sample))


def open_validation_splits(start: Start, world: World) -> tuple[ValidationSplit, ...]:
    """Return the validation splits; none without validation. Collective."""
    if not start.config.val_every:
        return ()
    sets = start.sets.as_recorded(start.stream.identity)
    config = start.config
    return on_all_ranks(
        world.control, lambda: open_validation(sets, config.val_samples, document_mask=config.document_mask)
    )


def open_feed(start: Start, world: World, *, start_sample: int) -> Feed:
    """Return this rank's micro-batches from sample `start_sample` on, those of all ranks that divide its sequences.

    Raises DataError if a shard has changed.
    """
    plan = start.resolved.plan
    limit_bytes = cache_limit_bytes(start.config)
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
    began = time.perf_counter()
    run = session.run
    engine = session.engine
    io = session.io
    rollback = session.rollback
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
    start = replace(run.start, config=config)
    io.report(f"going back from step {session.step} to {before.path.name}; the batches of steps {skipped} are left out")
    try:
        start = confirm_start(start, run.world, io.report, at=before.path)
    except CheckpointError as error:
        return _stop_at_spike(session, before, spike, str(error))
    assert start.source is not None and start.state is not None
    engine.feed.close()
    feed = open_data(start, run.world)
    validation = open_validation_splits(start, run.world)
    load_checkpoint(engine.deepspeed, start.source, run.world, engine.configured_scaler)
    engine.deepspeed.skipped_steps = 0
    history = enter_history(start, run.world, io.report)
    io.log_event("go_back", step=session.step, to_step=start.state.step, spike=spike[0], skip_steps=skipped)
    if io.log:
        io.log.roll_back(start.state.step)
    rollback.num_rollbacks += 1
    seconds = {"going back": time.perf_counter() - began}
    run = Run(replace(start, listing=None), run.world, validation, history, run.estimate, seconds)
    recent = RecentSteps(run.world)
    engine = replace(engine, feed=feed, recent=recent, skipped_before=start.state.skipped_steps)
    session.continue_from(run, engine, *build_actions(run, engine, io, rollback, session.stop))
    return True


def _stop_at_spike(session: Session, before: Checkpoint | None, spike: tuple[int, int], problem: str) -> bool:
    if session.run.world.is_main:
        session.stop.received.append(f"--on-spike skip, which cannot go back from step {spike[0]}: {problem}")
        session.io.report(rollback_advice(session.run, before, spike))
    return False


class SaveCheckpoints(StepAction):
    """Copies the state at a step and writes it in the background."""

    def __init__(
        self, run: Run, engine: Engine, io: RunIO, rollback: RollbackRequest, others: Sequence[StepAction]
    ) -> None:
        """One of the `others` may validate."""
        super().__init__(run, engine, io)
        self._others = others
        config = run.config
        self._saver = CheckpointSaver(
            config.run,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            in_background=config.async_save,
            report=io.report,
            disks=run.world.disks,
            history=run.history,
            check_run_folder=io.claim.check,
            on_saved=io.publisher.saved if io.publisher else lambda folder: None,
        )
        rollback.finish_saving = self._saver.wait
        self._identity = run.start.identity
        self._hyperparameters = hyperparameters(run.start)
        self._saved_step: int | None = run.first_step or None
        self._last_save_s = time.monotonic()

    def due(self, step: int) -> bool:
        every = self._run.config.save_every
        return every > 0 and step % every == 0

    def due_by_clock(self) -> bool:
        """Return whether --save-every-minutes have passed on rank 0, whose clock counts."""
        seconds = 60 * self._run.config.minutes_between_saves
        return self._run.world.is_main and seconds > 0 and time.monotonic() - self._last_save_s > seconds

    def run(self, result: StepResult) -> None:
        self.save(result.step)

    def save(self, step: int) -> None:
        """Copy the state and write it in the background, unless this step is saved."""
        run = self._run
        engine = self._engine
        with engine.meter.pause("saving"):
            self._saver.wait()
            if self._saved_step == step:
                return
            fragments = engine_fragments(engine.deepspeed, with_frozen=not run.resolved.shape.lora_rank)
            weights = (fragment.local for key, fragment in fragments.items() if key.startswith(f"{MASTER}/"))
            check_weights(weights, run.world.control, step, run.config.run)
            snapshot = Snapshot(
                step=step,
                tokens_seen=run.tokens_seen(step),
                zero_stage=run.resolved.zero_stage,
                precision=run.resolved.precision,
                state=self._run_state(step).as_dict(),
                fragments=copy_out(fragments),
                validation=next((other.after(step) for other in self._others if isinstance(other, Validate)), None),
            )
            self._saver.save(snapshot)
        self._saved_step = step
        self._last_save_s = time.monotonic()

    def finish(self, step: int) -> None:
        """Save the last step unless it is saved, and wait until it is on disk. Raises CheckpointError on failure."""
        self.save(step)
        self._saver.wait()
        if self._saver.last_saved_step != step:
            raise CheckpointError(
                f"training ended at step {step} of {self._run.resolved.total_steps}, but its last checkpoint "
                "could not be saved (see the warning above). Make room or mend the folder, and start again to repeat "
                "the steps since the last one."
            )

    def _run_state(self, step: int) -> RunState:
        run = self._run
        engine = self._engine
        return RunState(
            step=step,
            samples_seen=run.samples_seen(step),
            tokens_seen=run.tokens_seen(step),
            skipped_steps=engine.skipped_steps,
            identity=self._identity,
            precision=run.resolved.precision,
            optimizer_scalars=group_scalars(engine.deepspeed),
            loss_scaler=get_scaler_state(engine.deepspeed),
            wandb_run_id=self._io.wandb_run_id,
            config=as_plain(run.config),
            hyperparameters=self._hyperparameters,
            base=run.start.base.as_dict() if run.start.base else {},
        )
