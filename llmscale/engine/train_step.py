"""One optimizer step: forward and backward over the micro-batches, then DeepSpeed's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmscale.engine.timing import PhaseTimer

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def train_step(
    engine: DeepSpeedEngine, micro_batches: Sequence[Tensor], device: torch.device, timer: PhaseTimer
) -> Tensor:
    """Train on one rank's share of a global batch.

    micro_batches: gradient_accumulation_steps tensors of token ids [micro_batch_size, seq_len + 1]. Returns this rank's
    mean loss in nats as a scalar on the device, not yet read: reading it would make the host wait.
    """
    total = torch.zeros((), device=device)
    for micro_step, tokens in enumerate(micro_batches):
        timer.mark("forward_backward")
        tokens = tokens.to(device, non_blocking=True)
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        # DeepSpeed divides by the accumulation steps itself.
        engine.backward(loss)
        total += loss.detach()
        if micro_step == len(micro_batches) - 1:
            timer.mark("optimizer_step")
        engine.step()
    timer.mark("other")
    return total / len(micro_batches)
