"""Throughput between two logged steps, with pauses for validation, sampling and saving taken out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from llmscale.engine.train_step import PhaseTimer

#: What interrupts training.
Pause = Literal["saving", "evaluating", "starting", "profiling"]


@dataclass(frozen=True)
class StepTimes:
    """Averages per step since the last reading, in seconds."""

    step_s: float
    data_wait_s: float
    forward_backward_s: float
    optimizer_step_s: float

    @property
    def other_s(self) -> float:
        """What none of the phases accounts for: agreement, logging, Python."""
        return max(0.0, self.step_s - self.data_wait_s - self.forward_backward_s - self.optimizer_step_s)


class StepMeter:
    """Counts steps and the seconds they took."""

    def __init__(self, device: torch.device) -> None:
        self.phases = PhaseTimer(device)
        self._began, self._paused_s, self._steps = time.perf_counter(), 0.0, 0
        self.done_steps = 0
        """Optimizer steps of this start."""
        self.pausing_for: Pause | None = None
        """What is going on instead of training."""
        self.spent_s: dict[str, float] = {}
        """Seconds of this start, as far as they were read, by phase and pause."""

    def count_step(self) -> None:
        """One more optimizer step is done."""
        self._steps += 1
        self.done_steps += 1

    @contextmanager
    def pause(self, what: Pause) -> Iterator[None]:
        """What happens inside is not training and does not count."""
        began = time.perf_counter()
        self.phases.mark("other")
        self.pausing_for = what
        try:
            yield
        finally:
            self.pausing_for = None
            self._paused_s += self._spend(what, time.perf_counter() - began)

    def _spend(self, what: str, seconds: float) -> float:
        self.spent_s[what] = self.spent_s.get(what, 0.0) + seconds
        return seconds

    def read(self) -> StepTimes:
        """The interval that ends now; begins the next. Call it where the device has just been synchronised."""
        now, steps = time.perf_counter(), max(self._steps, 1)
        phases = self.phases.read()
        interval = StepTimes(
            step_s=(now - self._began - self._paused_s) / steps,
            data_wait_s=phases["data_wait"] / steps,
            forward_backward_s=phases["forward_backward"] / steps,
            optimizer_step_s=phases["optimizer_step"] / steps,
        )
        self._began, self._paused_s, self._steps = now, 0.0, 0
        for name in ("data_wait", "forward_backward", "optimizer_step", "other"):
            self._spend(name, getattr(interval, f"{name}_s") * steps)
        return interval
