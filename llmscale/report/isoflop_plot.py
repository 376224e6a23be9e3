"""Plot loss over model size for budgets around the planned one. Needs matplotlib only when it is called."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.planning.scaling import Interval, ParametricLaw, Point
from llmscale.report.save_figure import import_pyplot, save_figure
from llmscale.terminal.human_numbers import format_quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Budgets, in multiples of the planned one; colours from light to dark (ColorBrewer's Blues).
_BUDGETS = (0.01, 0.1, 1.0, 10.0)
_COLOURS = ("#9ecae1", "#6baed6", "#2171b5", "#08306b")
#: Sizes drawn, in multiples of each budget's optimum.
_SPREAD = 20.0
_POINTS = 121


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
    low, high = min(losses), max(losses)
    axes.set(xscale="log", ylim=(low - 0.15 * (high - low), high + 0.45 * (high - low)))
    axes.set(xlabel="parameters", ylabel="loss, nats per token")
    ticks = _powers_of_ten(*axes.get_xlim())
    axes.set_xticks(ticks, [format_quantity(tick) for tick in ticks])
    axes.grid(alpha=0.25)
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    save_figure(figure, path)


def _draw_budgets(axes: Axes, law: ParametricLaw, planned_flops: float) -> list[float]:
    """Draw a curve per budget and a line through their lowest points; return these points' losses."""
    valleys = []
    for multiple, colour in zip(_BUDGETS, _COLOURS, strict=True):
        flops = planned_flops * multiple
        best = law.optimal_parameters(flops)
        sizes = [best * _SPREAD ** (2 * step / (_POINTS - 1) - 1) for step in range(_POINTS)]
        losses = [law.loss(size, flops / (6 * size)) for size in sizes]
        axes.plot(sizes, losses, color=colour, linewidth=2.4 if multiple == 1 else 1.4, label=f"{flops:.2e} FLOPs")
        valleys.append((best, law.optimal_loss(flops)))
    axes.plot(*zip(*valleys, strict=True), color="0.4", linestyle=":", marker="o", markersize=4, label="optimal")
    return [loss for _, loss in valleys]


def _powers_of_ten(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
