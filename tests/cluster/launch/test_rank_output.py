"""A rank's output: nothing of what is usual is lost, and no flood holds anybody up or fills anything."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmscale.cluster.launch import rank_output
from llmscale.cluster.launch.rank_output import LINE_BYTES, SHOWN_BYTES, SHOWN_LINES, BoundedLog, RankOutput
from tests.conftest import HANG_S


class Pipe:
    """One rank's, and what came out of it."""

    def __init__(self, log: Path) -> None:
        self.output, self.log = RankOutput(), log
        reading, self.writing = os.pipe()
        self.output.add(3, reading, log)

    def lines(self, is_last: bool = False) -> list[str]:
        return [output.text for output in self.output.read(is_last)]

    def wait_for_lines(self, count: int) -> list[str]:
        """Return what is shown until there are so many lines; the log is written before a line is shown."""
        deadline = time.monotonic() + HANG_S
        lines = self.lines()
        while len(lines) < count:
            assert time.monotonic() < deadline, lines
            time.sleep(0.01)
            lines += self.lines()
        return lines


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    pipe = Pipe(tmp_path / "logs" / "rank.log")
    yield pipe
    os.close(pipe.writing)
    pipe.output.close()


def test_lines_come_whole_in_order_and_are_logged_as_they_are(pipe: Pipe) -> None:
    text = "one\nzwölf\r\n\nlast \x1b[1m".encode() + b"\xff\n half"
    os.write(pipe.writing, text)
    assert pipe.wait_for_lines(4) == ["one", "zwölf", "", "last \x1b[1m�"]
    os.write(pipe.writing, b" done\nno end")
    assert pipe.wait_for_lines(1) == [" half done"]
    assert pipe.lines(is_last=True) == ["no end"]
    assert pipe.log.read_bytes() == text + b" done\nno end"


def test_what_is_in_the_pipe_at_the_end_is_read(pipe: Pipe) -> None:
    os.write(pipe.writing, b"x\n" * 5000 + b"error: the reason")
    lines = pipe.lines(is_last=True)
    assert lines[-1] == "error: the reason"
    assert pipe.log.read_bytes().endswith(b"error: the reason")


@pytest.mark.parametrize("block", [b"a line of text\n", b"without an end ", bytes(range(256)), b"\n"])
def test_a_flood_is_drained_without_a_reader_and_its_end_is_shown(pipe: Pipe, block: bytes) -> None:
    """Nobody calls `read` meanwhile: an agent may be busy for seconds."""
    code = f"import sys; b = {block!r} * (10_000_000 // {len(block)})\nfor _ in range(20): sys.stdout.buffer.write(b)\n"
    rank = subprocess.Popen([sys.executable, "-c", code + "print('\\nthe end')"], stdout=pipe.writing)
    assert rank.wait(HANG_S) == 0
    lines = pipe.lines(is_last=True)
    assert lines[-1] == "the end"
    assert "bytes came too fast to be shown" in lines[0]
    assert len(lines) <= SHOWN_LINES + 1
    assert sum(map(len, lines)) <= SHOWN_BYTES + 100
    assert max(map(len, lines)) <= LINE_BYTES
    pipe.output.close()
    logs = list(pipe.log.parent.iterdir())
    assert sum(path.stat().st_size for path in logs) <= 130 << 20
    assert pipe.log.read_bytes().endswith(b"the end\n")
    assert any(b"left out here" in path.read_bytes() for path in logs)
    pipe.output = RankOutput()


def test_a_log_turns_over_and_says_what_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_output, "LOG_BYTES", 1000)
    monkeypatch.setattr(rank_output, "LOGGED_BYTES_PER_S", 1e9)
    log = BoundedLog(tmp_path / "rank.log")
    for number in range(1000):
        log.write(f"line {number}\n".encode())
        time.sleep(1e-5)
    log.close()
    newest, older = (tmp_path / "rank.log").read_text(), (tmp_path / "rank.log.1").read_text()
    assert newest.startswith("[this log continues rank.log.1; ")
    assert newest.endswith("line 999\n")
    assert len(newest) + len(older) < 2200
    first = int(newest.splitlines()[1].removeprefix("line "))
    assert older.endswith(f"line {first - 1}\n"), "nothing between the two is missing"


def test_a_log_that_cannot_be_written_is_said_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    pipe = Pipe(tmp_path / "file" / "rank.log")
    os.write(pipe.writing, b"still shown\n")
    shown, warning = pipe.lines(is_last=True)
    assert shown == "still shown"
    assert "rank.log cannot be written: Not a directory" in warning
    os.close(pipe.writing)
    pipe.output.close()


def test_a_log_that_may_not_grow_says_so_and_is_whole_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-00000.log"
    log = BoundedLog(path)
    log.write(b"first\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        log.write(b"second\n")
        log.write(b"third\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "first\n"
    (warning,) = log.take_warnings()
    assert "rank-00000.log cannot be written: File too large" in warning
    assert log.take_warnings() == []
    log.close()
    assert path.read_text() == "first\nsecond\nthird\n"
