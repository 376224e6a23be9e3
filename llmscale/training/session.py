"""One process's part of a training run, from the first step of this start to the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from llmscale.data.loader import MicroBatch
from llmscale.data.sample_log import ids_checksum
from llmscale.engine.collectives import StepVote, gather, vote
from llmscale.engine.deepspeed_engine import set_learning_rate
from llmscale.engine.process_group import leave_world
from llmscale.engine.train_step import explain_smallest_scale, seed_step, train_step
from llmscale.errors import DataError
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.actions.log_steps import LogSteps
from llmscale.training.actions.save_checkpoints import SaveCheckpoints
from llmscale.training.failure import record_failure
from llmscale.training.live_run import LiveRun
from llmscale.training.stop_request import StopRequest
from llmscale.training.watch_spikes import checkpoint_before, how_to_go_back


@dataclass
class Session:
    """Everything the loop of train.py works with. Every rank calls every method at the same step."""

    live: LiveRun
    stop: StopRequest
    actions: Sequence[StepAction]
    """What may be due after a step, in order; checkpoints come last."""
    checkpoints: SaveCheckpoints

    def __post_init__(self) -> None:
        self.step = self.live.first_step
        """Optimizer steps done."""
        self._ids_checksum = 0
        self._fetch_failure: Exception | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not self.stop.ends_early and self.live.claim.find_loss() is None:
            record_failure(self.live.run.config.run, error, step=self.step, rank=self.live.world.rank)
        self.live.feed.close()
        for action in self.actions:
            action.close()
        if self.live.log:
            self.live.log.close()
        self.live.claim.close()
        if kind is None:
            leave_world()

    def continue_with(self, live: LiveRun, actions: Sequence[StepAction], checkpoints: SaveCheckpoints) -> None:
        """The same session at another place of the run. Collective."""
        for action in self.actions:
            action.close()
        self.live, self.actions, self.checkpoints, self.step = live, actions, checkpoints, live.first_step
        for action in actions:
            action.begin(self.step)

    def fetch(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step. Whatever fails is kept for `vote`, where every rank hears of it."""
        live = self.live
        live.meter.phases.mark("data_wait")
        try:
            batches = [next(live.feed) for _ in range(live.run.resolved.plan.gradient_accumulation_steps)]
        except Exception as error:
            self._fetch_failure = error
            return []
        finally:
            live.meter.phases.mark("other")
        check_every = live.run.config.check_every
        due = check_every > 0 and (step - live.first_step) % check_every == 0
        self._ids_checksum = ids_checksum(torch.cat([batch.sample_ids for batch in batches]).numpy()) if due else 0
        return batches

    def agree(self, step: int) -> StepVote:
        """Decide with all ranks whether to stop or save before this step, and that all have their data."""
        decision = vote(
            self.live.world.control,
            stop=bool(self.stop.received),
            save=self.checkpoints.due_by_clock(),
            rollback=self.live.spikes.go_back_from is not None,
            ids_checksum=self._ids_checksum,
            failure=self._fetch_failure,
        )
        if self._ids_checksum:
            self._check_ids(step, decision.ids_sum)
        return decision

    def agree_at_the_end(self) -> bool:
        """Whether the run is to go back from its last step, after which no other one asks. Collective."""
        wanted = self.live.spikes.go_back_from is not None
        decision = vote(self.live.world.control, stop=bool(self.stop.received), rollback=wanted)
        return decision.rollback and not decision.stop

    def train(self, step: int, batches: list[MicroBatch]) -> DoneStep:
        """One optimizer step."""
        live, engine = self.live, self.live.engine
        seed_step(live.run.config.seed, step, live.world.rank)
        resolved = live.run.resolved
        set_learning_rate(engine, resolved.optimizer, resolved.schedule.learning_rate(step))
        skipped_before = engine.skipped_steps
        with explain_smallest_scale(step):
            loss = train_step(engine, [batch.tokens for batch in batches], live.world.device, live.meter.phases)
        self.step = step + 1
        live.meter.count_step()
        live.recent.losses.append(loss)
        live.recent.norms.append(engine.get_global_grad_norm())
        return DoneStep(self.step, batches, loss, engine.skipped_steps > skipped_before)

    def after(self, done: DoneStep) -> None:
        """Whatever is due at the end of a step: log, validate, sample, save."""
        for action in (*self.actions, self.checkpoints):
            if action.due(done.step):
                action.act(done)

    def log_last(self) -> None:
        """Log the last step before a stop, so that what is printed next is about the same step. Collective."""
        losses = self.live.recent.losses
        for log in [action for action in self.actions if isinstance(action, LogSteps) and losses]:
            log.act(DoneStep(self.step, [], losses[-1], False))

    def save(self) -> None:
        """A checkpoint between two steps; nothing when this step is saved already."""
        self.checkpoints.save(self.step)

    def finish(self) -> None:
        """Save what is not saved yet, and wait until it is on disk. Raises CheckpointError when it cannot be."""
        live, total = self.live, self.live.run.resolved.total_steps
        if live.log:
            live.log.display.close()
        if self.step > live.first_step:
            self.checkpoints.finish(self.step)
        why = "finished" if self.step >= total else f"stopped by {self._reason()}"
        if spike := live.spikes.go_back_from:
            live.report(f"--on-spike skip did not go back from the loss spike at step {spike[0]}, for the run stops:")
            live.report(how_to_go_back(live, checkpoint_before(live, spike[0]), spike))
        live.report(f"{why} at step {self.step} of {total}; run folder: {live.run.config.run}")
        if live.log:
            live.log.log_event(why.split()[0], step=self.step, reason=why)

    def _reason(self) -> str:
        """Why the ranks agreed to stop: the main rank's reason, or whose it was. Collective."""
        reasons = gather(self.live.world.control, next(iter(self.stop.received), None))
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
        return f"{reason} on rank {rank}" if rank else reason

    def _check_ids(self, step: int, ids_sum: int) -> None:
        """The ranks' samples together must be exactly the global batch that the order gives for this step."""
        positions = np.arange(self.live.samples_seen(step), self.live.samples_seen(step + 1), dtype=np.int64)
        expected = ids_checksum(self.live.feed.order.sample_ids(positions))
        if ids_sum != expected % 2**62:
            raise DataError(
                f"step {step}: the samples that the ranks hold are not the global batch of this step. Do all nodes "
                "have the same data set and the same version of llmscale?"
            )
