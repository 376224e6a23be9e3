"""When a loss or a gradient norm is a spike: a robust z-score against the steps before it. No torch.

    z = (value - median) / max(1.4826 x MAD, least share x |median|)

over the last WINDOW steps, MAD the median of their absolute differences from their median: 1.4826 times it is the
standard deviation of a normal distribution (Hampel 1974; Iglewicz & Hoaglin 1993), and up to half of the steps may be
spikes themselves before it moves. The least share keeps a curve that hardly varies from calling everything a spike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

#: Steps that a step is compared with, and the fewest of them.
WINDOW, LEAST_STEPS = 128, 20
#: A step is a spike from these scores on: its loss alone; or its loss and its gradient norm together. A norm alone is
#: none: clipping takes it back, and with small batches it happens every few hundred steps.
LOSS_Z, BOTH_LOSS_Z, BOTH_NORM_Z = 8.0, 4.0, 8.0
#: Steps below half of that after which another spike is news.
QUIET_STEPS = 10
_LOSS_LEAST, _NORM_LEAST = 0.01, 0.1
_NORMAL_MAD = 1.4826


@dataclass(frozen=True)
class Spike:
    """The first step of one, or a later one."""

    step: int
    loss: float
    loss_z: float
    grad_norm: float | None
    grad_norm_z: float | None


@dataclass
class SpikeRequests:
    """What the main rank wants of all ranks, until they have agreed on it."""

    go_back_from: tuple[int, int] | None = None
    """The first and the newest step of a spike that the run is to go back from."""
    times_gone_back: int = 0
    finish_saving: Callable[[], None] = lambda: None
    """Waits for the checkpoint that is being written in the background, which may be the one before the spike."""


class SpikeDetector:
    """Looks at steps one after the other."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._quiet = QUIET_STEPS
        self.last_step: int | None = None
        """The newest step of the newest spike."""

    def add(self, step: int, loss: float, grad_norm: float | None) -> Spike | None:
        """The next step; what it is when a spike begins with it. A loss that is no number is another matter's, and
        neither compared nor remembered."""
        if not math.isfinite(loss):
            return None
        loss_z = robust_z(loss, self._losses, _LOSS_LEAST)
        norm_z = None if grad_norm is None else robust_z(grad_norm, self._norms, _NORM_LEAST)
        self._losses.append(loss)
        if grad_norm is not None and math.isfinite(grad_norm):
            self._norms.append(grad_norm)
        if loss_z is None:
            return None
        if loss_z >= LOSS_Z or (loss_z >= BOTH_LOSS_Z and (norm_z or 0.0) >= BOTH_NORM_Z):
            is_news, self._quiet, self.last_step = self._quiet >= QUIET_STEPS, 0, step
            return Spike(step, loss, loss_z, grad_norm, norm_z) if is_news else None
        self._quiet = self._quiet + 1 if loss_z < BOTH_LOSS_Z else 0
        return None


def robust_z(value: float, before: deque[float], least_share: float) -> float | None:
    """How far `value` lies above the values before it; None while there are too few."""
    if len(before) < LEAST_STEPS:
        return None
    known = np.array(before)
    median = float(np.median(known))
    spread = _NORMAL_MAD * float(np.median(np.abs(known - median)))
    return (value - median) / max(spread, least_share * abs(median), 1e-12)
