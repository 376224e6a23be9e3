"""The chart shows what it was given, at the right place."""

from __future__ import annotations

import math

from llmscale.report.ascii_chart import draw_chart


def plot_rows(chart: str) -> list[str]:
    """The plot area, from the top row to the bottom row, without labels and axes."""
    return [line.split("|", 1)[1] for line in chart.splitlines() if "|" in line]


def test_a_falling_line_runs_from_top_left_to_bottom_right() -> None:
    chart = draw_chart({"*": [(step, 10.0 - step) for step in range(1, 9)]}, width=8, height=8)
    assert plot_rows(chart) == [" " * column + "*" for column in range(8)]
    assert chart.splitlines()[0].startswith("    9.00 |")
    assert "    2.00 |" in chart
    assert chart.splitlines()[-1].split() == ["step", "1", "8"]


def test_the_level_is_part_of_the_range_and_points_are_drawn_over_it() -> None:
    rows = plot_rows(draw_chart({"*": [(1, 8.0), (5, 4.0)]}, level=6.0, width=5, height=5))
    assert rows == ["*", "", "-----", "", "    *"]
    rows = plot_rows(draw_chart({"*": [(1, 8.0), (5, 7.0)]}, level=6.0, width=5, height=3))
    assert rows == ["*", "    *", "-----"]


def test_later_series_cover_earlier_ones() -> None:
    rows = plot_rows(draw_chart({"*": [(1, 2.0), (3, 1.0)], "o": [(3, 1.0)]}, width=3, height=2))
    assert rows == ["*", "  o"]


def test_points_of_one_column_are_averaged() -> None:
    points = [(1, 4.0), (50, 1.0), (50, 3.0), (51, 2.0), (100, 0.0)]
    assert plot_rows(draw_chart({"*": points}, width=3, height=5))[2] == " *"


def test_a_single_point_and_a_flat_line_have_a_place() -> None:
    assert plot_rows(draw_chart({"*": [(7, 1.5)]}, width=3, height=2))[0] == "*"
    assert plot_rows(draw_chart({"*": [(1, 1.5), (3, 1.5)]}, width=3, height=2))[0] == "* *"


def test_a_loss_that_is_no_number_is_left_out() -> None:
    assert plot_rows(draw_chart({"*": [(1, 2.0), (2, math.nan), (3, 1.0)]}, width=3, height=2)) == ["*", "  *"]
    assert draw_chart({"*": [(1, math.nan)]}) == ""
    assert draw_chart({"*": []}) == ""
