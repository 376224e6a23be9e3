from __future__ import annotations

import io

import pytest

from llmscale.terminal.colour import can_redraw, has_colour, paint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(
    ("variables", "terminal", "pipe"),
    [
        ({}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "0"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"FORCE_COLOR": "3", "TERM": "dumb"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_who_gets_colours(
    variables: dict[str, str], terminal: bool, pipe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (has_colour(Terminal()), has_colour(io.StringIO())) == (terminal, pipe)


def test_streams_that_are_none_are_no_terminals() -> None:
    closed = Terminal()
    closed.close()
    assert not has_colour(None)
    assert can_redraw(Terminal())
    assert not can_redraw(io.StringIO())


def test_paint() -> None:
    assert paint("error:", "red", Terminal()) == "\x1b[31merror:\x1b[0m"
    assert paint("error:", "red", io.StringIO()) == "error:"
    assert paint("", "red", Terminal()) == ""
