"""The loss of each set of a mix at a step."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

from llmscale.engine.collectives import gather
from llmscale.training.actions.action import DoneStep
from llmscale.training.live_run import LiveRun


class SourceLosses:
    """Has the head keep what it knows of each sequence of a step."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._kept: deque[Tensor] = deque(maxlen=live.run.resolved.plan.gradient_accumulation_steps)
        live.engine.module.head.sequence_losses = self._kept

    def read(self, done: DoneStep) -> dict[str, float]:
        """Nats per token of the step's samples, by set; of those alone that had some. Collective."""
        live, names = self._live, self._live.run.sets.names
        ids = np.concatenate([batch.sample_ids.numpy() for batch in done.micro_batches])
        losses = torch.cat(list(self._kept)).double().cpu().numpy()
        owners = live.stream.set_of(ids)
        sums = [np.bincount(owners, weights, minlength=len(names)) for weights in (losses, np.ones(len(ids)))]
        # Of every rank: [sums, counts], each by set.
        totals = np.sum(gather(live.world.control, [part.tolist() for part in sums]), axis=0)
        return {name: total / count for name, total, count in zip(names, *totals.tolist(), strict=True) if count}
