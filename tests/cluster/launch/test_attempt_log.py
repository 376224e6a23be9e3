from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from llmscale.cluster.launch.attempt_log import (
    ATTEMPTS_NAME,
    Attempt,
    attempt_logs,
    next_number,
    read_attempts,
    write_attempt,
)

FIRST = Attempt(1, "2026-01-01T00:00:00+00:00", {"a": 2}, 2, "10.0.0.1:1234", {"b": "no route"}, "deepspeed", "logs")


def test_an_attempt_is_what_was_written_of_it_last(tmp_path: Path) -> None:
    assert read_attempts(tmp_path) == []
    done = replace(FIRST, seconds=3.5, first_step=1, last_step=9, end="failed", reason="rank 0 vanished")
    for attempt in (FIRST, done, replace(FIRST, number=2)):
        assert write_attempt(tmp_path, attempt) is None
    assert read_attempts(tmp_path) == [done, replace(FIRST, number=2)]


def test_a_line_that_a_crash_cut_short_costs_only_itself(tmp_path: Path) -> None:
    write_attempt(tmp_path, FIRST)
    with (tmp_path / ATTEMPTS_NAME).open("a") as file:
        file.write('{"number": 2, "beg')
    write_attempt(tmp_path, replace(FIRST, number=3))
    assert [attempt.number for attempt in read_attempts(tmp_path)] == [1, 3]


def test_fields_of_a_later_version_are_left_aside(tmp_path: Path) -> None:
    write_attempt(tmp_path, FIRST)
    path = tmp_path / ATTEMPTS_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_the_future": 1}) + "\n")
    assert read_attempts(tmp_path) == [FIRST]


def test_a_folder_that_cannot_be_written_is_said_and_not_raised(tmp_path: Path) -> None:
    problem = write_attempt(tmp_path / "missing", FIRST)
    assert problem is not None
    assert "No such file" in problem


def test_whatever_stands_in_the_file_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / ATTEMPTS_NAME
    write_attempt(tmp_path, FIRST)
    with path.open("ab") as file:
        file.write(b'\xff\xfe\x00\n[1, 2]\n"text"\nnull\n{"number": "7"}\n' + b"[" * 5000 + b"\n")
        file.write(json.dumps({**asdict(FIRST), "number": "two"}).encode() + b"\n")
    write_attempt(tmp_path, replace(FIRST, number=3))
    assert [attempt.number for attempt in read_attempts(tmp_path)] == [1, 3]
    assert next_number(tmp_path) == 4
    attempt_logs(tmp_path, 12).mkdir(parents=True)
    (tmp_path / "logs" / "attempt-old").mkdir()
    assert next_number(tmp_path) == 13, "no logs are written over"
    path.unlink()
    path.mkdir()
    assert read_attempts(tmp_path) == []
    assert next_number(tmp_path) == 13


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    """Not UTF-8, too deep, or of another shape: whatever the file holds, a launch must be able to begin."""
    good = json.dumps(asdict(FIRST))
    wrong = [
        json.dumps({**asdict(replace(FIRST, number=2)), key: []}) for key in ("number", "began", "last_step", "end")
    ]
    lines = [
        good.encode(),
        b"\xff\xfe",
        b'{"a":' * 3000,
        b"[1]",
        b"x" * (2 << 20),
        *map(str.encode, wrong),
        b'{"number"',
    ]
    (tmp_path / ATTEMPTS_NAME).write_bytes(b"\n".join(lines))
    assert [attempt.number for attempt in read_attempts(tmp_path)] == [1]
