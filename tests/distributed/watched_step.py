"""An optimizer step in a rank of a test, and how far the gradients that the optimizer gets are from exact ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.engine.train_step import PhaseTimer, train_step
from llmscale.engine.zero_layout import inner_optimizer, parameter_shards

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def watched_step(
    engine: DeepSpeedEngine, micro_batches: Sequence[Tensor], exact: Mapping[str, Tensor]
) -> tuple[float, float]:
    """This rank's loss; and the norm of the gradients' difference from `exact`, flat by parameter, over the norm of
    `exact`, over all ranks' parts. Collective."""
    seen: dict[str, tuple[int, Tensor]] = {}
    # Found before the step, in which DeepSpeed hands one group at a time to the optimizer.
    places, optimizer = list(parameter_shards(engine)), inner_optimizer(engine)
    step = optimizer.step

    def note_gradients(*args: object, **kwargs: object) -> object:
        for place in places:
            if place.flat.grad is not None:
                view = place.view(place.flat.grad)
                seen[place.name] = (view.start, view.local.clone())
        return step(*args, **kwargs)

    optimizer.step = note_gradients
    device = torch.device("cpu")
    loss = float(train_step(engine, list(micro_batches), device, PhaseTimer(device)))
    squares = torch.zeros(2, dtype=torch.float64)
    for name, (start, gradient) in seen.items():
        wanted = exact[name][start : start + gradient.numel()]
        squares += torch.stack([(gradient.double() - wanted).square().sum(), wanted.square().sum()])
    dist.all_reduce(squares)  # at stage 0 every rank has everything, and the quotient is the same
    return loss, float((squares[0] / squares[1]).sqrt())
