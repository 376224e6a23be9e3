from __future__ import annotations

import pytest

from llmscale.terminal.table import Column, output_width, table_lines, wrap_line

COLUMNS = (
    Column("name", is_text=True),
    Column("size", drop=1),
    Column("loss"),
    Column("command", is_text=True, drop=2, least=12),
)
ROWS = (("first", "1,000", "2.5", "train --ds zero2 --steps 100"), (), ("second one", "5", "10.25", "-"))


def test_without_a_limit_everything_is_there() -> None:
    assert list(table_lines(COLUMNS, ROWS)) == [
        "name         size  loss command",
        "first       1,000   2.5 train --ds zero2 --steps 100",
        "",
        "second one      5 10.25 -",
    ]


@pytest.mark.parametrize("width", [25, 40, 45, 60, 200])
def test_lines_fit_and_what_is_cut_or_left_out_is_said(width: int) -> None:
    lines = list(table_lines(COLUMNS, ROWS, width))
    table, note = lines[:4], " ".join(" ".join(lines[4:]).split())
    assert max(map(len, lines)) <= width
    assert "10.25" in table[3] and "second one" in table[3]
    if width >= 60:
        assert note == "" and table == list(table_lines(COLUMNS, ROWS))
    elif width >= 40:
        # Shortened before anything is dropped.
        assert note == "" and table[1].endswith("...") and "1,000" in table[1]
    else:
        assert note.startswith("(too narrow for: command;") and "1,000" in table[1]


def test_text_is_wrapped_behind_its_indent_and_words_stay_whole() -> None:
    assert list(wrap_line("short", 40)) == ["short"]
    assert list(wrap_line("  a line that is long", 14)) == ["  a line that", "    is long"]
    assert list(wrap_line("x" * 50, 40)) == ["x" * 50]
    assert list(wrap_line("a " * 100, None)) == ["a " * 100]


@pytest.mark.parametrize(
    ("message", "width"), [("80", 80), ("", None), ("0", None), ("-5", None), ("abc", None), ("³", None), ("3", 40)]
)
def test_the_width_of_a_pipe_is_what_columns_says(
    message: str, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", message)
    assert output_width() == width
