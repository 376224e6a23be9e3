from __future__ import annotations

import os
import random
import threading
import time

import pytest

from llmscale.terminal import status_line
from llmscale.terminal.status_line import StatusLine, show_status
from tests.conftest import HANG_S


@pytest.fixture
def lines_said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(StatusLine, "_say", lambda _, line: lines.append(line))
    monkeypatch.setattr(status_line, "can_redraw", lambda stream: True)
    return lines


def test_a_phase_is_announced_before_it_begins_and_again_while_it_lasts(
    lines_said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_line, "REPEAT_S", 0.01)
    again = threading.Event()

    def say(_: StatusLine, line: str) -> None:
        lines_said.append(line)
        if len(lines_said) == 3:
            again.set()

    monkeypatch.setattr(StatusLine, "_say", say)
    with show_status("building"):
        assert lines_said[0] == "building ..."
        assert again.wait(HANG_S)
    assert lines_said[1] == "still building: 0 s"


def test_a_quiet_phase_is_announced_when_it_lasts(lines_said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spoken = threading.Event()
    monkeypatch.setattr(StatusLine, "_say", lambda _, line: (lines_said.append(line), spoken.set()))
    with show_status("checking", after_s=0.01):
        assert spoken.wait(HANG_S)
    assert lines_said[0] == "checking ..."


def test_phases_follow_each_other_and_end_more_than_once(lines_said: list[str]) -> None:
    busy = StatusLine()
    busy.begin("one")
    busy.begin("two", after_s=3600)
    busy.begin("three")
    busy.end()
    busy.end()
    busy.begin("four")
    busy.end()
    assert lines_said == ["one ...", "three ...", "four ..."]


def test_a_phase_ends_whenever_it_is_told_to(lines_said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A notification that came while the thread's wait timed out was lost, and `end` waited for ever."""
    monkeypatch.setattr(status_line, "REPEAT_S", 0.002)
    draw = random.Random(0)
    for _ in range(100):
        line = StatusLine()
        line.begin("working")
        time.sleep(0.002 * draw.randint(1, 4) + draw.uniform(-2e-4, 2e-4))
        ending = threading.Thread(target=line.end, daemon=True)
        ending.start()
        ending.join(HANG_S)
        assert not ending.is_alive()


def test_a_phase_follows_at_any_moment(lines_said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line, "REPEAT_S", 0.002)
    draw, deadline = random.Random(0), time.monotonic() + HANG_S
    with StatusLine() as line:
        for number in range(100):
            line.begin(f"phase {number}")
            lines_said.clear()
            time.sleep(0.002 * draw.randint(0, 2) + draw.uniform(0, 2e-4))
            assert all(words.startswith(f"still phase {number}:") for words in list(lines_said))
        while not lines_said:
            assert time.monotonic() < deadline, "the last phase is not repeated"
            time.sleep(0.002)


def test_other_ranks_are_silent(lines_said: list[str]) -> None:
    busy = StatusLine(is_silent=True)
    busy.begin("one")
    busy.end()
    assert lines_said == []


def test_a_log_has_a_line_past_python_s_buffer_on_what_lasts(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with show_status("reading"):
        pass
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(status_line, "LOG_S", 0.01)
    written, deadline = "", time.monotonic() + HANG_S
    with show_status("reading"):
        while not written:
            assert time.monotonic() < deadline
            written = capfd.readouterr().err
    assert written.startswith("reading ...\n")


def test_on_a_terminal_one_line_is_updated_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(status_line, "can_redraw", lambda stream: True)
    monkeypatch.setattr(status_line, "_write", written.append)
    monkeypatch.setattr("os.get_terminal_size", lambda descriptor: os.terminal_size((24, 10)))
    with show_status("building the engine of this run"):
        pass
    # Cut between words: what a terminal breaks cannot be taken back.
    assert written == ["\r\x1b[2Kbuilding the engine ...", "\r\x1b[2K"]
