"""Rows of a real terminal, as an emulator shows them."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.terminal_screen import Terminal

#: Draws two rows when it is told to on stdin, and prints what it is told otherwise, a line or a part of one.
PROGRAM = """
import os, sys
from llmscale.training.live_view import LiveView

class View(LiveView):
    def __init__(self):
        super().__init__("", 1, None)
        self.number = 0

    def render(self, columns):
        return [f"view {self.number}", "=" * columns]

view = View()
os.write(1, b"ready\\n")
for view.number, line in enumerate(sys.stdin):
    word = line.strip()
    if word == "draw":
        view.draw()
    elif word == "flood":
        # Not by Python's streams, as a C++ library prints.
        os.write(1, "".join(f"line {i}\\n" for i in range(50)).encode())
    elif word == "part":
        os.write(1, b"a part")
    elif word == "rest":
        os.write(1, b" and the rest\\n")
    elif word == "close":
        view.close()
    os.write(1, b"\\x1b]0;done " + str(view.number).encode() + b"\\x07")
"""


class ViewTerminal(Terminal):
    """Runs PROGRAM, word by word."""

    def __init__(self, columns: int = 40, rows: int = 12) -> None:
        super().__init__([sys.executable, "-c", PROGRAM], columns, rows, PYTHONPATH=str(Path.cwd()))
        self.read_until(lambda: "ready" in self.text())
        self._count = 0

    def tell(self, *words: str) -> list[str]:
        """The screen when all words are obeyed."""
        for word in words:
            self.send(f"{word}\n".encode())
            title = f"done {self._count}"
            self.read_until(lambda title=title: self.screen.title == title)
            self._count += 1
        return self.lines()


def test_what_is_printed_scrolls_above_and_tears_nothing() -> None:
    with ViewTerminal() as terminal:
        lines = terminal.tell("draw", "flood", "draw")
        assert lines[-2:] == ["view 2", "=" * 40]
        assert lines[:9] == [f"line {i}" for i in range(41, 50)]
        assert lines[9] == ""
        assert [f"line {i}" for i in range(50)] == [
            line for line in terminal.text().splitlines() if line.startswith("line")
        ], "what scrolled away is in the terminal's memory, once"


def test_half_a_line_is_left_where_it_is() -> None:
    with ViewTerminal() as terminal:
        lines = terminal.tell("flood", "part", "draw", "rest", "draw")
        assert "a part and the rest" in lines
        assert lines[-2:] == ["view 4", "=" * 40]


def test_closing_gives_everything_back() -> None:
    with ViewTerminal() as terminal:
        lines = terminal.tell("draw", "close", "draw", "flood")
        assert not [line for line in lines if line.startswith(("view", "="))]
        assert lines[10] == "line 49"
        assert terminal.screen.margins is None
        assert not terminal.screen.cursor.hidden


def test_a_terminal_that_changes_its_size_gets_one_view_at_its_bottom() -> None:
    with ViewTerminal() as terminal:
        terminal.tell("draw", "flood")
        for columns, rows in ((30, 20), (60, 9), (40, 12)):
            terminal.resize(columns, rows)
            lines = terminal.tell("draw")
            assert lines[-1] == "=" * columns
            assert lines[-2].startswith("view")
            assert sum(line.startswith("view") for line in lines) == 1


def test_a_terminal_of_few_rows_is_left_to_the_others() -> None:
    with ViewTerminal(40, 5) as terminal:
        assert terminal.tell("draw")[-1] == "=" * 40
        terminal.resize(40, 4)
        assert not [line for line in terminal.tell("draw", "flood") if line.startswith("=")]
