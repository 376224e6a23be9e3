"""Validation every --val-every steps: the loss over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from llmscale.data.shards.token_shards import TokenShards
from llmscale.data.validation import ValidationBatch, validation_batches
from llmscale.engine.collectives import together
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class Validate(StepAction):
    """Every --val-every steps and after the last one."""

    def __init__(self, live: LiveRun, shards: TokenShards) -> None:
        self._live, self._shards = live, shards

    def due(self, step: int) -> bool:
        run = self._live.run
        return step % run.config.val_every == 0 or step == run.resolved.total_steps

    def act(self, done: DoneStep) -> None:
        live = self._live
        with live.meter.pause():
            # Read everything first: a rank that cannot read must not leave the others waiting in a forward pass.
            batches = together(live.world.control, self._read)
            loss, num_samples = validation_loss(live.engine, batches, live.world.device)
        if live.log:
            live.log.log_validation(done.step, loss, num_samples)

    def _read(self) -> list[ValidationBatch]:
        run, layout = self._live.run, self._live.feed.plan.layout
        micro_batch_size = run.resolved.plan.micro_batch_size
        return list(validation_batches(self._shards, layout, micro_batch_size, run.config.val_samples))


def validation_loss(
    engine: DeepSpeedEngine, batches: Iterable[ValidationBatch], device: torch.device
) -> tuple[float, int]:
    """Mean loss in nats per token over all ranks' batches, and the number of sequences it is of. Collective.

    Every rank must bring equally many batches: ZeRO-3 gathers weights in every forward pass.
    """
    totals = torch.zeros(2, dtype=torch.float64)
    engine.eval()
    with torch.no_grad():
        for batch in batches:
            tokens = batch.tokens.to(device)
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            totals += torch.tensor([float(loss) * batch.weight, batch.weight], dtype=torch.float64)
    engine.train()
    totals = totals.to(device)
    dist.all_reduce(totals)
    return float(totals[0] / totals[1]), int(totals[1])
