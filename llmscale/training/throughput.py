"""Throughput between two logged steps, with pauses for validation, sampling and saving taken out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from llmscale.engine.timing import PhaseTimer


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

    def count_step(self) -> None:
        """One more optimizer step is done."""
        self._steps += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens inside is not training and does not count."""
        began = time.perf_counter()
        self.phases.mark("other")
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - began

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
        return interval
