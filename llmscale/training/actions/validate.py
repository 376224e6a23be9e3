"""Validation every --val-every steps: the loss over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from llmscale.data.validation import (
    ValidationBatch,
    ValidationSplit,
    describe_samples,
    mean_bits_per_byte,
    validation_batches,
)
from llmscale.engine.collectives import on_all_ranks
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class Validate(StepAction):
    """Every --val-every steps and after the last one."""

    def __init__(self, live: LiveRun, splits: Sequence[ValidationSplit]) -> None:
        self._live, self._splits = live, splits

    def due(self, step: int) -> bool:
        run = self._live.run
        return step % run.config.val_every == 0 or step == run.resolved.total_steps

    def act(self, done: DoneStep) -> None:
        live = self._live
        with live.meter.pause("evaluating"):
            # Read everything first: a rank that cannot read must not leave the others waiting in a forward pass.
            batches = on_all_ranks(live.world.control, lambda: [self._read(split) for split in self._splits])
            losses = [validation_loss(live.engine, of_split, live.world.device) for of_split in batches]
        total = sum(num_samples for _, num_samples in losses)
        mean = sum(loss * num_samples for loss, num_samples in losses) / total
        if live.log:
            names = [split.name for split in self._splits]
            by_set = {name: loss for name, (loss, _) in zip(names, losses, strict=True) if name}
            in_bits = mean_bits_per_byte(losses, [split.bytes_per_token for split in self._splits])
            live.log.log_validation(done.step, mean, total, by_set, in_bits, describe_samples(self._splits))

    def _read(self, split: ValidationSplit) -> list[ValidationBatch]:
        live = self._live
        micro_batch_size = live.run.resolved.plan.micro_batch_size
        return list(validation_batches(split.shards, live.feed.plan.layout, micro_batch_size, split.num_samples))


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
