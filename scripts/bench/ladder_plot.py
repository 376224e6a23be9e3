"""ladder.py's picture: speed and memory by rung."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

GIB = 2**30


def plot_ladder(models: Mapping[str, Sequence[dict]], path: Path) -> None:
    """Two panels per model: speed as a multiple of the first rung's, peak memory in GiB. Raises ConfigError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from llmscale.report.save_figure import save_figure

    most = max(len(rows) for rows in models.values())
    figure, axes = pyplot.subplots(
        len(models), 2, figsize=(12, 0.36 * most * len(models) + 1.6), sharey="row", squeeze=False, layout="constrained"
    )
    for (speed, memory), (name, rows) in zip(axes, models.items(), strict=True):
        places = range(len(rows))
        speed.set_yticks(places, [row["rung"] for row in rows])
        speed.invert_yaxis()
        speed.set_title(f"{name}: speed, first rung = 1")
        for place, row in zip(places, rows, strict=True):
            draw_speed(speed, place, row)
        draw_memory(memory, rows)
        speed.margins(x=0.12)
        memory.set_title("peak memory of a rank, GiB")
    save_figure(figure, path)


def draw_speed(axis, place: int, row: dict) -> None:
    if "speed" not in row:
        axis.text(0.02, place, "not on this machine" if "not_here" in row else "failed", va="center", color="gray")
        return
    value = row["speed"]
    around = [[value["median"] - value["min"]], [value["max"] - value["median"]]]
    axis.barh(place, value["median"], color="tab:blue", xerr=around, ecolor="lightgray")
    axis.text(value["max"], place, f" {value['median']:.2f}", va="center", fontsize=8)


def draw_memory(axis, rows: Sequence[dict]) -> None:
    """Measured here, and counted for a GPU by the dry run: a pair of bars where there are both."""
    batch = next((row["dry_run"]["batch"] for row in rows if "batch" in row["dry_run"]), None)
    for offset, color, label, values in (
        (-0.2, "tab:orange", "measured here, at this run's batch", [row.get("memory_bytes") for row in rows]),
        (0.2, "tab:green", f"a GPU's by the dry run, batch {batch}", [row["dry_run"].get("bytes") for row in rows]),
    ):
        found = [(place, value / GIB) for place, value in enumerate(values) if value]
        if found:
            places, sizes = zip(*found, strict=True)
            bars = axis.barh([place + offset for place in places], sizes, height=0.38, color=color, label=label)
            axis.bar_label(bars, fmt=" %.2f", fontsize=7)
    axis.margins(x=0.12)
    axis.legend(loc="lower right")
