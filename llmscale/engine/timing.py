"""Where a step's time goes, without stopping the device to find out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch

Phase = Literal["data_wait", "forward_backward", "optimizer_step", "other"]
PHASES: tuple[Phase, ...] = ("data_wait", "forward_backward", "optimizer_step", "other")


class PhaseTimer:
    """Adds up seconds per phase between two reads.

    On a GPU each mark records an event in the stream, so a phase is the device's time: `data_wait` is then the time for
    which the device stood idle for data, not the time for which the host waited ahead of it. Only `read` synchronises.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Phase, float | torch.cuda.Event]] = []
        self.listener: Callable[[Phase], None] | None = None
        """Hears of every mark."""

    def mark(self, phase: Phase) -> None:
        """End the current phase, begin `phase`."""
        if self.listener is not None:
            self.listener(phase)
        if not self._on_gpu:
            self._marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def read(self) -> dict[Phase, float]:
        """Seconds per phase since the last read; the phase that is running goes on."""
        if not self._marks:
            return dict.fromkeys(PHASES, 0.0)
        self.mark(self._marks[-1][0])
        seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[phase] += _elapsed_s(begin, end)
        self._marks = self._marks[-1:]
        return seconds


def _elapsed_s(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]  # marks of one timer are all of one kind
    end.synchronize()
    return begin.elapsed_time(end) / 1000
