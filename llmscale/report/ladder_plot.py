"""Draw a scaling ladder: loss over size at equal compute, loss over compute, and longer schedules beside own ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmscale.planning.scaling import ParametricLaw
from llmscale.report.ladder_fit import LadderFit, RateFit
from llmscale.report.save_figure import import_pyplot, save_figure
from llmscale.terminal.human_numbers import format_quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ISOFLOP_NAME, LOSS_NAME, RATES_NAME = "isoflop.png", "loss.png", "rates.png"
_BLUE, _ORANGE, _GREY = "#0072b2", "#d55e00", "0.55"
_POINTS = 60


def plot_ladder(folder: Path, fit: LadderFit) -> None:
    """Write both pictures into a ladder's folder. Raises ConfigError without matplotlib."""
    pyplot = import_pyplot("--png and --svg need")
    figure, axes = pyplot.subplots(figsize=(8.5, 5.5), layout="constrained")
    _draw_groups(axes, fit)
    _finish(axes, "parameters", "final validation loss by group, with parabolas where groups have equal compute")
    save_figure(figure, folder / ISOFLOP_NAME, "fit")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12.5, 5.2), layout="constrained")
    _draw_compute(left, fit)
    _finish(left, "training FLOPs, 6 N D", "loss over compute: curves of runs, and the optimum with its 80 % range")
    _draw_schedules(right, fit)
    _finish(right, "tokens", "dashed: the longest run of a size; dots: ends of runs with own schedules")
    save_figure(figure, folder / LOSS_NAME, "fit")


def plot_rates(folder: Path, fit: RateFit) -> None:
    """Write the loss over the learning rate into a sweep's folder. Raises ConfigError without matplotlib."""
    figure, axes = import_pyplot("--png and --svg need").subplots(figsize=(7.5, 5), layout="constrained")
    axes.plot(fit.rates, fit.losses, "o-", color=_BLUE, label=f"{format_quantity(fit.num_parameters)} parameters")
    if fit.best is not None and fit.parabola is not None:
        place = fit.losses.index(min(fit.losses))
        rates = np.geomspace(fit.rates[place - 1], fit.rates[place + 1], _POINTS)
        axes.plot(rates, np.polyval(fit.parabola, np.log(rates)), color=_GREY)
        lowest = float(np.polyval(fit.parabola, np.log(fit.best)))
        axes.plot(fit.best, lowest, "v", color=_ORANGE, markersize=9, label=f"lowest point: {fit.best:.3g}")
    _finish(axes, "peak learning rate", "final validation loss, each rate with its own schedule")
    save_figure(figure, folder / RATES_NAME, "fit")


def _finish(axes: Axes, label: str, title: str) -> None:
    axes.set(xscale="log", xlabel=label, ylabel="validation loss, nats per token")
    axes.grid(alpha=0.25)
    axes.set_title(title, fontsize=10, loc="left")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)


def _colours(keys: set[float]) -> dict[float, tuple[float, ...]]:
    """Return a colour for each key, from dark to light."""
    from matplotlib import colormaps

    last = max(1, len(keys) - 1)
    return {key: colormaps["viridis"](0.9 * index / last) for index, key in enumerate(sorted(keys))}


def _draw_groups(axes: Axes, fit: LadderFit) -> None:
    for group, colour in _colours({run.group for run in fit.runs}).items():
        runs = [run for run in fit.runs if run.group == group]
        label = f"{runs[0].flops:.1e} FLOPs" if fit.isoflops else f"group {group}"
        axes.plot([r.num_parameters for r in runs], [r.loss for r in runs], "o", color=colour, label=label)
    if fit.isoflops:
        ends, limits = [run.num_parameters for run in fit.runs], axes.get_ylim()
        sizes = np.geomspace(min(ends), max(ends), _POINTS)
        for parabola in fit.isoflops.parabolas:
            axes.plot(sizes, np.polyval(parabola, np.log(sizes)), color=_GREY, linewidth=1)
        axes.plot(fit.isoflops.sizes, fit.isoflops.losses, "v:", color=_ORANGE, markersize=8, label="lowest points")
        axes.set_ylim(limits)


def _draw_compute(axes: Axes, fit: LadderFit) -> None:
    measured = [(item.measured, _ORANGE) for item in fit.predictions if item.measured]
    colours = _colours({run.num_parameters for run in fit.runs})
    for run, colour in [*((run, colours[run.num_parameters]) for run in fit.runs), *measured]:
        flops, losses = np.array(run.curve).T * [[6 * run.num_parameters], [1]]
        axes.plot(flops, losses, color=colour, alpha=0.5, linewidth=1)
        axes.plot(run.flops, run.loss, "o", color=colour, markersize=4)
    # As floats, which a law that is not determined may divide by zero without a warning: it counts as unlimited.
    budgets = np.geomspace(min(run.flops for run in fit.runs), 4 * fit.next_flops, _POINTS).tolist()
    optima = [fit.parametric.predict(partial(ParametricLaw.optimal_loss, flops=flops)) for flops in budgets]
    axes.plot(budgets, [at.value for at in optima], color=_BLUE, label="optimum by approach 3")
    axes.fill_between(budgets, [at.low for at in optima], [at.high for at in optima], color=_BLUE, alpha=0.2)
    for item in fit.predictions:
        value, name = item.predicted.value, format_quantity(item.planned.num_parameters)
        errors = [[value - item.predicted.low], [item.predicted.high - value]]
        label = f"{name} parameters, held out: predicted{' and measured (dot)' if item.measured else ''}"
        axes.errorbar(item.planned.flops, value, errors, color=_ORANGE, capsize=5, label=label)
    axes.set_ylim(top=1.3 * max(run.loss for run in fit.runs))


def _draw_schedules(axes: Axes, fit: LadderFit) -> None:
    for size, colour in _colours({run.num_parameters for run in fit.runs if run.name in fit.longer}).items():
        runs = [run for run in fit.runs if run.num_parameters == size]
        axes.plot(*np.array(max(runs, key=lambda run: run.tokens).curve).T, "--", color=colour)
        label = f"{format_quantity(size)} parameters"
        axes.plot([run.tokens for run in runs], [run.loss for run in runs], "o", color=colour, label=label)
    axes.set_ylim(top=1.2 * max(run.loss for run in fit.runs))
