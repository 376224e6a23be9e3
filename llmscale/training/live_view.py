"""A view of a run while it trains, in a terminal's last rows, drawn by rich.

The rows above the view become the terminal's scrolling region (DECSTBM), and the cursor stays there. So what Python, a
C++ library, another rank or the launcher prints scrolls above the view. The cursor is never hidden.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from llmscale.terminal.colour import is_terminal
from llmscale.terminal.human_numbers import format_duration
from llmscale.training.step_metrics import StepMeter, StepMetrics, format_step
from llmscale.untrusted.terminal import make_visible_line

if TYPE_CHECKING:
    from rich.text import Text

#: Seconds between two frames. Drawing one takes milliseconds of the interpreter, which the training thread may need.
_FRAME_S = 0.5
_STDOUT = 1
#: Rows left to all other output.
_MIN_OTHER_ROWS = 4
_BARS = "▁▂▃▄▅▆▇█"
#: Names and colours of the shares of time, by phase and pause.
_SHARES = {
    "forward_backward": ("forward/backward", "green"),
    "optimizer_step": ("step", "cyan"),
    "data_wait": ("data wait", "red"),
    "saving": ("save", "magenta"),
    "evaluating": ("evaluation", "blue"),
    "starting": ("start", "yellow"),
    "profiling": ("profile", "white"),
    "other": ("other", "bright_black"),
}
#: Logged steps that a curve shows, the newest.
_CURVE_STEPS = 500
#: Percentile of the drawn values that has the highest bar: one spike must not flatten the others.
_TOP = 95
#: Frees the view's rows, whoever reserved them: the whole screen scrolls, and nothing is below the cursor.
GIVE_BACK = "\x1b7\x1b[r\x1b8\x1b[J"


def open_view(
    title: str, total_steps: int, meter: StepMeter, *, plain: bool, variables: Mapping[str, str]
) -> LiveView | None:
    """Return a view if stdout is a terminal that can show it and `rich` is installed; else, or if `plain`, None.

    `llmscale train`, deepspeed and torchrun let ranks print straight to their terminal; `llmscale launch`, srun and ssh
    put a pipe between.
    """
    can_move = is_terminal(sys.stdout) and variables.get("TERM", "dumb") not in ("", "dumb", "unknown")
    if plain or not can_move or "utf" not in sys.stdout.encoding.lower() or find_spec("rich") is None:
        return None
    # Some terminals have no size.
    if all(os.get_terminal_size(_STDOUT)):
        return LiveView(title, total_steps, meter)
    return None


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as one row of at most `width` bars, means of neighbours if there are more."""
    if not values:
        return ""
    means = [float(part.mean()) for part in np.array_split(np.array(values), min(width, len(values)))]
    low = min(means)
    high = float(np.percentile(means, _TOP, method="higher"))
    if high > low:
        scale = (len(_BARS) - 1) / (high - low)
    else:
        scale = 0.0
    return "".join(_BARS[min(7, round((mean - low) * scale))] for mean in means)


