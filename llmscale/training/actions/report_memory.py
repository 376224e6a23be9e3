"""The measured peak of GPU memory beside the estimate."""

from __future__ import annotations

from dataclasses import asdict

from llmscale.engine.device_memory import measured_memory
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun
from llmscale.training.memory_report import measured_line

#: Steps of this start after which it is measured: the first one lacks what DeepSpeed learns in it.
_AFTER_STEPS = 2


class ReportMemory(StepAction):
    """One line and one event; nothing on a CPU."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live

    def due(self, step: int) -> bool:
        return step == self._live.first_step + _AFTER_STEPS

    def act(self, done: DoneStep) -> None:
        live, measured = self._live, measured_memory()
        if measured is None:
            return
        live.report(measured_line(live.estimate, measured))
        if live.log:
            estimated = live.estimate.allocated_bytes if live.estimate else None
            live.log.log_event("memory", step=done.step, estimated_bytes=estimated, **asdict(measured))
