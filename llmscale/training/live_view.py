"""How a run is shown while it trains: a line per logged step, or a view in a terminal's last rows.

A thread draws the view twice a second. `rich` is imported for the first frame.

The last rows of a terminal, reserved for a view that is drawn repeatedly.

The rows above become the terminal's scrolling region (DECSTBM), and the cursor always stays in it. Everything printed
by Python, a C++ library, another rank or the launcher scrolls above the view and tears nothing. The cursor is never
hidden, so it need not be restored. Lines that scroll off the top go to the terminal's history as usual.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmscale.training.step_metrics import StepMeter, StepMetrics, format_duration, format_step
from llmscale.untrusted.terminal import make_visible_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


#: Between two frames. Drawing one takes milliseconds of the interpreter, which the training thread may need.
_FRAME_S = 0.5
_MAX_ROWS = 6
_BARS = "▁▂▃▄▅▆▇█"
#: Fraction of the drawn values below the top of a sparkline: one spike must not flatten the others.
_TOP = 0.95
#: Names and colours of the shares of time, in the order of the bar.
_SHARES = {
    "forward_backward": ("forward/backward", "green"),
    "optimizer_step": ("step", "cyan"),
    "data_wait": ("data wait", "red"),
    "saving": ("save", "magenta"),
    "evaluating": ("evaluation", "blue"),
    "other": ("other", "bright_black"),
}
#: Logged values that a sparkline remembers; beyond, every second one is dropped.
_MAX_VALUES = 4096


class Display(ABC):
    """Output of a run on rank 0; lines printed by others do not pass through it."""

    def begin(self, step: int) -> None:  # noqa: B027  plain lines need no beginning
        """Training begins after `step`."""

    @abstractmethod
    def show_step(self, metrics: StepMetrics) -> None:
        """Show a logged step."""

    def show_validation(self, step: int, loss: float) -> None:  # noqa: B027  a line is printed anyway
        """Show a validation loss in nats per token."""

    def close(self) -> None:  # noqa: B027  plain lines need no end
        """End the session; may be called twice, and from any thread."""


class PlainLines(Display):
    """A line per logged step."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def show_step(self, metrics: StepMetrics) -> None:
        print(format_step(metrics, self._total_steps), flush=True)


def open_display(
    title: str, total_steps: int, meter: StepMeter, *, plain: bool, variables: Mapping[str, str]
) -> Display:
    """Return a view if stdout is a suitable terminal and `rich` is installed, else or if `plain` lines."""
    terminal = None if plain else find_terminal(variables)
    if terminal is None:
        return PlainLines(total_steps)
    try:
        import rich  # noqa: F401  # is it installed?
    except ImportError:
        return PlainLines(total_steps)
    return LiveView(BottomRows(terminal), title, total_steps, meter)


def find_terminal(variables: Mapping[str, str]) -> int | None:
    """Return the descriptor of the terminal that this process prints to, or None if it cannot show a view.

    A pipe, a file, a terminal that cannot move the cursor and one without Unicode cannot. `llmscale train`, deepspeed
    and torchrun let ranks print straight to their terminal; `llmscale launch`, srun and ssh put a pipe between.
    """
    stream = sys.stdout
    try:
        is_fit = stream.isatty() and variables.get("TERM", "dumb") not in ("", "dumb", "unknown")
        if not is_fit or "utf" not in (stream.encoding or "").lower() or not all(os.get_terminal_size(stream.fileno())):
            return None
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None


@dataclass
class Curve:
    """Values over the steps of this start, thinned out as they grow."""

    values: list[float] = field(default_factory=list)
    _stride: int = 1
    _seen: int = 0

    def add(self, value: float) -> None:
        if self._seen % self._stride == 0:
            self.values.append(value)
        self._seen += 1
        if len(self.values) > _MAX_VALUES:
            self.values, self._stride = self.values[::2], self._stride * 2


