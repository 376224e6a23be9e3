"""One process's part of a training run, from the first step of this start to the last."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from llmscale.checkpoint.dcp_adapter import engine_fragments
from llmscale.checkpoint.manifest import History
from llmscale.checkpoint.run_state import RunState
from llmscale.checkpoint.save import CheckpointSaver, Snapshot, copy_out
from llmscale.config.hardware import model_flops_utilisation
from llmscale.config.optimizers import get_optimizer
from llmscale.data.loader import Feed, MicroBatch
from llmscale.data.sample_log import SampleRecorder, ids_checksum
from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.validation import ValidationBatch, validation_batches
from llmscale.engine.collectives import Verdict, agree, together
from llmscale.engine.deepspeed_engine import gradient_norm, set_learning_rate
from llmscale.engine.loss_scaling import explain_smallest_scale, get_scaler_state, loss_scale
from llmscale.engine.process_group import World, leave_world
from llmscale.engine.step_seed import seed_step
from llmscale.engine.train_step import train_step
from llmscale.engine.zero_shards import MASTER, group_scalars, inner_optimizer
from llmscale.errors import CheckpointError, DataError, LlmscaleError, MachineError
from llmscale.memory.estimate import MemoryEstimate
from llmscale.training.memory_report import MEASURED_AFTER_STEPS, measured_line
from llmscale.training.metrics import MetricsLog, StepMetrics
from llmscale.training.nonfinite_guard import LostSteps, check_weights
from llmscale.training.run_claim import RunFolderClaim
from llmscale.training.run_inputs import PreparedRun, as_plain
from llmscale.training.stop_request import StopRequest
from llmscale.training.throughput import StepMeter, measured_memory, peak_memory_bytes
from llmscale.training.validation import validation_loss
from llmscale.untrusted.terminal import print_visible

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass
class Session:
    """Everything the loop of train.py works with. Every rank calls every method at the same step."""

    run: PreparedRun
    world: World
    engine: DeepSpeedEngine
    feed: Feed
    validation_shards: TokenShards | None
    saver: CheckpointSaver
    open_recorder: Callable[[int], SampleRecorder | None]
    """The record of samples from a step on; collective. None when none is kept."""
    log: MetricsLog | None
    """On the main rank only."""
    stop: StopRequest
    first_step: int
    """Optimizer steps that were done before this start."""
    first_sample: int
    """Samples that were seen before this start: step 0 of this start begins there."""
    skipped_before: int
    identity: dict[str, object]
    hyperparameters: dict[str, object]
    """With every default filled in, for the checkpoint."""
    wandb_run_id: str | None
    estimate: MemoryEstimate | None
    """Of one rank's GPU memory; None where there is none for the optimizer."""
    sample_text: Callable[[], str] | None
    """Generates text on every rank alike; None when no tokenizer is at hand."""
    report: Callable[[str], None]
    """Prints one line on the main rank."""
    startup_s: dict[str, float]
    """Seconds per phase of the start, printed after the first step."""
    claim: RunFolderClaim
    """On the run folder; the main rank holds its lock until the session ends."""
    history: History
    """Of the steps to come."""

    def __post_init__(self) -> None:
        self.meter = StepMeter(self.world.device)
        self.step = self.first_step
        self._loss = torch.zeros((), device=self.world.device)
        self._lost = LostSteps(self.world.device)
        self._ids_checksum = 0
        self._fetch_failure: LlmscaleError | None = None
        self._last_save_s = time.monotonic()
        self._saved_step: int | None = self.first_step or None
        self._resumed_at = time.perf_counter()
        self.recorder = self.open_recorder(self.first_step)
        self._log_start()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.feed.close()
        if self.recorder:
            self.recorder.close()
        if self.log:
            self.log.close()
        self.claim.close()
        if kind is None:
            leave_world()

    def fetch(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step. A failure is kept for `agree`, where every rank hears of it."""
        self.meter.phases.mark("data_wait")
        try:
            batches = [next(self.feed) for _ in range(self.run.resolved.plan.gradient_accumulation_steps)]
        except (DataError, MachineError) as error:
            self._fetch_failure = error
            return []
        finally:
            self.meter.phases.mark("other")
        check_every = self.run.config.check_every
        due = check_every > 0 and (step - self.first_step) % check_every == 0
        self._ids_checksum = ids_checksum(self._ids(batches)) if due else 0
        return batches

    def agree(self, step: int) -> Verdict:
        """Decide with all ranks whether to stop or save before this step, and that all have their data."""
        minutes = self.run.config.save_every_minutes
        verdict = agree(
            self.world.control,
            stop=bool(self.stop.received),
            save=self.world.is_main and minutes is not None and time.monotonic() - self._last_save_s > minutes * 60,
            ids_checksum=self._ids_checksum,
            failure=self._fetch_failure,
        )
        if self._ids_checksum:
            self._check_ids(step, verdict.ids_sum)
        return verdict

    def train(self, step: int, batches: list[MicroBatch]) -> None:
        """One optimizer step."""
        seed_step(self.run.config.seed, step, self.world.rank)
        optimizer = get_optimizer(self.run.config.optimizer)
        set_learning_rate(self.engine, optimizer, self.run.resolved.schedule.learning_rate(step))
        skipped_before = self.engine.skipped_steps
        with explain_smallest_scale(step):
            self._loss = train_step(
                self.engine, [batch.tokens for batch in batches], self.world.device, self.meter.phases
            )
        # fp16 skips many steps in a row while it looks for its scale, and has an end of its own: the smallest scale.
        skipped = self.engine.skipped_steps > skipped_before and self.run.precision != "fp16"
        self._lost.note(self._loss, skipped)
        self.step = step + 1
        self.meter.count_step()
        if self.recorder:
            self.recorder.add(self._ids(batches))
            self.recorder.end_step(step)

    def after(self) -> None:
        """Whatever is due at the end of a step: log, validate, sample, save."""
        config, step, last = self.run.config, self.step, self.run.resolved.total_steps
        if step == self.first_step + 1:
            self._report_startup()
        if step == self.first_step + MEASURED_AFTER_STEPS:
            self._report_memory()
        if step % config.log_every == 0 or step in (self.first_step + 1, last):
            self._log_step()
            if self.log and (loss := self.claim.find_loss()):
                self.report(f"WARNING: {loss}")
            self._lost.check(step, config.run)
        if self.validation_shards and config.val_every and (step % config.val_every == 0 or step == last):
            self._validate()
        if self.sample_text and config.sample_every and step % config.sample_every == 0:
            with self.meter.pause():
                text = self.sample_text()
            self.report(f"step {step:>6}/{last} | sample: {text!r}")
        if config.save_every and step % config.save_every == 0:
            self.save()

    def save(self) -> None:
        """Copy the state out and write it in the background; nothing when this step is saved already."""
        with self.meter.pause():
            self.saver.wait()
            self._keep_run_folder()
            if self._saved_step == self.step:
                return
            fragments = engine_fragments(self.engine)
            weights = (fragment.local for key, fragment in fragments.items() if key.startswith(f"{MASTER}/"))
            check_weights(weights, self.world.control, self.step, self.run.config.run)
            snapshot = Snapshot(
                step=self.step,
                tokens_seen=self._samples_seen() * self.run.resolved.plan.seq_len,
                zero_stage=self.run.zero_stage,
                precision=self.run.precision,
                state=self._run_state().as_dict(),
                fragments=copy_out(fragments),
            )
            self.saver.save(snapshot)
        self._saved_step, self._last_save_s = self.step, time.monotonic()

    def finish(self) -> None:
        """Save what is not saved yet, and wait until it is on disk. Raises CheckpointError when it cannot be."""
        total = self.run.resolved.total_steps
        if self.step > self.first_step:
            # Twice: the second does nothing, unless the run folder was removed during the first.
            for _ in range(2):
                self.save()
                self.saver.wait()
            if self.saver.last_saved_step != self.step:
                raise CheckpointError(
                    f"training ended at step {self.step} of {total}, but its last checkpoint could not be saved "
                    "(see the warning above). Make room or mend the folder, and start again to repeat the steps "
                    "since the last one."
                )
        stopped = self.stop.received and self.step < total
        why = f"stopped by {self.stop.received[0]}" if stopped else "finished"
        if self.step < total and not stopped:
            why = "stopped by a signal on another rank"
        self.report(f"{why} at step {self.step} of {total}; run folder: {self.run.config.run}")
        if self.log:
            self.log.log_event(why.split()[0], step=self.step, reason=why)

    def _keep_run_folder(self) -> None:
        """Where the run folder is gone, begin it again, as a whole: what is saved next must be a run. Collective."""
        renewed = [self.claim.renew(self.report)]
        dist.broadcast_object_list(renewed, src=0, group=self.world.control)
        if not renewed[0]:
            return
        self._saved_step = None
        self._log_start()
        if self.recorder:
            self.recorder.close()
            self.recorder = self.open_recorder(self.step)

    def _log_start(self) -> None:
        if self.log:
            self.log.log_event("start", step=self.step, **self.history.as_dict())

    def _run_state(self) -> RunState:
        return RunState(
            step=self.step,
            samples_seen=self._samples_seen(),
            tokens_seen=self._samples_seen() * self.run.resolved.plan.seq_len,
            skipped_steps=self._skipped_steps(),
            identity=self.identity,
            precision=self.run.precision,
            optimizer_scalars=group_scalars(self.engine),
            optimizer_groups={
                str(group["name"]): {key: value for key, value in group.items() if key not in ("name", "params")}
                for group in inner_optimizer(self.engine).param_groups
            },
            loss_scaler=get_scaler_state(self.engine),
            wandb_run_id=self.wandb_run_id,
            config=as_plain(self.run.config),
            hyperparameters=self.hyperparameters,
        )

    def _samples_seen(self) -> int:
        return self.first_sample + (self.step - self.first_step) * self.run.resolved.plan.global_batch_size

    def _skipped_steps(self) -> int:
        return self.skipped_before + self.engine.skipped_steps

    def _log_step(self) -> None:
        """Average the loss over ranks and write one record. The only place where the device is waited for."""
        loss = self._loss / self.world.world_size
        dist.all_reduce(loss)
        value, norm = loss.item(), gradient_norm(self.engine)
        interval = self.meter.read()
        run, plan = self.run, self.run.resolved.plan
        rate = plan.tokens_per_step / interval.step_s
        per_device = rate / self.world.world_size
        is_16bit = run.precision != "fp32"
        if self.log is None:
            return
        self.log.log_step(
            StepMetrics(
                step=self.step,
                tokens_seen=self._samples_seen() * plan.seq_len,
                loss=value,
                lr=run.resolved.schedule.learning_rate(self.step - 1),
                grad_norm=norm,
                loss_scale=loss_scale(self.engine),
                skipped_steps=self._skipped_steps(),
                tokens_per_second=rate,
                tokens_per_second_per_device=per_device,
                mfu=model_flops_utilisation(
                    per_device, run.resolved.shape.flops_per_token, self.world.device_name, is_16bit
                ),
                peak_memory_bytes=peak_memory_bytes(),
                data_wait_s=interval.data_wait_s,
                forward_backward_s=interval.forward_backward_s,
                optimizer_step_s=interval.optimizer_step_s,
                other_s=interval.other_s,
                eta_s=(run.resolved.total_steps - self.step) * interval.step_s,
            )
        )

    def _validate(self) -> None:
        with self.meter.pause():
            # Read everything first: a rank that cannot read must not leave the others waiting in a forward pass.
            batches = together(self.world.control, self._read_validation)
            loss, num_samples = validation_loss(self.engine, batches, self.world.device)
        if self.log:
            self.log.log_validation(self.step, loss, num_samples)

    def _read_validation(self) -> list[ValidationBatch]:
        assert self.validation_shards is not None
        plan, config = self.run.resolved.plan, self.run.config
        layout = self.feed.plan.layout
        return list(validation_batches(self.validation_shards, layout, plan.micro_batch_size, config.val_samples))

    def _check_ids(self, step: int, ids_sum: int) -> None:
        """The ranks' samples together must be exactly the global batch that the order gives for this step."""
        size = self.run.resolved.plan.global_batch_size
        begin = self.first_sample + (step - self.first_step) * size
        expected = ids_checksum(self.feed.order.sample_ids(np.arange(begin, begin + size, dtype=np.int64)))
        if ids_sum != expected % 2**62:
            raise DataError(
                f"step {step}: the samples that the ranks hold are not the global batch of this step. Do all nodes "
                "have the same data set and the same version of llmscale?"
            )

    def _report_startup(self) -> None:
        self.startup_s["first step"] = time.perf_counter() - self._resumed_at
        phases = " + ".join(f"{name} {seconds:.1f}" for name, seconds in self.startup_s.items())
        self.report(f"start-up: {phases} = {sum(self.startup_s.values()):.1f} s")

    def _report_memory(self) -> None:
        """The measured peak beside the estimate; nothing on a CPU."""
        measured = measured_memory()
        if measured is None:
            return
        self.report(measured_line(self.estimate, measured))
        if self.log:
            estimated = self.estimate.allocated_bytes if self.estimate else None
            self.log.log_event("memory", step=self.step, estimated_bytes=estimated, **asdict(measured))

    @staticmethod
    def _ids(batches: list[MicroBatch]) -> np.ndarray:
        return torch.cat([batch.sample_ids for batch in batches]).numpy()


def report_on_main(world: World) -> Callable[[str], None]:
    """One line on stdout from the main rank, nothing from the others."""

    def report(line: str) -> None:
        if world.is_main:
            print_visible(line, flush=True)

    return report
