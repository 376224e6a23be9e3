"""How a run is shown while it trains: lines, wherever they go, or a view on a terminal."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping

from llmscale.training.step_metrics import StepMetrics, format_step


class Display(ABC):
    """On the main rank. Lines that others print are none of its business."""

    def begin(self, step: int) -> None:  # noqa: B027  lines have nothing to begin
        """Training begins after `step`."""

    @abstractmethod
    def show_step(self, metrics: StepMetrics) -> None:
        """A step was logged."""

    def show_validation(self, step: int, loss: float) -> None:  # noqa: B027
        """Beside the line that is printed anyway: loss in nats per token."""

    def close(self) -> None:  # noqa: B027
        """The session ends; may be called twice, and from any thread."""


class PlainLines(Display):
    """A line per logged step."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def show_step(self, metrics: StepMetrics) -> None:
        print(format_step(metrics, self._total_steps), flush=True)


def find_terminal(variables: Mapping[str, str]) -> int | None:
    """The descriptor of the terminal that this process prints to and that can show a view; None where it prints into a
    pipe or a file, or to something that moves no cursor or knows no Unicode.

    Asked of the process that draws: `llmscale train`, deepspeed and torchrun let ranks print straight to their own
    terminal, `llmscale launch`, srun and ssh put a pipe between.
    """
    stream = sys.stdout
    try:
        is_fit = stream.isatty() and variables.get("TERM", "dumb") not in ("", "dumb", "unknown")
        if not is_fit or "utf" not in (stream.encoding or "").lower() or not all(os.get_terminal_size(stream.fileno())):
            return None
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None
