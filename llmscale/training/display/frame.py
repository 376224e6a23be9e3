"""One frame of the live view, as lines of a terminal's text. No torch; `rich` is imported when the first is drawn."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmscale.training.step_metrics import StepMetrics, format_duration
from llmscale.untrusted.terminal import make_visible_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_BARS = "▁▂▃▄▅▆▇█"
#: Of the values drawn, the share that lies below the top of a sparkline: one spike must not flatten the rest.
_TOP = 0.95
#: Names and colours of where the time goes, in the order of the bar.
_SHARES = {
    "forward_backward": ("forward/backward", "green"),
    "optimizer_step": ("step", "cyan"),
    "data_wait": ("data wait", "red"),
    "saving": ("save", "magenta"),
    "evaluating": ("evaluation", "blue"),
    "other": ("other", "bright_black"),
}
#: Logged values that a sparkline remembers; above, every second one goes.
_MOST_VALUES = 4096


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
        if len(self.values) > _MOST_VALUES:
            self.values, self._stride = self.values[::2], self._stride * 2


@dataclass
class RunProgress:
    """What a frame shows; everything is of this start."""

    title: str
    """The run and what it runs on."""
    total_steps: int
    step: int = 0
    elapsed_s: float = 0.0
    doing: str = ""
    """What is going on instead of training."""
    metrics: StepMetrics | None = None
    """Of the newest logged step."""
    validation: tuple[int, float] | None = None
    """Step, and loss in nats per token."""
    loss: Curve = field(default_factory=Curve)
    learning_rate: Curve = field(default_factory=Curve)
    spent_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase and pause."""


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as one row of bars, at most `width`: means of neighbours where there are more, a blank for what is no
    number."""
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
    """At most `rows` lines of at most `columns` characters, with the terminal's codes for colour where it has any."""
    from rich.console import Console

    file = io.StringIO()
    # rich reads TERM, COLORTERM and NO_COLOR itself.
    console = Console(file=file, width=columns, height=rows, force_terminal=True, legacy_windows=False, highlight=False)
    lines = _lines(progress, columns)
    # The most telling ones stay where there is room for few.
    kept = sorted(sorted(lines, key=lambda line: line[0])[:rows], key=lambda line: lines.index(line))
    for _, line in kept:
        _print_line(console, line)
    return file.getvalue().splitlines()


def _print_line(console: Console, line: RenderableType) -> None:
    console.print(line, no_wrap=True, overflow="ellipsis", crop=True, end="\n")


def _lines(progress: RunProgress, columns: int) -> list[tuple[int, RenderableType]]:
    """Each with its rank: the lower, the longer it stays in a low terminal."""
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
    return Text.assemble(
        ("speed ", "bright_black"),
        (f"{m.tokens_per_second:,.0f} tokens/s", "bold"),
        f"   {m.tokens_per_second_per_device:,.0f} per device{mfu}   memory {m.peak_memory_bytes / 2**30:.2f} GiB"
        f"   {m.tokens_seen:,} tokens seen",
    )


def _shares_line(spent_s: dict[str, float], columns: int) -> RenderableType:
    from rich.text import Text

    known = {name: spent_s.get(name, 0.0) for name in _SHARES}
    total = sum(spent_s.values()) or 1.0
    known["other"] += total - sum(known.values())
    said = {name: seconds for name, seconds in known.items() if seconds >= 0.005 * total}
    words = Text()
    for name, seconds in said.items():
        words.append(f"  {_SHARES[name][0]} ", style=_SHARES[name][1])
        words.append(f"{seconds / total:.0%}")
    line = Text("time ", style="bright_black")
    width, edge = max(0, min(40, columns - len(words) - len(line))), 0.0
    for name, seconds in said.items():
        begin, edge = round(edge), edge + seconds / total * width
        line.append("█" * (round(edge) - begin), style=_SHARES[name][1])
    return line + words
