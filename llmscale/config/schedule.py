"""The learning rate as a pure function of the step: nothing to save, nothing to restore. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from llmscale.errors import ConfigError

ScheduleName = Literal["cosine", "linear", "constant", "wsd"]


@dataclass(frozen=True)
class Schedule:
    """A linear warm-up, then one of four shapes. Its fields have the names of the run's keys.

    cosine: half a cosine from the peak to the floor over `decay_steps` (Loshchilov & Hutter 2017; GPT-3 decays to
    10 %). linear: the straight line (OPT, Zhang et al. 2022). constant: no decay. wsd: the peak, then a straight line
    to the floor over the last `decay_steps` of the run (Hu et al. 2024, MiniCPM).
    """

    schedule: ScheduleName
    lr: float
    """Largest learning rate."""
    warmup_steps: int
    """Steps from 0 to the peak; step 0 already has 1/warmup_steps of it."""
    steps: int
    """Steps of the run."""
    decay_steps: int
    """wsd: steps of the final decay; cosine and linear: step at which the floor is reached."""
    min_lr_frac: float
    """Floor as a fraction of the peak."""

    def __post_init__(self) -> None:
        if self.schedule == "wsd" and self.warmup_steps + self.decay_steps > self.steps:
            raise ConfigError(
                f"warmup_steps {self.warmup_steps} + decay_steps {self.decay_steps} is more than the "
                f"{self.steps} steps of the run. Shorten one of them or lengthen the run."
            )
        if self.schedule in ("cosine", "linear") and self.warmup_steps >= self.decay_steps:
            raise ConfigError(
                f"warmup_steps {self.warmup_steps} must be less than the {self.decay_steps} steps over which the "
                f"{self.schedule} schedule decays. Shorten the warm-up or lengthen the run."
            )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step` (0-based)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        return self.lr * (self.min_lr_frac + (1 - self.min_lr_frac) * self._height(step))

    def _height(self, step: int) -> float:
        """Return 1 at the peak, 0 at the floor."""
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "wsd":
            start, length = self.steps - self.decay_steps, self.decay_steps
        else:
            start, length = self.warmup_steps, self.decay_steps - self.warmup_steps
        done = min(max((step - start) / length, 0.0), 1.0)
        return 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1.0 - done
