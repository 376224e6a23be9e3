"""Metrics every --log-every steps: the one place where the host waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmscale.config.hardware import model_flops_utilisation
from llmscale.engine.device_memory import peak_memory_bytes
from llmscale.engine.train_step import loss_scale
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.arithmetic_probe import ArithmeticProbe
from llmscale.training.failure import forget_failure
from llmscale.training.live_run import LiveRun
from llmscale.training.recent_steps import RankTimes
from llmscale.training.source_losses import SourceLosses
from llmscale.training.step_metrics import StepMetrics
from llmscale.training.throughput import StepTimes


class LogSteps(StepAction):
    """Records of steps; the first and the last step always have one."""

    def __init__(self, live: LiveRun, watchers: Sequence[Callable[[int], None]] = ()) -> None:
        """`watchers` are told of every step that was logged; they look at `live.recent.window`."""
        self._live, self._watchers = live, watchers
        self._sources = SourceLosses(live) if live.stream.mix else None
        self._probe = ArithmeticProbe(live.engine, live.run.resolved.zero_stage)
        self._interval: StepTimes | None = None
        """As it was read last: what the other ranks hear of this one is of the time before."""

    def begin(self, step: int) -> None:
        if self._live.log:
            forget_failure(self._live.run.config.run)
            self._live.log.begin(step, **self._live.history.as_dict(), **_facts(self._live))

    def due(self, step: int) -> bool:
        run = self._live.run
        return step % run.config.log_every == 0 or step in (self._live.first_step + 1, run.resolved.total_steps)

    def act(self, done: DoneStep) -> None:
        live = self._live
        z_squared = live.engine.module.head.mean_z_squared
        window = live.recent.read(done.step, self._times(), [] if z_squared is None else [z_squared])
        newest = window.steps[-1]
        z_loss = live.run.resolved.loss.z_loss * window.extra[0] if window.extra else None
        of_sources = self._sources.read(done) if self._sources and done.micro_batches else None
        self._interval = live.meter.read()
        if live.world.world_size > 1:
            self._probe.arm()
        if live.log is not None:
            norm = newest.grad_norm
            live.log.log_step(self._metrics(done.step, newest.loss, z_loss, of_sources, norm, self._interval))
            if gone := live.claim.find_loss():
                live.report(f"WARNING: {gone}")
        for watch in self._watchers:
            watch(done.step)

    def _times(self) -> RankTimes:
        last = self._interval
        return RankTimes(last.step_s, last.data_wait_s, self._probe.read()) if last else RankTimes(0.0, 0.0, 0.0)

    def _metrics(
        self,
        step: int,
        loss: float,
        z_loss: float | None,
        of_sources: dict[str, float] | None,
        norm: float | None,
        interval: StepTimes,
    ) -> StepMetrics:
        live, resolved = self._live, self._live.run.resolved
        rate = resolved.plan.tokens_per_step / interval.step_s
        per_device = rate / live.world.world_size
        is_16bit = resolved.precision != "fp32"
        return StepMetrics(
            step=step,
            tokens_seen=live.tokens_seen(step),
            loss=loss,
            z_loss=z_loss,
            loss_by_set=of_sources,
            lr=resolved.schedule.learning_rate(step - 1),
            grad_norm=norm,
            loss_scale=loss_scale(live.engine),
            skipped_steps=live.skipped_steps,
            tokens_per_second=rate,
            tokens_per_second_per_device=per_device,
            mfu=model_flops_utilisation(per_device, resolved.shape.flops_per_token, live.world.device_name, is_16bit),
            peak_memory_bytes=peak_memory_bytes(),
            data_wait_s=interval.data_wait_s,
            forward_backward_s=interval.forward_backward_s,
            optimizer_step_s=interval.optimizer_step_s,
            other_s=interval.other_s,
            eta_s=(resolved.total_steps - step) * interval.step_s,
        )


def _facts(live: LiveRun) -> dict[str, object]:
    """What a report must know of this start, and what may differ at the next one."""
    resolved, sets = live.run.resolved, live.run.sets
    return {
        "world_size": live.world.world_size,
        "zero_stage": resolved.zero_stage,
        "precision": resolved.precision,
        "micro_batch_size": resolved.plan.micro_batch_size,
        "device": live.world.device_name,
        "estimated_bytes": live.estimate.allocated_bytes if live.estimate else None,
        "tokenizer": sets.manifest.tokenizer,
        # A mix has no one ratio: its weights may change from stage to stage.
        "bytes_per_token": None if sets.recipe else sets.manifest.splits["train"].bytes_per_token,
    }
