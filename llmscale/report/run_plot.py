"""Draw the main curves of runs as one picture. Needs matplotlib only when it is called."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmscale.report.save_figure import import_pyplot, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Eight colours that colour-blind readers can tell apart (after Okabe and Ito); further runs have other dashes.
_COLOURS = ("#0072b2", "#d55e00", "#00805d", "#b3478f", "#8a6d00", "#3aa0dc", "#5b3fa0", "#4d4d4d")
_DASHES = ("-", "--", ":", "-.")
#: Half-life of the mean that smooths a curve, as a fraction of all steps.
_SMOOTHING = 0.01
#: Most runs whose restarts are drawn: of more they could not be told apart.
_MOST_MARKED = 3
_SIGNS = {"spike": "^", "nonfinite": "x", "slow": "d", "router": "s"}
_UNITS = {"nats": "nats per token", "bits": "bits per byte"}
Json = Mapping[str, Any]  # as data.build_report builds it


def plot_runs(path: Path, report: Mapping[str, object], format: str) -> None:
    """Draw what data.build_report returned to `path`, as `png` or `svg`. Raises ConfigError without matplotlib,
    or when the file cannot be written."""
    pyplot = import_pyplot("--png and --svg need")
    from matplotlib import ticker

    runs: Sequence[Json] = report["runs"]  # type: ignore[assignment]  # as data.build_report builds it
    charts: Sequence[Json] = [chart for chart in report["charts"] if chart["is_pictured"]]  # type: ignore[attr-defined]
    rows = -(-len(charts) // 2)
    figure, grid = pyplot.subplots(rows, 2, figsize=(12, 3.1 * rows + 0.4), layout="constrained", squeeze=False)
    cells: list[Axes] = list(grid.flat)
    for axes, chart in zip(cells, charts, strict=False):
        if any(curve.get("bytes_per_token") for curve in chart["curves"]):
            unit = str(report["unit"])
        else:
            unit = ""
        for curve in chart["curves"]:
            _draw(axes, curve, runs[curve["run"]], unit)
        is_first = axes is cells[0]
        for number, run in enumerate(runs if len(runs) <= _MOST_MARKED else ()):
            _draw_marks(axes, run, _COLOURS[number % 8] if len(runs) > 1 else "0.45", with_words=is_first)
        if chart["log_axis"] == "always":
            axes.set_yscale("log")
        if any(curve["label"] not in [run["name"] for run in runs] for curve in chart["curves"]):
            axes.legend(fontsize=7, frameon=False)
        axes.set_title(f"{chart['title']}, {_UNITS.get(unit, chart['unit'])}", fontsize=10, loc="left")
        axes.set_xlabel("step", fontsize=9)
        axes.set_xlim(0, max(run["axis"]["steps"][-1] for run in runs) * 1.02)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
    for axes in cells[len(charts) :]:
        axes.remove()
    handles = [
        pyplot.Line2D([], [], color=_COLOURS[number % 8], linestyle=_DASHES[number // 8 % 4], label=_plain(run["name"]))
        for number, run in enumerate(runs)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save_figure(figure, path, f"--{format}", format)


def _draw(axes: Axes, curve: Json, run: Json, unit: str) -> None:
    number = curve["run"] if curve["colour"] is None else curve["colour"]
    steps = np.array(curve.get("steps", run["axis"]["steps"]), dtype=float)
    if unit == "bits":
        factor = _bits_per_nat(curve.get("bytes_per_token"))
    else:
        factor = 1.0
    values = np.array(curve["values"], dtype=float) * factor  # None becomes NaN
    style: dict[str, Any] = {"color": _COLOURS[number % 8], "label": _plain(curve["label"])}
    if curve.get("is_smoothed") and len(steps) >= 100:
        axes.plot(steps, values, color=style["color"], linewidth=0.6, alpha=0.25)
        values = _smooth(steps, values, _SMOOTHING * steps[-1])
    style["drawstyle"] = "steps-post" if curve.get("is_stepped") else "default"
    style["linestyle"] = (0, (5, 3)) if curve.get("is_dashed") else _DASHES[number // 8 % 4]
    style["marker"] = "o" if curve.get("has_points") or 2 < len(steps) <= 20 else None
    axes.plot(steps, values, markersize=3, linewidth=1.4, **style)


def _bits_per_nat(bytes_per_token: float | None) -> float:
    """Return bits per byte of a nat per token; NaN, which draws nothing, if the ratio is unknown."""
    if bytes_per_token:
        return 1 / math.log(2) / bytes_per_token
    return math.nan


def _draw_marks(axes: Axes, run: Json, colour: str, *, with_words: bool) -> None:
    """Draw labelled lines at restarts, and signs above the plot at spikes, NaN losses and slow ranks."""
    starts = [mark for mark in run["marks"] if mark["kind"] == "start"]
    for mark in starts[1:]:
        axes.axvline(mark["step"], color=colour, linestyle="--", linewidth=0.8, alpha=0.8)
        if with_words:
            words: dict[str, Any] = {"fontsize": 7, "color": colour, "rotation": 90, "va": "top", "ha": "right"}
            axes.text(mark["step"], 0.98, _plain(mark["short"]), transform=axes.get_xaxis_transform(), **words)
    for kind, sign in _SIGNS.items():
        at = [mark["step"] for mark in run["marks"] if mark["kind"] == kind]
        style: dict[str, Any] = {"color": "#b42318", "linestyle": "none", "markersize": 5, "clip_on": False}
        (drawn,) = axes.plot(at, [1.0] * len(at), marker=sign, transform=axes.get_xaxis_transform(), **style)
        drawn.set_in_layout(False)


def _smooth(steps: np.ndarray, values: np.ndarray, half_life: float) -> np.ndarray:
    """Smooth by means whose weights halve every `half_life` steps to either side; NaN values stay."""
    sums = np.zeros(len(values))
    weights = np.zeros(len(values))
    for order in (range(len(values)), range(len(values) - 1, -1, -1)):
        total = weight = 0.0
        last = None
        for index in order:
            if np.isnan(values[index]):
                continue
            if last is None:
                decay = 1.0
            else:
                decay = 2.0 ** (-abs(steps[index] - last) / half_life)
            total = total * decay
            weight = weight * decay
            last = steps[index]
            sums[index] += total
            weights[index] += weight
            total = total + values[index]
            weight = weight + 1
    return (sums + values) / (weights + 1)


def _plain(text: str) -> str:
    """Escape dollar signs, which begin matplotlib's mathematics."""
    return text.replace("$", r"\$")
