"""Checkpoints: every --save-every steps, by the clock, and at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from llmscale.checkpoint.run_state import RunState
from llmscale.checkpoint.save import CheckpointSaver, Snapshot, copy_out
from llmscale.checkpoint.tensor_files import engine_fragments
from llmscale.engine.collectives import on_main_rank
from llmscale.engine.train_step import get_scaler_state
from llmscale.engine.zero_shards import MASTER, group_scalars
from llmscale.errors import CheckpointError
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.actions.nonfinite_guard import check_weights
from llmscale.training.changes import hyperparameters
from llmscale.training.live_run import LiveRun
from llmscale.training.run_inputs import as_plain


class SaveCheckpoints(StepAction):
    """Copies the state out at a step and writes it in the background."""

    def __init__(self, live: LiveRun, others: Sequence[StepAction]) -> None:
        """`others` begin again in a run folder that had to be made again."""
        self._live, self._others = live, others
        config = live.run.config
        self._saver = CheckpointSaver(
            config.run,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            in_background=config.async_save,
            report=live.report,
            history=live.history,
            check_run_folder=live.claim.check,
        )
        live.spikes.finish_saving = self._saver.wait
        self._identity = live.run.identity(live.stream.identity)
        self._hyperparameters = hyperparameters(live.run)
        self._saved_step: int | None = live.first_step or None
        self._last_save_s = time.monotonic()

    def due(self, step: int) -> bool:
        every = self._live.run.config.save_every
        return every > 0 and step % every == 0

    def due_by_clock(self) -> bool:
        """Whether --save-every-minutes have passed on the main rank, whose clock counts."""
        minutes = self._live.run.config.save_every_minutes
        return self._live.world.is_main and minutes is not None and time.monotonic() - self._last_save_s > minutes * 60

    def act(self, done: DoneStep) -> None:
        self.save(done.step)

    def save(self, step: int) -> None:
        """Copy the state out and write it in the background; nothing when this step is saved already."""
        live = self._live
        with live.meter.pause("saving"):
            self._saver.wait()
            self._keep_run_folder(step)
            if self._saved_step == step:
                return
            fragments = engine_fragments(live.engine)
            weights = (fragment.local for key, fragment in fragments.items() if key.startswith(f"{MASTER}/"))
            check_weights(weights, live.world.control, step, live.run.config.run)
            snapshot = Snapshot(
                step=step,
                tokens_seen=live.tokens_seen(step),
                zero_stage=live.run.resolved.zero_stage,
                precision=live.run.resolved.precision,
                state=self._run_state(step).as_dict(),
                fragments=copy_out(fragments),
            )
            self._saver.save(snapshot)
        self._saved_step, self._last_save_s = step, time.monotonic()

    def finish(self, step: int) -> None:
        """Save the last step if it is not saved, and wait until it is on disk. Raises CheckpointError when it cannot
        be."""
        # Twice: the second does nothing, unless the run folder was removed during the first.
        for _ in range(2):
            self.save(step)
            self._saver.wait()
        if self._saver.last_saved_step != step:
            raise CheckpointError(
                f"training ended at step {step} of {self._live.run.resolved.total_steps}, but its last checkpoint "
                "could not be saved (see the warning above). Make room or mend the folder, and start again to repeat "
                "the steps since the last one."
            )

    def _keep_run_folder(self, step: int) -> None:
        """Where the run folder is gone, begin it again, as a whole: what is saved next must be a run. Collective."""
        claim, report = self._live.claim, self._live.report
        if not on_main_rank(self._live.world.control, lambda: claim.renew(report)):
            return
        self._saved_step = None
        for action in self._others:
            action.begin(step)

    def _run_state(self, step: int) -> RunState:
        live, run = self._live, self._live.run
        return RunState(
            step=step,
            samples_seen=live.samples_seen(step),
            tokens_seen=live.tokens_seen(step),
            skipped_steps=live.skipped_steps,
            identity=self._identity,
            precision=run.resolved.precision,
            optimizer_scalars=group_scalars(live.engine),
            loss_scaler=get_scaler_state(live.engine),
            wandb_run_id=live.wandb_run_id,
            config=as_plain(run.config),
            hyperparameters=self._hyperparameters,
        )
