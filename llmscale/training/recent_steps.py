"""Loss and gradient norm of every step since the last logged one, and how long each rank took: all in one collective.

A step only keeps what is on the device anyway. Where a step is logged, and the host waits for the device, the losses of
all steps since the last one go through the one all-reduce that the logged loss needs. So every rank knows, without a
synchronisation or a message more, of every step what it needs to judge it, and all ranks know the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.engine.process_group import World

#: Steps that are kept while none is logged; of more between two logged ones the oldest are not judged.
_MOST_STEPS = 1024
#: Seconds that a rank tells of itself: see RankTimes.
_TIMES = 3


@dataclass(frozen=True)
class RankTimes:
    """Of one rank, in seconds."""

    step_s: float
    """A step, between the last two logged ones, as is the next."""
    data_wait_s: float
    """Per step, for data."""
    arithmetic_s: float
    """Of a forward pass, or a part of one, in which it waits for nobody; 0 where it was not timed."""


@dataclass(frozen=True)
class RecentStep:
    """One step, the same on every rank."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    """Mean over the global batch, in nats per token."""
    grad_norm: float | None
    """Global, before clipping; None where DeepSpeed computed none."""


@dataclass(frozen=True)
class RecentWindow:
    """What the ranks know together at a logged step."""

    steps: tuple[RecentStep, ...]
    """Since the last logged one; the newest last."""
    rank_times: tuple[RankTimes, ...]
    """By rank."""
    extra: tuple[float, ...]
    """Means over the ranks of what the caller added."""


class RecentSteps:
    """Of this rank, until they are read."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.losses: deque[Tensor] = deque(maxlen=_MOST_STEPS)
        """This rank's mean losses, scalars on the device."""
        self.norms: deque[Tensor | float | None] = deque(maxlen=_MOST_STEPS)
        """Global gradient norms, on the device where DeepSpeed leaves them there."""
        self.window = RecentWindow((), (), ())
        """As it was read last."""

    def read(self, step: int, times: RankTimes, extra: Sequence[Tensor] = ()) -> RecentWindow:
        """What has been kept up to `step`, the newest, and forget it. Collective; waits for the device."""
        size, count = self._world.world_size, len(self.losses)
        values = torch.stack([*self.losses, *extra]).float() / size
        # Each rank fills its own places: the sum is everybody's.
        of_ranks = torch.zeros(size, _TIMES)
        of_ranks[self._world.rank] = torch.tensor([times.step_s, times.data_wait_s, times.arithmetic_s])
        sums = torch.cat((values, of_ranks.view(-1).to(values.device)))
        dist.all_reduce(sums)
        found = sums.tolist()
        tail = found[-size * _TIMES :]
        losses, norms = found[:count], _as_floats(list(self.norms))
        self.losses.clear()
        self.norms.clear()
        self.window = RecentWindow(
            tuple(RecentStep(step - count + 1 + i, loss, norms[i]) for i, loss in enumerate(losses)),
            tuple(RankTimes(*tail[rank * _TIMES : (rank + 1) * _TIMES]) for rank in range(size)),
            tuple(found[count : count + len(extra)]),
        )
        return self.window


def _as_floats(norms: Sequence[Tensor | float | None]) -> list[float | None]:
    """One copy from the device for all of them."""
    if norms and all(isinstance(norm, Tensor) for norm in norms):
        stacked: list[float | None] = torch.stack([norm.detach().reshape(()) for norm in norms]).tolist()  # type: ignore[union-attr]
        return stacked
    return [None if norm is None else float(norm) for norm in norms]
