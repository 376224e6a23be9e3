"""Validation loss over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from llmscale.data.validation import ValidationBatch

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


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
