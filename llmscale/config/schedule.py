"""The learning rate as a pure function of the step: nothing to save, nothing to restore. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from llmscale.errors import ConfigError

#: DeepSpeed's schedulers, with the shape that follows their warm-up.
OF_DEEPSPEED = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
#: Final learning rates as fractions of the peak, where a run does not give one; others: 0.
DEFAULT_FLOORS = {"cosine": 0.1, "WarmupCosineLR": 1e-4}

ScheduleName = Literal["cosine", "linear", "constant", "wsd", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
WarmupType = Literal["log", "linear"]


@dataclass(frozen=True)
class Schedule:
    """A warm-up, then one of four shapes. Its fields have the names of the run's keys.

    cosine: half a cosine from the peak to the floor over `decay_steps` (Loshchilov & Hutter 2017; GPT-3 decays to
    10 %). linear: the straight line (OPT, Zhang et al. 2022). constant: no decay. wsd: the peak, then a straight line
    to the floor over the last `decay_steps` of the run (Hu et al. 2024, MiniCPM). WarmupLR, WarmupDecayLR and
    WarmupCosineLR: constant, linear and cosine as DeepSpeed 0.19.8 computes them (deepspeed/runtime/lr_schedules.py).
    """

    schedule: ScheduleName
    lr: float
    """Largest learning rate."""
    warmup_steps: int
    """Steps from 0 to the peak; step 0 already has 1/warmup_steps of it, but not with DeepSpeed's schedules."""
    steps: int
    """Steps of the run."""
    decay_steps: int
    """wsd: steps of the final decay; others: step at which the floor is reached."""
    min_lr_frac: float
    """Floor as a fraction of the peak."""
    warmup_type: WarmupType = "log"
    """Curve of the warm-up of DeepSpeed's schedules."""
    warmup_min_lr: float = 0.0
    """Learning rate at which the warm-up of DeepSpeed's schedules begins."""

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
        if self.schedule in OF_DEEPSPEED:
            return self._rate_of_deepspeed(step)
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        return self.lr * (self.min_lr_frac + (1 - self.min_lr_frac) * self._height(step))

    def _height(self, step: int) -> float:
        """Return 1 at the peak, 0 at the floor."""
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "wsd":
            start = self.steps - self.decay_steps
            length = self.decay_steps
        else:
            start = self.warmup_steps
            length = self.decay_steps - self.warmup_steps
        done = min(max((step - start) / length, 0.0), 1.0)
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        return 1.0 - done

    def _rate_of_deepspeed(self, step: int) -> float:
        """Return the learning rate that DeepSpeed's scheduler has set after the step before."""
        last = step - 1
        # DeepSpeed refuses a warm-up of 0 steps; here that leaves it out.
        if self.warmup_steps:
            warmup = max(2, self.warmup_steps)
        else:
            warmup = 0
        if last < 0 and self.schedule == "WarmupCosineLR" and warmup:
            return 0.0
        if last < warmup:
            return self.warmup_min_lr + (self.lr - self.warmup_min_lr) * self._warmed(max(0, last), warmup)
        length = max(1, self.decay_steps - warmup)
        height = 1.0
        if self.schedule == "WarmupCosineLR":
            height = 0.5 * (1 + math.cos(math.pi * min(1.0, (last - warmup + 1) / length)))
        elif self.schedule == "WarmupDecayLR":
            height = max(0.0, (self.decay_steps - max(0, last)) / length)
        return self.lr * (self.min_lr_frac + (1 - self.min_lr_frac) * height)

    def _warmed(self, last: int, warmup: int) -> float:
        """Return the height of DeepSpeed's warm-up after step `last`: 0 at its beginning, 1 at the peak."""
        if self.warmup_type == "log":
            return math.log(last + 1) / math.log(warmup)
        return last / warmup
