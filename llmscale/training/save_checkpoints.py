"""Checkpoints: every --save-every steps, by the clock, and at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from llmscale.checkpoint.run_state import RunState
from llmscale.checkpoint.save import CheckpointSaver, Snapshot, copy_out
from llmscale.checkpoint.tensor_files import engine_fragments
from llmscale.engine.collectives import gather
from llmscale.engine.train_step import get_scaler_state
from llmscale.engine.zero_shards import MASTER, group_scalars
from llmscale.errors import CheckpointError
from llmscale.training.changes import hyperparameters
from llmscale.training.evaluate_steps import Validate
from llmscale.training.inputs import as_plain
from llmscale.training.live_run import Engine, Run, RunIO, StepAction, StepResult
from llmscale.training.loss_spikes import RollbackRequest
from llmscale.training.nonfinite import check_weights


class SaveCheckpoints(StepAction):
    """Copies the state at a step and writes it in the background."""

    def __init__(
        self, run: Run, engine: Engine, io: RunIO, rollback: RollbackRequest, others: Sequence[StepAction]
    ) -> None:
        """`others` begin again in a run folder that had to be created again; one of them may validate."""
        self._run, self._engine, self._io, self._others = run, engine, io, others
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
        minutes = self._run.config.save_every_minutes
        return self._run.world.is_main and minutes is not None and time.monotonic() - self._last_save_s > minutes * 60

    def run(self, result: StepResult) -> None:
        self.save(result.step)

    def save(self, step: int) -> None:
        """Copy the state and write it in the background, unless this step is saved."""
        run, engine = self._run, self._engine
        with engine.meter.pause("saving"):
            self._saver.wait()
            self._restore_run_folder(step)
            if self._saved_step == step:
                return
            fragments = engine_fragments(engine.deepspeed)
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
        self._saved_step, self._last_save_s = step, time.monotonic()

    def finish(self, step: int) -> None:
        """Save the last step unless it is saved, and wait until it is on disk. Raises CheckpointError on failure."""
        # Twice: the second does nothing, unless the run folder was removed during the first.
        for _ in range(2):
            self.save(step)
            self._saver.wait()
        if self._saver.last_saved_step != step:
            raise CheckpointError(
                f"training ended at step {step} of {self._run.resolved.total_steps}, but its last checkpoint "
                "could not be saved (see the warning above). Make room or mend the folder, and start again to repeat "
                "the steps since the last one."
            )

    def _restore_run_folder(self, step: int) -> None:
        """Create a missing run folder again, complete, for the next checkpoint to be a run's. Collective."""
        claim, report = self._io.claim, self._io.report
        if not any(gather(self._run.world.control, claim.renew(report))):
            return
        self._saved_step = None
        for action in self._others:
            action.begin(step)

    def _run_state(self, step: int) -> RunState:
        run, engine = self._run, self._engine
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
        )
