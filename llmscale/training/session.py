"""One process's part of a training run, from the first step of this start to the last."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from llmscale.config.run_urls import shown
from llmscale.data.loader import MicroBatch
from llmscale.data.order.permutation import ids_checksum
from llmscale.engine.collectives import StepVote, gather, vote
from llmscale.engine.deepspeed_engine import set_learning_rate
from llmscale.engine.process_group import leave_world
from llmscale.engine.train_step import explain_smallest_scale, seed_step, set_micro_steps, train_step
from llmscale.errors import DataError, LlmscaleError
from llmscale.training.live_run import Engine, Run, RunIO, StepAction, StepResult
from llmscale.training.log_steps import LogSteps
from llmscale.training.loss_spikes import RollbackRequest, checkpoint_before, rollback_advice
from llmscale.training.lost_peer import explain_lost_peer
from llmscale.training.run_folder import record_failure
from llmscale.training.save_checkpoints import SaveCheckpoints
from llmscale.training.stop_request import EXIT_RESTART, StopOfRank, StopRequest, is_left_by_others


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
        self._ids_checksum, self._checks_ids = 0, False
        self._fetch_failure: Exception | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lost = None
        if error is not None and not self.stop.ends_early:
            # Now: whoever ends later is not to blame.
            lost = None if isinstance(error, LlmscaleError) else explain_lost_peer(error)
            if self.io.claim.find_loss() is None:
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
        self.run, self.engine, self.actions, self.checkpoints = run, engine, actions, checkpoints
        self.step = run.first_step
        for action in actions:
            action.begin(self.step)

    def fetch(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step. A failure waits for `decide`, which tells every rank."""
        run, engine = self.run, self.engine
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
        counts = self._checks_ids and run.resolved.plan.ranks.is_first(run.world.rank)
        self._ids_checksum = ids_checksum(torch.cat([batch.sample_ids for batch in batches]).numpy()) if counts else 0
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
            ids_checksum=self._ids_checksum,
            failure=self._fetch_failure,
        )
        if self._checks_ids:
            self._check_ids(step, decision.ids_sum)
        return decision

    def rolls_back_at_end(self) -> bool:
        """Vote on whether to roll back from the last step. Collective."""
        wanted = self.rollback.rollback_from is not None
        decision = vote(self.run.world.control, stop=bool(self.stop.received), rollback=wanted)
        return decision.rollback and not decision.stop

    def train(self, step: int, batches: list[MicroBatch]) -> StepResult:
        """Run one optimizer step."""
        run, engine, deepspeed = self.run, self.engine, self.engine.deepspeed
        resolved = run.resolved
        seed_step(run.config.seed, step, run.world.rank)
        set_learning_rate(deepspeed, resolved.optimizer, resolved.schedule.learning_rate(step))
        set_micro_steps(deepspeed, len(batches))
        skipped_before = deepspeed.skipped_steps
        with explain_smallest_scale(step):
            tokens, timer = [batch.tokens for batch in batches], engine.meter.phases
            seq_len = None if run.resolved.plan.lengths is None else run.seq_len(step)
            weights = [0.0 if batch.is_filler else run.loss_weight(step) for batch in batches]
            loss = train_step(deepspeed, tokens, run.world.device, timer, seq_len, weights)
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
        for log in [action for action in self.actions if isinstance(action, LogSteps) and losses]:
            log.run(StepResult(self.step, [], losses[-1], False))

    def save(self) -> None:
        """Save a checkpoint between two steps, unless this step is saved."""
        self.checkpoints.save(self.step)

    def finish(self) -> int:
        """Save the last step unless it is saved, wait until it is on disk, and return the exit status.

        Collective. Raises CheckpointError on failure.
        """
        run, io, total = self.run, self.io, self.run.resolved.total_steps
        if io.log:
            io.log.display.close()
        if self.step > run.first_step and run.config.overfit_batch is None:
            self.checkpoints.finish(self.step)
        if io.publisher:
            io.publisher.finish()
        reasons = [] if self.step >= total else gather(run.world.control, self.stop.of_this_rank())
        why = f"stopped by {_first_reason(reasons)}" if reasons else "finished"
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


def _first_reason(stops: Sequence[StopOfRank]) -> str:
    """Return why the ranks stop: rank 0's reason, or the first rank's that has one."""
    rank, reason = next((rank, stop.reason) for rank, stop in enumerate(stops) if stop.reason is not None)
    return f"{reason} on rank {rank}" if rank else reason