@dataclass
class RunProgress:
    """Contents of a frame, all about this start."""

    title: str
    """Name of the run, and its hardware."""
    total_steps: int
    step: int = 0
    elapsed_s: float = 0.0
    doing: str = ""
    """Current interruption of training, if any."""
    metrics: StepMetrics | None = None
    """Metrics of the newest logged step."""
    validation: tuple[int, float] | None = None
    """Step, and loss in nats per token."""
    loss: Curve = field(default_factory=Curve)
    learning_rate: Curve = field(default_factory=Curve)
    spent_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase and pause."""


class LiveView(Display):
    """A view that reads the meter's counters; everything else comes from the methods."""

    def __init__(self, rows: BottomRows, title: str, total_steps: int, meter: StepMeter) -> None:
        self._rows, self._meter = rows, meter
        self._progress = RunProgress(title, total_steps)
        self._steps_before = 0
        """Steps done before this start."""
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        self._steps_before = step - self._meter.done_steps
        if self._thread is None:
            self._began = time.monotonic()
            # A short run may end before the thread's first frame.
            self._draw_frame()
            self._thread = threading.Thread(target=self._draw_frames, name="live view", daemon=True)
            self._thread.start()

    def show_step(self, metrics: StepMetrics) -> None:
        self._progress.loss.add(metrics.loss)
        self._progress.learning_rate.add(metrics.lr)
        self._progress.metrics = metrics

    def show_validation(self, step: int, loss: float) -> None:
        self._progress.validation = (step, loss)

    def close(self) -> None:
        """Free the rows, and print the newest step's line; a second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._rows.close()
        if self._progress.metrics is not None:
            print(format_step(self._progress.metrics, self._progress.total_steps), flush=True)

    def _draw_frames(self) -> None:
        while not self._ended.wait(_FRAME_S) and self._draw_frame():
            pass

    def _draw_frame(self) -> bool:
        """Return False if the terminal is gone."""
        try:
            columns, rows = self._rows.size()
            self._rows.draw(render_frame(self._now(), columns, min(rows, _MAX_ROWS)))
        except OSError:
            return False
        return True

    def _now(self) -> RunProgress:
        progress = self._progress
        progress.step = self._steps_before + self._meter.done_steps
        progress.elapsed_s = time.monotonic() - self._began
        progress.doing = self._meter.pausing_for or ""
        progress.spent_s = dict(self._meter.spent_s)
        return progress


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as one row of at most `width` bars, means of neighbours if there are more, blank for NaN."""
    width = min(width, len(values))
    if width < 1:
        return ""
    edges = [number * len(values) // width for number in range(width + 1)]
    means = []
    for begin, end in itertools.pairwise(edges):
        numbers = [value for value in values[begin:end] if math.isfinite(value)]
        means.append(sum(numbers) / len(numbers) if numbers else math.nan)
    finite = sorted(mean for mean in means if math.isfinite(mean))
    if not finite:
        return " " * width
    low, high = finite[0], finite[min(len(finite) - 1, math.ceil(_TOP * len(finite)) - 1)]
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[min(7, round((mean - low) * scale))] if math.isfinite(mean) else " " for mean in means)


def render_frame(progress: RunProgress, columns: int, rows: int) -> list[str]:
    """Return at most `rows` lines of at most `columns` characters, with the terminal's colour codes."""
    from rich.console import Console

    file = io.StringIO()
    # rich reads TERM, COLORTERM and NO_COLOR itself.
    console = Console(file=file, width=columns, height=rows, force_terminal=True, legacy_windows=False, highlight=False)
    lines = _lines(progress, columns)
    # A low terminal keeps the most important lines.
    kept = sorted(sorted(lines, key=lambda line: line[0])[:rows], key=lambda line: lines.index(line))
    for _, line in kept:
        _print_line(console, line)
    return file.getvalue().splitlines()


def _print_line(console: Console, line: RenderableType) -> None:
    console.print(line, no_wrap=True, overflow="ellipsis", crop=True, end="\n")


