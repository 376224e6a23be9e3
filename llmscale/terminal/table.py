"""Tables and sentences that fit the terminal: columns are dropped or shortened, lines wrapped, none is broken."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from llmscale.terminal.colour import is_terminal, paint
from llmscale.terminal.human_numbers import with_singulars
from llmscale.untrusted.terminal import make_visible_line

#: Narrower is not taken seriously.
_LEAST_WIDTH = 40
_ELLIPSIS = "..."


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    is_text: bool = False
    """Set to the left; numbers are set to the right."""
    drop: int = 0
    """Where the table is too wide, the column with the highest goes first; 0 stays."""
    least: int = 0
    """Characters that its cells may be shortened to; 0: never."""


def output_width() -> int | None:
    """Columns for stdout: what COLUMNS says, else the terminal's; None, which is no limit, for a file or a pipe."""
    said = os.environ.get("COLUMNS", "")
    if said.isascii() and said.isdecimal() and int(said[:6]) > 0:
        return max(_LEAST_WIDTH, int(said[:6]))
    try:
        if is_terminal(sys.stdout) and (columns := os.get_terminal_size(sys.stdout.fileno()).columns):
            return max(_LEAST_WIDTH, columns)
    except (OSError, ValueError):
        pass
    return None


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> Iterator[str]:
    """Lines of a table within `width`, the head first; an empty row is an empty line. What was left out stands below.

    One space between columns, and one more behind text. Without a limit everything is there. Cells may hold what
    others wrote.
    """
    rows = [[make_visible_line(cell) for cell in row] for row in rows]
    longest = [
        max(len(cell) for cell in (column.name, *(row[i] for row in rows if row))) for i, column in enumerate(columns)
    ]
    kept = _choose(columns, longest, width)
    widths = _shorten(columns, longest, kept, width)
    for number, row in enumerate(([column.name for column in columns], *rows)):
        cells = (_cell(row[i], columns[i], widths[i]) for i in kept) if row else ()
        line = " ".join(cells).rstrip()
        yield paint(line, "bold", sys.stdout) if number == 0 else line
    if len(kept) < len(columns):
        names = ", ".join(column.name.strip() for i, column in enumerate(columns) if i not in kept)
        yield from wrap_line(f"  (too narrow for: {names}; COLUMNS=200 before the command shows all)", width)


def wrap_line(line: str, width: int | None) -> Iterator[str]:
    """Yield the line where it fits, else several, the later ones indented like the first and a little more."""
    line = with_singulars(line)
    if width is None or len(line) <= width:
        yield line
        return
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    yield from textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def print_fitting(lines: Iterable[str]) -> None:
    """Print lines, wrapped to what stdout has room for."""
    for line in wrap_lines(lines, output_width()):
        print(line)


def wrap_lines(lines: Iterable[str], width: int | None) -> Iterator[str]:
    """As wrap_line, of all lines."""
    for line in lines:
        yield from wrap_line(line, width)


def _choose(columns: Sequence[Column], longest: Sequence[int], width: int | None) -> list[int]:
    """Which columns are shown."""
    kept = list(range(len(columns)))
    narrow = [min(size, column.least or size) for size, column in zip(longest, columns, strict=True)]
    while width is not None and _total(columns, narrow, kept) > width:
        last = max(kept, key=lambda i: (columns[i].drop, i))
        if not columns[last].drop:
            break
        kept.remove(last)
    return kept


def _shorten(columns: Sequence[Column], longest: Sequence[int], kept: Sequence[int], width: int | None) -> list[int]:
    """How wide each column becomes."""
    widths = list(longest)
    for i in reversed(kept):
        excess = 0 if width is None else _total(columns, widths, kept) - width
        if excess > 0 and columns[i].least:
            widths[i] = max(columns[i].least, widths[i] - excess)
    return widths


def _total(columns: Sequence[Column], widths: Sequence[int], kept: Sequence[int]) -> int:
    """Characters of the longest line; the space behind the last column's text is none."""
    size = sum(widths[i] + columns[i].is_text + 1 for i in kept) - 1
    return size - (columns[kept[-1]].is_text if kept else 0)


def _cell(text: str, column: Column, width: int) -> str:
    if len(text) > width:
        text = text[: width - len(_ELLIPSIS)] + _ELLIPSIS
    return f"{text:<{width}} " if column.is_text else f"{text:>{width}}"
