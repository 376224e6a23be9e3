"""Disks that fill, fail and come back: a real small file system, and limits of the kernel."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from llmscale.files import record_log
from llmscale.files.record_log import RecordLog


def line(step: int) -> bytes:
    return json.dumps({"step": step}).ljust(99).encode() + b"\n"


def steps_in(path: Path) -> list[int]:
    """Steps of the file's lines; every one of them must be complete."""
    contents = path.read_bytes()
    assert contents == b"" or contents.endswith(b"\n")
    return [json.loads(text)["step"] for text in contents.splitlines()]


def open_log(path: Path) -> tuple[RecordLog, list[str]]:
    warnings: list[str] = []
    return RecordLog(path, warnings.append), warnings


def test_a_disk_that_fills_costs_no_record_once_it_has_room_again(small_disk: Callable[[int], Path]) -> None:
    folder = small_disk(256 << 10)
    log, warnings = open_log(folder / "log")
    log.append(line(0))
    ballast = os.open(folder / "ballast", os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(ballast, bytes(4096))
    for step in range(1, 200):
        log.append(line(step))
    assert len(warnings) == 1
    assert steps_in(folder / "log") == list(range(len(steps_in(folder / "log"))))
    os.close(ballast)
    (folder / "ballast").unlink()
    log.append(line(200))
    assert steps_in(folder / "log") == list(range(201))
    log.close()
    assert len(warnings) == 1


def test_of_a_long_outage_the_newest_records_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_log, "_MOST_WAITING", 3)
    log, warnings = open_log(tmp_path / "missing" / "log")
    for step in range(6):
        log.append(line(step))
    assert len(warnings) == 2 and "dropped" in warnings[1]
    (tmp_path / "missing").mkdir()
    log.append(line(6))
    assert steps_in(tmp_path / "missing" / "log") == [4, 5, 6]
    log.close()
    assert "refused: 4" in warnings[2]


def test_no_reader_sees_part_of_a_line(tmp_path: Path) -> None:
    """RLIMIT_FSIZE cuts in the middle of a record."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log, warnings = open_log(tmp_path / "log")
    resource.setrlimit(resource.RLIMIT_FSIZE, (250, hard))
    try:
        for step in range(5):
            log.append(line(step))
        assert steps_in(tmp_path / "log") == [0, 1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.close()
    assert steps_in(tmp_path / "log") == [0, 1, 2, 3, 4], "the end tries once more"
    (warning,) = warnings
    assert "log cannot be written: File too large. Training continues" in warning


@pytest.mark.parametrize("path", ["/dev/full", "folder", "no/such/folder/log"])
def test_what_never_was_a_place_for_a_log_does_not_end_training(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    log, warnings = open_log(tmp_path / path)
    log.append(line(1))
    log.append(line(2))
    log.close()
    assert len(warnings) == 2
    assert "lacks records that the disk refused: 2" in warnings[1]


@pytest.mark.parametrize(
    ("left", "steps"),
    [(b'{"step": 1}\n{"st', [1, 9]), (b'{"st', [9]), (b"", [9]), (b'{"step": 1}\n', [1, 9])],
)
def test_a_killed_writer_leaves_no_torn_line_to_the_next(tmp_path: Path, left: bytes, steps: list[int]) -> None:
    (tmp_path / "log").write_bytes(left)
    log, warnings = open_log(tmp_path / "log")
    log.append(line(9))
    log.close()
    assert (steps_in(tmp_path / "log"), warnings) == (steps, [])


def test_a_late_error_of_the_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems report a full disk only when the file is synced."""
    log, warnings = open_log(tmp_path / "log")
    log.append(line(1))

    def fail(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", fail)
    log.close()
    assert warnings == [f"WARNING: {tmp_path}/log: its newest records may be lost: Disk quota exceeded."]
