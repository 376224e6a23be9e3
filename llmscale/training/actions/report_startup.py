"""How long the start took, phase by phase, once the first step is done."""

from __future__ import annotations

import time

from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun


class ReportStartup(StepAction):
    """One line after the first step of this start."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._began = 0.0

    def begin(self, step: int) -> None:
        self._began = time.perf_counter()

    def due(self, step: int) -> bool:
        return step == self._live.first_step + 1

    def act(self, done: DoneStep) -> None:
        seconds = {**self._live.startup_s, "first step": time.perf_counter() - self._began}
        phases = " + ".join(f"{name} {taken:.1f}" for name, taken in seconds.items())
        self._live.report(f"start-up: {phases} = {sum(seconds.values()):.1f} s")
