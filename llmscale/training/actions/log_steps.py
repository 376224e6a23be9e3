"""Metrics every --log-every steps: the one place where the host waits for the device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from llmscale.config.hardware import model_flops_utilisation
from llmscale.engine.deepspeed_engine import gradient_norm
from llmscale.engine.device_memory import peak_memory_bytes
from llmscale.engine.loss_scaling import loss_scale
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun
from llmscale.training.metrics import StepMetrics
from llmscale.training.run_folder import METRICS_VERSION
from llmscale.training.source_losses import SourceLosses
from llmscale.training.throughput import StepTimes


class LogSteps(StepAction):
    """Records of steps; the first and the last step always have one."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._sources = SourceLosses(live) if live.stream.mix else None

    def begin(self, step: int) -> None:
        if self._live.log:
            self._live.log.log_event("start", step=step, **self._live.history.as_dict(), **_facts(self._live))

    def due(self, step: int) -> bool:
        run = self._live.run
        return step % run.config.log_every == 0 or step in (self._live.first_step + 1, run.resolved.total_steps)

    def act(self, done: DoneStep) -> None:
        live = self._live
        z_squared = live.engine.module.head.mean_z_squared
        local = done.loss if z_squared is None else torch.stack((done.loss, z_squared))
        losses = local / live.world.world_size
        dist.all_reduce(losses)
        (value, *rest), norm = losses.reshape(-1).tolist(), gradient_norm(live.engine)
        z_loss = live.run.resolved.loss.z_loss * rest[0] if rest else None
        of_sources = self._sources.read(done) if self._sources else None
        interval = live.meter.read()
        if live.log is None:
            return
        live.log.log_step(self._metrics(done.step, value, z_loss, of_sources, norm, interval))
        if gone := live.claim.find_loss():
            live.report(f"WARNING: {gone}")

    def close(self) -> None:
        if self._live.log:
            self._live.log.close()

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
        "metrics_version": METRICS_VERSION,
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
