from __future__ import annotations

import sys

import pytest

from llmscale.terminal import progress
from llmscale.terminal.progress import count_words, show_progress


def test_a_log_gets_plain_lines_with_rate_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    with show_progress("Tokenising a\x1b[2Jb") as text:
        text.show(0, 500, 1000)  # an interrupted run had done half
        now_s = 105.0
        text.show(50_000_000, 600, 1000)
        now_s = 120.0
        text.show(100_000_000, 700, 1000, "20.0 M tokens")
        text.say("A note.")
    message = capsys.readouterr().err
    assert message.splitlines() == [
        r"Tokenising a\x1b[2Jb: 100 MB, 20.0 M tokens, 5.0 MB/s, 70%, 30s left",
        "A note.",
    ]


def test_a_terminal_gets_one_line_that_renews_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "_TERMINAL_INTERVAL_S", 0.0)
    monkeypatch.setattr(progress, "_FIRST_SHOWN_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with show_progress("Writing", total=200) as text:
        text.add(100)
        text.add(100)
    message = capsys.readouterr().err
    assert "\n" not in message and message.count("\r") >= 3 and message.endswith("\r\x1b[2K")
    assert "Writing: [####################]" in message and "100%" in message


def test_what_is_counted_one_by_one_and_is_over_at_once_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    with show_progress("Sampling", 3000, count_words("tokens")) as text:
        text.add(1000)
        assert capsys.readouterr().err == ""
        now_s = 110.0
        text.add(1000)
    assert capsys.readouterr().err == "Sampling: 2,000 tokens, 200 tokens/s, 67%, 5s left\n"
