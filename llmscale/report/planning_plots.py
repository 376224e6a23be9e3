"""Plot the rows of `llmscale estimate`, and budgets around the one of `plan`. Matplotlib is imported when called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.memory.breakdown import GIB, Breakdown
from llmscale.memory.estimate import MemoryEstimate
from llmscale.planning.scaling import Interval, ParametricLaw, Point
from llmscale.report.save_figure import import_pyplot, save_figure
from llmscale.terminal.human_numbers import format_quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours that colour-blind readers can tell apart (Okabe and Ito), in the order of Breakdown's fields.
_CATEGORY_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#F0E442", "#CC79A7", "#D55E00")
_NAMES = {"logits_bytes": "logits and loss", "optimizer_bytes": "optimizer states", "buckets_bytes": "communication"}
#: Bars longer than this multiple of the GPU's memory are cut, with their number at the cut.
_LONGEST = 1.1
#: Budgets, in multiples of the planned one; colours from light to dark (ColorBrewer's Blues).
_BUDGETS = (0.01, 0.1, 1.0, 10.0)
_BUDGET_COLOURS = ("#9ecae1", "#6baed6", "#2171b5", "#08306b")
#: Sizes drawn, in multiples of each budget's optimum.
_SPREAD = 20.0
_POINTS = 121


@dataclass(frozen=True)
class MemoryBar:
    """One row of `llmscale estimate`."""

    label: str
    estimate: MemoryEstimate
    fits: bool
    is_recommended: bool


def plot_memory(path: Path, bars: Sequence[MemoryBar], gpu_bytes: int, title: str) -> None:
    """Draw to `path`, in the format of its suffix.

    Raises ConfigError without matplotlib, or when the file cannot be written.
    """
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.28 * len(bars)), layout="constrained")
    limit = _LONGEST * gpu_bytes / GIB
    parts = _parts(bars)
    ends = [0.0] * len(bars)
    for (name, values), colour in zip(parts.items(), (*_CATEGORY_COLOURS, "#BBBBBB", "#777777"), strict=True):
        widths = [min(value / GIB, max(0.0, limit - end)) for value, end in zip(values, ends, strict=True)]
        axes.barh(range(len(bars)), widths, left=ends, color=colour, label=name, height=0.75)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, (bar, end) in enumerate(zip(bars, ends, strict=True)):
        total = bar.estimate.total_bytes / GIB
        text = f"{total:,.1f}" + (" »" if total > limit else "")
        axes.text(
            end + 0.005 * limit,
            row,
            text,
            va="center",
            fontsize=8,
            color="black" if bar.fits else "#B00000",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    axes.axvline(gpu_bytes / GIB, color="black", linestyle="--", linewidth=1)
    axes.text(gpu_bytes / GIB, -0.9, f" the GPU: {gpu_bytes / GIB:.1f} GiB", va="bottom", fontsize=9)
    axes.set_yticks(range(len(bars)), [f"{'→ ' if bar.is_recommended else ''}{bar.label}" for bar in bars], fontsize=8)
    for tick, bar in zip(axes.get_yticklabels(), bars, strict=True):
        tick.set_fontweight("bold" if bar.is_recommended else "normal")
        tick.set_color("black" if bar.fits else "#777777")
    axes.set(xlim=(0, limit * 1.08), ylim=(len(bars) - 0.4, -1.6), xlabel="GiB on one GPU at the peak")
    axes.set_title(title, fontsize=10, loc="left")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    save_figure(figure, path)


def _parts(bars: Sequence[MemoryBar]) -> dict[str, list[int]]:
    """Return the bytes of each bar, by category."""
    peaks = [bar.estimate.peak for bar in bars]
    parts = {
        _NAMES.get(field.name, field.name.removesuffix("_bytes")): [getattr(peak, field.name) for peak in peaks]
        for field in fields(Breakdown)
    }
    parts["allocator's reserve"] = [bar.estimate.reserve_bytes for bar in bars]
    parts["context and libraries"] = [bar.estimate.context_bytes for bar in bars]
    return parts


def plot_isoflops(path: Path, law: ParametricLaw, chosen: Point, optimum: Interval | float, title: str) -> None:
    """Draw to `path`, in the format of its suffix. `optimum` is N* for the chosen point's FLOPs.

    Raises ConfigError without matplotlib, or when the file cannot be written.
    """
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(8.5, 5.5), layout="constrained")
    losses = [chosen.loss, *_draw_budgets(axes, law, chosen.flops)]
    if isinstance(optimum, Interval):
        axes.axvspan(optimum.low, optimum.high, color="#E69F00", alpha=0.18, label="80 % range of the optimum")
    words = f"{format_quantity(chosen.num_parameters)} on {format_quantity(chosen.tokens)} tokens: {chosen.loss:.3f}"
    axes.plot(
        chosen.num_parameters, chosen.loss, marker="*", markersize=16, color="#D55E00", linestyle="none", label=words
    )
    low = min(losses)
    high = max(losses)
    axes.set(xscale="log", ylim=(low - 0.15 * (high - low), high + 0.45 * (high - low)))
    axes.set(xlabel="parameters", ylabel="loss, nats per token")
    first, last = (math.log10(end) for end in axes.get_xlim())
    ticks = [10.0**power for power in range(math.ceil(first), math.floor(last) + 1)]
    axes.set_xticks(ticks, [format_quantity(tick) for tick in ticks])
    axes.grid(alpha=0.25)
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    save_figure(figure, path)


def _draw_budgets(axes: Axes, law: ParametricLaw, planned_flops: float) -> list[float]:
    """Draw a curve per budget and a line through their lowest points; return these points' losses."""
    valleys = []
    for multiple, colour in zip(_BUDGETS, _BUDGET_COLOURS, strict=True):
        flops = planned_flops * multiple
        best = law.optimal_parameters(flops)
        sizes = [best * _SPREAD ** (2 * step / (_POINTS - 1) - 1) for step in range(_POINTS)]
        losses = [law.loss(size, flops / (6 * size)) for size in sizes]
        axes.plot(sizes, losses, color=colour, linewidth=2.4 if multiple == 1 else 1.4, label=f"{flops:.2e} FLOPs")
        valleys.append((best, law.optimal_loss(flops)))
    axes.plot(*zip(*valleys, strict=True), color="0.4", linestyle=":", marker="o", markersize=4, label="optimal")
    return [loss for _, loss in valleys]
