"""Tables and sentences that fit the terminal: wide tables lose columns, long lines are wrapped between words."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from llmscale.terminal.colour import is_terminal, paint, terminal_columns
from llmscale.terminal.human_numbers import with_singulars
from llmscale.untrusted.terminal import make_visible_line

#: Smallest width that COLUMNS and terminals can ask for.
_LEAST_WIDTH = 40
_ELLIPSIS = "..."


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    is_text: bool = False
    """Left alignment; numbers are aligned to the right."""
    drop: int = 0
    """Priority for removal if the table is too wide: the highest goes first; 0: never."""
    least: int = 0
    """Smallest width in characters that cells may be cut to; 0: never cut."""


def output_width() -> int | None:
    """Return the width of stdout: COLUMNS, else the terminal's; None, for no limit, if it is a file or a pipe."""
    width_text = os.environ.get("COLUMNS", "")
    if width_text.isascii() and width_text.isdecimal() and int(width_text[:6]) > 0:
        return max(_LEAST_WIDTH, int(width_text[:6]))
    if is_terminal(sys.stdout):
        columns = terminal_columns(sys.stdout)
    else:
        columns = None
    return columns and max(_LEAST_WIDTH, columns)


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> Iterator[str]:
    """Yield the lines of a table within `width`, headings first. An empty row gives an empty line.

    A last line names the columns that were left out. Columns are one space apart, two after text. Cells may hold
    untrusted text.
    """
    rows = [[make_visible_line(cell) for cell in row] for row in rows]
    longest = [
        max(len(cell) for cell in (column.name, *(row[i] for row in rows if row))) for i, column in enumerate(columns)
    ]
    visible = _choose(columns, longest, width)
    widths = _shorten(columns, longest, visible, width)
    for number, row in enumerate(([column.name for column in columns], *rows)):
        cells = (_cell(row[i], columns[i], widths[i]) for i in visible) if row else ()
        line = " ".join(cells).rstrip()
        yield paint(line, "bold", sys.stdout) if number == 0 else line
    if len(visible) < len(columns):
        names = ", ".join(column.name.strip() for i, column in enumerate(columns) if i not in visible)
        yield from wrap_line(f"  (too narrow for: {names}; COLUMNS=200 before the command shows all)", width)


def wrap_line(line: str, width: int | None) -> Iterator[str]:
    """Yield `line`, wrapped to `width` with a hanging indent, with `1 ranks` corrected to `1 rank`."""
    line = with_singulars(line)
    if width is None or len(line) <= width:
        yield line
        return
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    yield from textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def print_fitting(lines: Iterable[str]) -> None:
    """Print lines, wrapped to the width of stdout."""
    width = output_width()
    for line in lines:
        for part in wrap_line(line, width):
            print(part)


def _choose(columns: Sequence[Column], longest: Sequence[int], width: int | None) -> list[int]:
    """Return the indices of the columns to show."""
    visible = list(range(len(columns)))
    narrow = [min(size, column.least or size) for size, column in zip(longest, columns, strict=True)]
    while width is not None and _total(columns, narrow, visible) > width:
        last = max(visible, key=lambda i: (columns[i].drop, i))
        if not columns[last].drop:
            break
        visible.remove(last)
    return visible


def _shorten(columns: Sequence[Column], longest: Sequence[int], visible: Sequence[int], width: int | None) -> list[int]:
    """Return the width of every column."""
    widths = list(longest)
    for i in reversed(visible):
        if width is None:
            excess = 0
        else:
            excess = _total(columns, widths, visible) - width
        if excess > 0 and columns[i].least:
            widths[i] = max(columns[i].least, widths[i] - excess)
    return widths


def _total(columns: Sequence[Column], widths: Sequence[int], visible: Sequence[int]) -> int:
    """Return the length of the longest line, without the space that follows a last column of text."""
    size = sum(widths[i] + columns[i].is_text + 1 for i in visible) - 1
    return size - (columns[visible[-1]].is_text if visible else 0)


def _cell(text: str, column: Column, width: int) -> str:
    if len(text) > width:
        text = text[: width - len(_ELLIPSIS)] + _ELLIPSIS
    return f"{text:<{width}} " if column.is_text else f"{text:>{width}}"
