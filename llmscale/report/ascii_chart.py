"""Draw a small chart for a terminal: points over steps, and a level to compare them with. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Point = tuple[int, float]


def draw_chart(
    series: Mapping[str, Sequence[Point]], level: float | None = None, *, width: int = 64, height: int = 14
) -> str:
    """Return lines of text, `height` rows of `width` columns with axes, or an empty string without points.

    `series` maps a one-character marker to (step, value) points; later markers are drawn over earlier ones. Points that
    share a column are averaged, values that are not finite are left out. `level` is a horizontal line of dashes.
    """
    finite = {marker: [p for p in points if math.isfinite(p[1])] for marker, points in series.items()}
    steps = [step for points in finite.values() for step, _ in points]
    if not steps:
        return ""
    values = [value for points in finite.values() for _, value in points] + ([] if level is None else [level])
    low, high = min(values), max(values)
    first, last = min(steps), max(steps)
    grid = [[" "] * width for _ in range(height)]
    if level is not None:
        grid[_place(high - level, high - low, height)] = ["-"] * width
    for marker, points in finite.items():
        columns: dict[int, list[float]] = {}
        for step, value in points:
            columns.setdefault(_place(step - first, last - first, width), []).append(value)
        for column, held in columns.items():
            grid[_place(high - sum(held) / len(held), high - low, height)][column] = marker
    return "\n".join([*_rows(grid, low, high), _axis(first, last, width)])


def _place(offset: float, span: float, cells: int) -> int:
    """Return the cell of `offset` within [0, span], one of `cells`."""
    return 0 if span == 0 else min(round(offset / span * (cells - 1)), cells - 1)


def _rows(grid: list[list[str]], low: float, high: float) -> list[str]:
    """Return the rows, with labels at the top, in the middle and at the bottom."""
    last = len(grid) - 1
    labels = {row: f"{high - (high - low) * row / max(last, 1):.2f}" for row in (0, last // 2, last)}
    return [f"{labels.get(row, ''):>8} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]


def _axis(first: int, last: int, width: int) -> str:
    left, right = str(first), str(last)
    return f"{'':>8} +{'-' * width}\n{'step':>8}  {left}{right:>{max(width - len(left), len(right) + 1)}}"
