r"""What others wrote does not reach the terminal as anything but text."""

from __future__ import annotations

import pytest

from llmscale.untrusted.terminal import is_visible, make_visible, make_visible_line


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
        ("50%\r100%", r"50%\r100%"),
        ("a\x08b", r"a\x08b"),
        ("\x9b31m", r"\x9b31m"),
        ("\x7f\x00", r"\x7f\x00"),
        ("user\u202egpj.exe", r"user\u202egpj.exe"),
        ("\u2066\u2069\u200f", r"\u2066\u2069\u200f"),
        ("a\u2028b", r"a\u2028b"),
        ("\udcff", r"\udcff"),
        ("\U000e0041", r"\U000e0041"),
        ("\ufeff\u200b", r"\ufeff\u200b"),
        ("one\n\ttwo", "one\n\ttwo"),
        ("naïve 数据 🙂 👨\u200d👩 \u0645\u06cc\u200c\u062e", "naïve 数据 🙂 👨\u200d👩 \u0645\u06cc\u200c\u062e"),
    ],
    ids=ascii,
)
def test_controls_are_written_out(text: str, output: str) -> None:
    assert make_visible(text) == output
    output.encode()


def test_a_line_stays_one() -> None:
    assert make_visible_line("a\nb\tc\x1b") == r"a\nb\tc\x1b"
    assert is_visible("a b") and not is_visible("a\nb")
