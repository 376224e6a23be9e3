"""Disks that fill, fail and come back: a real small file system, limits of the kernel, and errors put in its mouth."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from llmscale.files import buffered_log
from llmscale.files.buffered_log import BufferedLog, Missing


def line(step: int, size: int = 100) -> bytes:
    return json.dumps({"step": step}).ljust(size - 1).encode() + b"\n"


def steps_in(path: Path) -> list[int]:
    """Steps of the file's lines; every one of them must be whole."""
    contents = path.read_bytes()
    assert contents == b"" or contents.endswith(b"\n")
    return [json.loads(text)["step"] for text in contents.splitlines()]


class Disk:
    """os.pwrite of this process fails, or takes only some bytes, while `error` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: int | None = None
        self.takes_bytes = 0
        self._pwrite, self._ftruncate = os.pwrite, os.ftruncate
        self.truncates = True
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "ftruncate", self.ftruncate)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self.error is None:
            return self._pwrite(descriptor, data, offset)
        if self.takes_bytes:
            taken, self.takes_bytes = self.takes_bytes, 0
            return self._pwrite(descriptor, data[:taken], offset)
        raise OSError(self.error, os.strerror(self.error))

    def ftruncate(self, descriptor: int, length: int) -> None:
        if self.error is not None and not self.truncates:
            raise OSError(self.error, os.strerror(self.error))
        self._ftruncate(descriptor, length)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered_log, "_RETRY_S", 0.0)


def open_log(path: Path, **options: int) -> tuple[BufferedLog, list[str]]:
    message: list[str] = []
    return BufferedLog(path, warn=message.append, **options), message


@pytest.mark.parametrize("number", ["ENOSPC", "EIO", "EDQUOT", "EROFS", "ESTALE", "EACCES"])
@pytest.mark.parametrize("taken_bytes", [0, 1, 99])
@pytest.mark.parametrize("truncates", [True, False])
def test_what_fails_is_said_once_waits_and_is_written_whole(
    disk: Disk, tmp_path: Path, number: str, taken_bytes: int, truncates: bool
) -> None:
    log, message = open_log(tmp_path / "log")
    log.append(line(1), 1)
    disk.error, disk.takes_bytes, disk.truncates = getattr(errno, number), taken_bytes, truncates
    for step in range(2, 10):
        log.append(line(step), step)
    if truncates:
        assert steps_in(tmp_path / "log") == [1], "no reader ever sees part of a line"
    assert len(message) == 1
    assert f"log cannot be written: {os.strerror(getattr(errno, number))}" in message[0]
    disk.error = None
    log.append(line(10), 10)
    assert steps_in(tmp_path / "log") == list(range(1, 11))
    why = os.strerror(getattr(errno, number))
    waited = f"9 records of steps 2 to 10 ({why}) had to wait"
    assert message[1:] == [f"WARNING: {tmp_path}/log is written again: {waited}. Nothing is missing."]
    log.close()
    assert len(message) == 2


def test_what_waits_at_the_end_is_missing_and_said(disk: Disk, tmp_path: Path) -> None:
    log, message = open_log(tmp_path / "log")
    log.append(line(1), 1)
    disk.error, disk.takes_bytes = errno.ENOSPC, 30
    for step in (120, 121, 180):
        log.append(line(step), step)
    log.close()
    assert steps_in(tmp_path / "log") == [1]
    assert message[-1] == (f"WARNING: {tmp_path}/log lacks 3 records of steps 120 to 180 (No space left on device).")
    assert log.lost == [Missing(120, 180, "No space left on device", 3)]


def test_memory_is_bounded_and_what_it_could_not_hold_is_named(disk: Disk, tmp_path: Path) -> None:
    log, message = open_log(tmp_path / "log", most_held_bytes=500)
    disk.error = errno.EIO
    for step in range(1, 21):
        log.append(line(step), step)
    disk.error = None
    log.append(line(21), 21)
    log.append(line(22), 22)
    disk.error = errno.EIO
    for step in range(23, 31):
        log.append(line(step), step)
    log.close()
    # Step 21 came while the memory was full still, and was what found the disk well again.
    assert steps_in(tmp_path / "log") == [1, 2, 3, 4, 5, 22]
    assert "It lacks 16 records of steps 6 to 21 (Input/output error)." in message[1]
    why = "(Input/output error)"
    assert message[-1].endswith(
        f"lacks 16 records of steps 6 to 21 {why}, 5 records of steps 23 to 27 {why}, "
        f"3 records of steps 28 to 30 {why}."
    )


def test_a_record_larger_than_the_memory_set_aside_is_written_all_the_same(tmp_path: Path) -> None:
    log, message = open_log(tmp_path / "log", most_held_bytes=10)
    log.append(line(1), 1)
    log.close()
    assert (steps_in(tmp_path / "log"), message) == ([1], [])


def test_a_disk_that_refuses_is_not_asked_at_every_step(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffered_log, "_RETRY_S", 3600.0)
    log, _ = open_log(tmp_path / "log")
    disk.error = errno.EIO
    log.append(line(1), 1)
    disk.error = None
    log.append(line(2), 2)
    assert steps_in(tmp_path / "log") == []
    log.close()
    assert steps_in(tmp_path / "log") == [1, 2], "the end asks once more"


def test_a_real_disk_that_fills(small_disk: Callable[[int], Path]) -> None:
    folder = small_disk(256 << 10)
    log, message = open_log(folder / "log")
    log.append(line(0), 0)
    ballast = os.open(folder / "ballast", os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(ballast, bytes(4096))
    for step in range(1, 200):
        log.append(line(step), step)
    assert len(message) == 1
    assert steps_in(folder / "log") == list(range(len(steps_in(folder / "log"))))
    os.close(ballast)
    (folder / "ballast").unlink()
    log.append(line(200), 200)
    assert steps_in(folder / "log") == list(range(201))
    log.close()
    assert len(message) == 2


def test_a_file_may_not_grow(tmp_path: Path) -> None:
    """RLIMIT_FSIZE cuts in the middle of a record."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log, message = open_log(tmp_path / "log")
    resource.setrlimit(resource.RLIMIT_FSIZE, (250, hard))
    try:
        for step in range(5):
            log.append(line(step), step)
        assert steps_in(tmp_path / "log") == [0, 1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.close()
    assert steps_in(tmp_path / "log") == [0, 1, 2, 3, 4]
    assert "File too large" in message[0]


@pytest.mark.parametrize("path", ["/dev/full", "folder", "no/such/folder/log"])
def test_what_never_was_a_place_for_a_log_does_not_end_training(tmp_path: Path, path: str) -> None:
    if path == "/dev/full" and not Path(path).is_char_device():
        pytest.skip("this machine lacks the device")
    (tmp_path / "folder").mkdir()
    log, message = open_log(tmp_path / path)
    log.append(line(1), 1)
    log.append(line(2), 2)
    log.close()
    assert len(message) == 2
    assert "lacks 2 records of steps 1 to 2" in message[1]


@pytest.mark.parametrize(
    ("left", "remaining"),
    [
        (b'{"step": 1}\n{"st', [1, 9]),
        (b'{"step": 1}\n{"step": 2}', [1, 2, 9]),
        (b'{"st', [9]),
        (b"", [9]),
        (b'{"step": 1}\n', [1, 9]),
    ],
)
def test_a_killed_writer_leaves_no_torn_line_to_the_next(tmp_path: Path, left: bytes, remaining: list[int]) -> None:
    (tmp_path / "log").write_bytes(left)
    log, message = open_log(tmp_path / "log")
    log.append(line(9), 9)
    log.close()
    assert (steps_in(tmp_path / "log"), message) == (remaining, [])


def test_text_without_its_last_newline_is_kept(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"Traceback:\n  half a li")
    log, _ = open_log(tmp_path / "log")
    log.append(b"more\n", 1)
    log.close()
    assert (tmp_path / "log").read_bytes() == b"Traceback:\n  half a li\nmore\n"


def test_a_deleted_file_is_begun_again_and_a_shortened_one_is_noticed(disk: Disk, tmp_path: Path) -> None:
    log, message = open_log(tmp_path / "log")
    log.append(line(1), 1)
    (tmp_path / "log").unlink()
    log.append(line(2), 2)
    assert steps_in(tmp_path / "log") == [2]
    assert message == [f"WARNING: {tmp_path}/log was cut short or replaced: 100 bytes of it are gone."]


def test_a_folder_that_was_renamed_waits_until_it_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    log, message = open_log(folder / "log")
    log.append(line(1), 1)
    folder.rename(tmp_path / "renamed")
    log.append(line(2), 2)
    assert "cannot be written: No such file" in message[0]
    folder.mkdir()
    log.append(line(3), 3)
    assert (steps_in(tmp_path / "renamed" / "log"), steps_in(folder / "log")) == ([1], [2, 3])


def test_a_file_that_is_nobodys_to_write_to_is_not_opened(tmp_path: Path) -> None:
    """Another run has made its own folder of the same name."""
    lost: list[str] = []

    def check() -> None:
        if lost:
            raise OSError(lost[0])

    message: list[str] = []
    log = BufferedLog(tmp_path / "log", warn=message.append, check=check)
    log.append(line(1), 1)
    lost.append("it is another run's")
    (tmp_path / "log").rename(tmp_path / "ours")
    (tmp_path / "log").write_bytes(line(7) * 9)
    log.append(line(2), 2)
    assert "cannot be written: it is another run's" in message[0]
    assert steps_in(tmp_path / "log") == [7] * 9
    (tmp_path / "log").unlink()
    lost.clear()
    log.append(line(3), 3)
    assert (steps_in(tmp_path / "ours"), steps_in(tmp_path / "log")) == ([1], [2, 3])


def test_a_late_error_of_the_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems say ENOSPC only when the file is synced or closed."""
    log, message = open_log(tmp_path / "log")
    log.append(line(1), 1)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", fail)
    log.close()
    assert message == [f"WARNING: {tmp_path}/log: its newest records may be lost: Disk quota exceeded."]
