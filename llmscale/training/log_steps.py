"""Records of steps: metrics and sensors every --log-every steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from llmscale.config.hardware import model_flops_utilisation
from llmscale.engine.collectives import gather
from llmscale.engine.device_memory import peak_memory_bytes
from llmscale.engine.train_step import loss_scale
from llmscale.training.live_run import Engine, Run, RunIO, StepAction, StepResult
from llmscale.training.routers import RouterLog
from llmscale.training.run_folder import clear_failure
from llmscale.training.step_metrics import StepMetrics, StepTimes
from llmscale.training.stragglers import ArithmeticProbe, LoggedWindow, RankTimes


@dataclass(frozen=True)
class GpuReading:
    """State of a GPU."""

    power_w: float | None = None
    """Power, of NVML's last second on most GPUs."""
    temperature_c: float | None = None
    gpu_utilisation: float | None = None
    """Fraction of NVML's last sampling period (up to a second) in which a kernel ran; says nothing of how well."""


def read_gpu(device: torch.device) -> GpuReading:
    """Return the state of a GPU within milliseconds, by NVML through torch; nothing of another device.

    NVML's binding is nvidia-ml-py (`pip install -e '.[nvml]'`). What it, the driver or the GPU does not tell is None.
    """
    if device.type != "cuda":
        return GpuReading()
    milliwatts, percentage = _ask(torch.cuda.power_draw, device), _ask(torch.cuda.utilization, device)
    return GpuReading(
        power_w=None if milliwatts is None else milliwatts / 1000,
        temperature_c=_ask(torch.cuda.temperature, device),
        gpu_utilisation=None if percentage is None else percentage / 100,
    )


def _ask(query: Callable[[torch.device], int], device: torch.device) -> int | None:
    try:
        return query(device)
    except Exception:  # ModuleNotFoundError without the binding, RuntimeError without a driver, NVML's own
        return None


class LogSteps(StepAction):
    """Logs every --log-every steps, the first and the last: the one place where the host waits for the device."""

    def __init__(
        self, run: Run, engine: Engine, io: RunIO, watchers: Sequence[Callable[[int, LoggedWindow], None]] = ()
    ) -> None:
        """`watchers` are called with every logged step and the exchanged window."""
        self._run, self._engine, self._io, self._watchers = run, engine, io, watchers
        self._sequence_losses: deque[Tensor] = deque(maxlen=run.resolved.plan.gradient_accumulation_steps)
        if run.stream.mix:
            engine.deepspeed.module.head.sequence_losses = self._sequence_losses
        self._routers = RouterLog(run, engine, io)
        self._probe = ArithmeticProbe(engine.deepspeed, run.resolved)
        self._logged = run.first_step
        """Last logged step."""
        self._interval: StepTimes | None = None
        """Timings of the previous logging interval. Ranks exchange these: the exchange itself is part of the next."""

    def begin(self, step: int) -> None:
        if self._io.log:
            clear_failure(self._run.config.run)
            self._io.log.begin(step, **self._run.history.as_dict(), **_facts(self._run))

    def due(self, step: int) -> bool:
        run = self._run
        return step % run.config.log_every == 0 or step in (run.first_step + 1, run.resolved.total_steps)

    def run(self, result: StepResult) -> None:
        run, io = self._run, self._io
        z_squared, before = self._engine.deepspeed.module.head.z_squared, result.step - 1
        # The mean over this rank's micro-steps, weighted as the loss is.
        means = [] if z_squared is None else [z_squared * run.loss_weight(before) / run.micro_steps(before)]
        window = self._engine.recent.exchange(result.step, self._times(), means)
        z_loss = run.resolved.loss.z_loss * window.extra[0] if window.extra else None
        by_set = None
        if run.stream.mix and result.micro_batches:
            by_set = per_source_loss(run, result, list(self._sequence_losses)[-len(result.micro_batches) :])
        routers = self._routers.read(result.step)
        self._interval = self._engine.meter.read()
        if run.world.world_size > 1:
            self._probe.arm()
        if io.log is not None:
            newest = window.steps[-1]
            metrics = self._metrics(result.step, newest.loss, z_loss, by_set, newest.grad_norm, self._interval)
            io.log.log_step(replace(metrics, **routers))
            if loss_of_folder := io.claim.find_loss():
                io.report(f"WARNING: {loss_of_folder}")
        for watch in self._watchers:
            watch(result.step, window)

    def _times(self) -> RankTimes:
        last = self._interval
        return RankTimes(last.step_s, last.data_wait_s, self._probe.read()) if last else RankTimes(0.0, 0.0, 0.0)

    def _metrics(
        self,
        step: int,
        loss: float,
        z_loss: float | None,
        by_set: dict[str, float] | None,
        norm: float | None,
        interval: StepTimes,
    ) -> StepMetrics:
        run, resolved = self._run, self._run.resolved
        # A batch ramp changes the tokens of a step within an interval.
        seen, begun = run.tokens_seen(step), min(self._logged, step - 1)
        rate = (seen - run.tokens_seen(begun)) / (step - begun) / interval.step_s
        self._logged = step
        per_device = rate / run.world.world_size
        is_16bit = resolved.precision != "fp32"
        shape, seq_len = resolved.shape, None
        if resolved.plan.lengths is not None:
            seq_len = run.seq_len(step - 1)
            shape = replace(shape, seq_len=seq_len)
        return StepMetrics(
            step=step,
            tokens_seen=seen,
            loss=loss,
            z_loss=z_loss,
            loss_by_set=by_set,
            lr=resolved.schedule.learning_rate(step - 1),
            grad_norm=norm,
            loss_scale=loss_scale(self._engine.deepspeed),
            skipped_steps=self._engine.skipped_steps,
            tokens_per_second=rate,
            tokens_per_second_per_device=per_device,
            mfu=model_flops_utilisation(per_device, shape.flops_per_token, run.world.device_name, is_16bit),
            peak_memory_bytes=peak_memory_bytes(),
            data_wait_s=interval.data_wait_s,
            forward_backward_s=interval.forward_backward_s,
            optimizer_step_s=interval.optimizer_step_s,
            other_s=interval.other_s,
            eta_s=(run.tokens_seen(resolved.total_steps) - seen) / rate,
            paused_s=interval.paused_s,
            seq_len=seq_len,
            **asdict(read_gpu(run.world.device)),
        )


