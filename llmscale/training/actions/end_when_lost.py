"""End a run whose steps teach the model nothing any more."""

from __future__ import annotations

from collections.abc import Callable

from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun
from llmscale.training.nonfinite_guard import LostSteps


class EndWhenLost(StepAction):
    """Notes every step, and judges where the device is waited for anyway."""

    def __init__(self, live: LiveRun, judges_at: Callable[[int], bool]) -> None:
        self._live, self._judges_at = live, judges_at
        self._lost = LostSteps(live.world.device)

    def due(self, step: int) -> bool:
        return True

    def act(self, done: DoneStep) -> None:
        # fp16 skips many steps in a row while it looks for its scale, and has an end of its own: the smallest scale.
        self._lost.note(done.loss, done.was_skipped and self._live.run.precision != "fp16")
        if self._judges_at(done.step):
            self._lost.check(done.step, self._live.run.config.run)