def _lines(progress: RunProgress, columns: int) -> list[tuple[int, RenderableType]]:
    """Return the lines with their priority: the lowest number stays longest in a low terminal."""
    from rich.rule import Rule
    from rich.text import Text

    lines: list[tuple[int, RenderableType]] = [
        (5, Rule(Text(make_visible_line(progress.title), style="bold"), align="left", style="bright_black")),
        (0, _progress_line(progress, columns)),
    ]
    m = progress.metrics
    if m is None:
        return [*lines, (1, Text("no step is logged yet", style="bright_black"))]
    width = max(8, columns // 2)
    validation = ""
    if progress.validation:
        validation = f"  validation {progress.validation[1]:.4f} at {progress.validation[0]:,}"
    scale = "" if m.loss_scale is None else f"  loss scale {m.loss_scale:g}"
    scale += f" ({m.skipped_steps} skipped)" if m.skipped_steps else ""
    norm = "" if m.grad_norm is None else f"gradient norm {m.grad_norm:.3f}"
    return [
        *lines,
        (1, _curve_line("loss", f"{m.loss:.4f}", progress.loss, width, validation)),
        (3, _curve_line("lr", f"{m.lr:.2e}", progress.learning_rate, width, f"  {norm}{scale}")),
        (2, _speed_line(m)),
        (4, _shares_line(progress.spent_s, columns)),
    ]


def _progress_line(progress: RunProgress, columns: int) -> RenderableType:
    from rich.text import Text

    part = min(1.0, progress.step / max(1, progress.total_steps))
    left = format_duration(progress.metrics.eta_s) + " left" if progress.metrics else ""
    words = [f"{part:.1%}", f"{format_duration(progress.elapsed_s)} gone", left, progress.doing]
    width = max(4, min(40, columns // 4))
    done = round(part * width)
    return Text.assemble(
        (f"step {progress.step:,}/{progress.total_steps:,} ", "bold"),
        ("━" * done, "magenta"),
        ("━" * (width - done), "bright_black"),
        " " + "  ".join(word for word in words if word),
    )


def _curve_line(name: str, value: str, curve: Curve, width: int, rest: str) -> RenderableType:
    from rich.text import Text

    return Text.assemble(
        (f"{name:<5}", "bright_black"), (f"{value:<9}", "bold"), (sparkline(curve.values, width), "yellow"), rest
    )


def _speed_line(m: StepMetrics) -> RenderableType:
    from rich.text import Text

    mfu = "" if m.mfu is None else f"   mfu {m.mfu:.1%}"
    gpu = "" if m.power_w is None else f"   {m.power_w:.0f} W"
    gpu += "" if m.temperature_c is None else f"   {m.temperature_c:.0f} °C"
    return Text.assemble(
        ("speed ", "bright_black"),
        (f"{m.tokens_per_second:,.0f} tokens/s", "bold"),
        f"   {m.tokens_per_second_per_device:,.0f} per device{mfu}   memory {m.peak_memory_bytes / 2**30:.2f} GiB"
        f"{gpu}   {m.tokens_seen:,} tokens seen",
    )


def _shares_line(spent_s: dict[str, float], columns: int) -> RenderableType:
    from rich.text import Text

    known = {name: spent_s.get(name, 0.0) for name in _SHARES}
    total = sum(spent_s.values()) or 1.0
    known["other"] += total - sum(known.values())
    shown = {name: seconds for name, seconds in known.items() if seconds >= 0.005 * total}
    words = Text()
    for name, seconds in shown.items():
        words.append(f"  {_SHARES[name][0]} ", style=_SHARES[name][1])
        words.append(f"{seconds / total:.0%}")
    line = Text("time ", style="bright_black")
    width, edge = max(0, min(40, columns - len(words) - len(line))), 0.0
    for name, seconds in shown.items():
        begin, edge = round(edge), edge + seconds / total * width
        line.append("█" * (round(edge) - begin), style=_SHARES[name][1])
    return line + words


_SAVE_CURSOR, _RESTORE_CURSOR = "\x1b7", "\x1b8"
_ERASE_LINE, _ERASE_BELOW = "\x1b[2K", "\x1b[J"
_NO_STYLE, _WHOLE_SCREEN = "\x1b[0m", "\x1b[r"
#: One row down in the same column; at the bottom everything scrolls.
_INDEX = "\x1bD"
#: Frees the reserved rows, whoever reserved them.
GIVE_BACK = f"{_SAVE_CURSOR}{_WHOLE_SCREEN}{_RESTORE_CURSOR}{_ERASE_BELOW}"
#: Rows left to all other output.
_MIN_OTHER_ROWS = 4


class BottomRows:
    """The reserved rows of one terminal. Every change is one write, which no other process can interrupt."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._reserved: tuple[int, int, int] | None = None
        """Columns and rows of the terminal, and the number of reserved rows."""
        self._lock = threading.Lock()
        self._is_closed = False

    def size(self) -> tuple[int, int]:
        """Return (columns, rows that a view may have) of the terminal. Raises OSError if it is gone."""
        columns, rows = os.get_terminal_size(self._descriptor)
        return columns, max(0, rows - _MIN_OTHER_ROWS)

    def draw(self, lines: Sequence[str]) -> None:
        """Show as many lines as fit, each no wider than the terminal. Raises OSError."""
        with self._lock:
            if self._is_closed:
                return
            columns, rows = os.get_terminal_size(self._descriptor)
            lines = lines[: max(0, rows - _MIN_OTHER_ROWS)]
            wanted = (columns, rows, len(lines))
            text = "" if wanted == self._reserved else self._reserve(rows, len(lines))
            self._reserved = wanted
            first = rows - len(lines) + 1
            drawn = "".join(
                f"\x1b[{first + number};1H{_NO_STYLE}{_ERASE_LINE}{line}" for number, line in enumerate(lines)
            )
            self._write(f"{text}{_SAVE_CURSOR}{drawn}{_NO_STYLE}{_RESTORE_CURSOR}")

    def close(self) -> None:
        """Free the rows. Never raises; safe from any thread, even while another one hangs in `draw`."""
        held = self._lock.acquire(timeout=1.0)
        try:
            if not self._is_closed and self._reserved is not None:
                self._write(GIVE_BACK)
        except OSError:
            pass
        finally:
            self._is_closed = True
            if held:
                self._lock.release()

    def _reserve(self, rows: int, height: int) -> str:
        # Only an older view can be below the cursor, wherever a change of size moved it.
        if not height:
            return GIVE_BACK
        room = _INDEX * height + f"\x1b[{height}A"
        return f"{GIVE_BACK}{room}{_SAVE_CURSOR}\x1b[1;{rows - height}r{_RESTORE_CURSOR}"

    def _write(self, text: str) -> None:
        rest = text.encode()
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