def per_source_loss(run: Run, result: StepResult, sequence_losses: Sequence[Tensor]) -> dict[str, float]:
    """Return the loss in nats per token of each dataset of a mixture that has samples in this step. Collective.

    `sequence_losses`: this rank's loss of each sequence, [sequences] per micro-step.
    """
    names = run.start.sets.names
    ids = np.concatenate([batch.sample_ids.numpy() for batch in result.micro_batches])
    pairs = zip(result.micro_batches, sequence_losses, strict=True)
    counted = [losses for batch, losses in pairs if not batch.is_filler]
    # A sample may be cut into several sequences.
    losses = torch.cat(counted or [torch.empty(0)]).double().view(len(ids), -1 if counted else 1).mean(1).cpu().numpy()
    owners = run.stream.set_of(ids)
    sums = [np.bincount(owners, weights, minlength=len(names)) for weights in (losses, np.ones(len(ids)))]
    # Over all ranks: [sums, counts], each by dataset.
    totals = np.sum(gather(run.world.control, [part.tolist() for part in sums]), axis=0)
    return {name: total / count for name, total, count in zip(names, *totals.tolist(), strict=True) if count}


def _facts(run: Run) -> dict[str, object]:
    """Return the facts about this start that a report needs and the next start may change."""
    resolved, sets = run.resolved, run.start.sets
    return {
        "startup_s": sum(run.startup_s.values()),
        "world_size": run.world.world_size,
        "zero_stage": resolved.zero_stage,
        "precision": resolved.precision,
        "micro_batch_size": resolved.plan.micro_batch_size,
        "device": run.world.device_name,
        "estimated_bytes": run.estimate.allocated_bytes if run.estimate else None,
        "tokenizer": sets.manifest.tokenizer,
        # A mixture has no single ratio: its weights may change from stage to stage.
        "bytes_per_token": None if sets.recipe else sets.manifest.splits["train"].bytes_per_token,
    }
