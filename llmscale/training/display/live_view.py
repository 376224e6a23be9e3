"""The view of a run on a terminal, drawn twice a second by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from llmscale.training.display.bottom_rows import BottomRows
from llmscale.training.display.display import Display, PlainLines, find_terminal
from llmscale.training.display.frame import RunProgress, render_frame
from llmscale.training.step_metrics import StepMetrics, format_step
from llmscale.training.throughput import StepMeter

#: Between two frames. Drawing one takes milliseconds of the interpreter, which the training thread may want.
_FRAME_S = 0.5
_MOST_ROWS = 6


def open_display(
    title: str, total_steps: int, meter: StepMeter, *, plain: bool, variables: Mapping[str, str]
) -> Display:
    """A view where there is a terminal for one, unless `plain` lines are asked for."""
    terminal = None if plain else find_terminal(variables)
    if terminal is None:
        return PlainLines(total_steps)
    try:
        import rich  # noqa: F401  # whether it is there
    except ImportError:
        return PlainLines(total_steps)
    return LiveView(BottomRows(terminal), title, total_steps, meter)


class LiveView(Display):
    """Reads the meter's counters as they are; everything else it is told."""

    def __init__(self, rows: BottomRows, title: str, total_steps: int, meter: StepMeter) -> None:
        self._rows, self._meter = rows, meter
        self._progress = RunProgress(title, total_steps)
        self._steps_before = 0
        """To add to the steps of this start."""
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        self._steps_before = step - self._meter.done_steps
        if self._thread is None:
            self._began = time.monotonic()
            self._thread = threading.Thread(target=self._draw_on, name="live view", daemon=True)
            self._thread.start()

    def show_step(self, metrics: StepMetrics) -> None:
        self._progress.loss.add(metrics.loss)
        self._progress.learning_rate.add(metrics.lr)
        self._progress.metrics = metrics

    def show_validation(self, step: int, loss: float) -> None:
        self._progress.validation = (step, loss)

    def close(self) -> None:
        """Gives the rows back, and leaves the newest step's line behind; again, it does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._rows.close()
        if self._progress.metrics is not None:
            print(format_step(self._progress.metrics, self._progress.total_steps), flush=True)

    def _draw_on(self) -> None:
        while not self._ended.is_set():
            try:
                columns, rows = self._rows.size()
                self._rows.draw(render_frame(self._now(), columns, min(rows, _MOST_ROWS)))
            except OSError:
                return  # the terminal is gone
            self._ended.wait(_FRAME_S)

    def _now(self) -> RunProgress:
        progress = self._progress
        progress.step = self._steps_before + self._meter.done_steps
        progress.elapsed_s = time.monotonic() - self._began
        progress.doing = self._meter.pausing_for or ""
        progress.spent_s = dict(self._meter.spent_s)
        return progress