class LiveView:
    """A view that reads the meter's counters; everything else comes from the methods."""

    def __init__(self, title: str, total_steps: int, meter: StepMeter) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._title = title
        self._total_steps = total_steps
        self._meter = meter
        self._bar = Progress(
            TextColumn("[bold]step {task.completed:,}/{task.total:,}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} {task.fields[pause]}"),
        )
        self._task = self._bar.add_task("", total=total_steps, left="", pause="")
        self._steps_before = 0
        """Steps done before this start."""
        self._metrics: StepMetrics | None = None
        self._losses: deque[float] = deque(maxlen=_CURVE_STEPS)
        self._rates: deque[float] = deque(maxlen=_CURVE_STEPS)
        self._validation = ""
        self._reserved: tuple[int, int, int] | None = None
        """Columns and rows of the terminal, and the number of reserved rows."""
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def begin(self, step: int) -> None:
        """Training begins after `step`."""

        def draw_frames() -> None:
            while not self._ended.wait(_FRAME_S):
                self.draw()

        self._steps_before = step - self._meter.done_steps
        if self._reserved is None:
            # A short run may end before the thread's first frame.
            self._bar.reset(self._task)
            self.draw()
            threading.Thread(target=draw_frames, name="live view", daemon=True).start()

    def show_step(self, metrics: StepMetrics) -> None:
        """Show a logged step."""
        if math.isfinite(metrics.loss):
            self._losses.append(metrics.loss)
        self._rates.append(metrics.lr)
        self._metrics = metrics

    def show_validation(self, step: int, loss: float) -> None:
        """Show a validation loss in nats per token."""
        self._validation = f"validation {loss:.4f} at {step:,}"

    def close(self) -> None:
        """Free the rows, and print the newest step's line. Call it from any thread; a second call does nothing."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            if self._reserved is not None:
                self._write(GIVE_BACK)
        if self._metrics is not None:
            print(format_step(self._metrics, self._total_steps), flush=True)

    def draw(self) -> None:
        """Draw a frame by one write, which no other process can interrupt."""
        columns, rows = os.get_terminal_size(_STDOUT)
        lines = self.render(columns)
        room = max(0, rows - _MIN_OTHER_ROWS)
        if len(lines) > room:
            lines = lines[1 : room + 1]  # the title goes first
        last = rows - len(lines)
        with self._lock:
            if self._ended.is_set():
                return
            reserve = ""
            if self._reserved != (columns, rows, len(lines)):
                # Only an older view can be below the cursor, wherever a change of size moved it. An index (ESC D) makes
                # room below the cursor.
                if lines:
                    scrolled = "\x1bD" * len(lines) + f"\x1b[{len(lines)}A"
                else:
                    scrolled = ""
                reserve = f"{GIVE_BACK}{scrolled}\x1b7\x1b[1;{last}r\x1b8"
                self._reserved = (columns, rows, len(lines))
            drawn = "".join(f"\x1b[{last + number};1H\x1b[0m\x1b[2K{line}" for number, line in enumerate(lines, 1))
            self._write(f"{reserve}\x1b7{drawn}\x1b[0m\x1b8")

    def _write(self, text: str) -> None:
        # A terminal that was closed ends no run.
        with contextlib.suppress(OSError):
            os.write(_STDOUT, text.encode())

    def render(self, columns: int) -> list[str]:
        """Return lines of at most `columns` characters, with the terminal's colour codes."""
        from rich.console import Console
        from rich.rule import Rule
        from rich.text import Text

        if self._metrics:
            left = f"{format_duration(self._metrics.eta_s)} left"
        else:
            left = ""
        done = self._steps_before + self._meter.done_steps
        self._bar.update(self._task, completed=done, left=left, pause=self._meter.pausing_for or "")
        title = Rule(Text(make_visible_line(self._title), style="bold"), align="left", style="bright_black")
        if self._metrics:
            numbers = self._numbers(self._metrics, columns)
        else:
            numbers = [Text("no step is logged yet")]
        file = io.StringIO()
        # rich reads TERM, COLORTERM and NO_COLOR itself.
        console = Console(file=file, width=columns, force_terminal=True, legacy_windows=False, highlight=False)
        for part in (title, self._bar.get_renderable(), *numbers):
            console.print(part, no_wrap=True, overflow="ellipsis", crop=True)
        return file.getvalue().splitlines()

    def _numbers(self, m: StepMetrics, columns: int) -> list[Text]:
        """Return the lines on loss, learning rate, speed and time."""
        from rich.text import Text

        def line(name: str, value: str, rest: str, curve: Sequence[float] = ()) -> Text:
            if curve:
                bars = f"{sparkline(curve, columns // 3)} "
            else:
                bars = ""
            return Text.assemble((f"{name:<6}", "bright_black"), (f"{value:<9}", "bold"), (bars, "yellow"), f" {rest}")

        norm = "" if m.grad_norm is None else f"gradient norm {m.grad_norm:.3f}"
        scale = "" if m.loss_scale is None else f"  loss scale {m.loss_scale:g}"
        skipped = f" ({m.skipped_steps} skipped)" if m.skipped_steps else ""
        mfu = "" if m.mfu is None else f"  mfu {m.mfu:.1%}"
        power = "" if m.power_w is None else f"  {m.power_w:.0f} W"
        heat = "" if m.temperature_c is None else f"  {m.temperature_c:.0f} °C"
        memory = f"memory {m.peak_memory_bytes / 2**30:.2f} GiB"
        of_each = f" {m.tokens_per_second_per_device:,.0f} per device"
        spent_s = dict(self._meter.spent_s)
        total_s = sum(spent_s.values()) or 1.0
        shares = Text("time ", style="bright_black")
        for name, (words, colour) in _SHARES.items():
            if spent_s.get(name, 0.0) >= 0.005 * total_s:
                shares.append(f" {words} ", colour).append(f"{spent_s[name] / total_s:.0%} ", "default")
        return [
            line("loss", f"{m.loss:.4f}", self._validation, self._losses),
            line("lr", f"{m.lr:.2e}", f"{norm}{scale}{skipped}", self._rates),
            line(
                "speed",
                f"{m.tokens_per_second:,.0f} tokens/s",
                f"{of_each}{mfu}  {memory}{power}{heat}  {m.tokens_seen:,} tokens seen",
            ),
            shares,
        ]
