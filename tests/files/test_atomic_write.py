from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmscale.files.atomic_write import write_durably, write_output
from llmscale.files.record_log import RecordLog
from llmscale.untrusted.paths import open_own


@pytest.fixture
def file_limit() -> Iterator[None]:
    """No file of this process may grow beyond 1,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("write", [write_durably, write_output])
def test_a_file_is_replaced_or_stays_as_it_was(write, tmp_path: Path, file_limit: None) -> None:
    path = tmp_path / "config.json"
    write(path, "old")
    with pytest.raises(OSError, match="File too large"):
        write(path, "x" * 5000)
    assert path.read_text() == "old"
    write(path, b"new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_a_file_that_cannot_be_begun_is_not_there(tmp_path: Path, file_limit: None) -> None:
    for write in (write_durably, write_output):
        with pytest.raises(OSError):
            write(tmp_path / "big", "x" * 5000)
        with pytest.raises(OSError):
            write(tmp_path / "no folder" / "small", "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a" * 255, "a" * 200 + ".json"])
def test_a_name_may_be_as_long_as_the_file_system_lets_it(tmp_path: Path, name: str) -> None:
    write_durably(tmp_path / name, "x")
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_link_in_a_run_folder_is_replaced_and_one_that_the_user_names_is_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "planted").symlink_to("target")
    (tmp_path / "named").symlink_to("target")
    write_durably(tmp_path / "planted", "new")
    assert (tmp_path / "target").read_text() == "old"
    assert not (tmp_path / "planted").is_symlink()
    write_output(tmp_path / "named", "new")
    assert (tmp_path / "target").read_text() == "new"
    assert (tmp_path / "named").is_symlink()


def test_devices_and_pipes_are_written_to_and_never_replaced(tmp_path: Path) -> None:
    # Devices of our own: were they replaced, this machine would not lose its.
    null, full = tmp_path / "null", tmp_path / "full"
    try:
        for path, minor in ((null, 3), (full, 7)):
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        null.write_bytes(b"")
    except PermissionError:
        pytest.skip("only root makes devices")
    write_output(null, "x")
    with pytest.raises(OSError, match="No space left on device"):
        write_output(full, "x")
    assert null.is_char_device()
    assert full.is_char_device()
    code = "import llmscale.files.atomic_write as w, pathlib; w.write_output(pathlib.Path('/dev/stdout'), 'x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "x"
    with open(tmp_path / "out", "w") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert (tmp_path / "out").read_text() == "x"
    assert os.path.islink("/dev/stdout")


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    write_durably(tmp_path / "ours", "x")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_parts_stand_one_behind_the_other(tmp_path: Path) -> None:
    write_durably(tmp_path / "whole", b"ab", "cä", memoryview(b"d"), b"")
    assert (tmp_path / "whole").read_text(encoding="utf-8") == "abcäd"


@pytest.mark.parametrize("kind", ["link", "dangling link"])
def test_a_link_is_not_opened_for_writing(tmp_path: Path, kind: str) -> None:
    mine, path = tmp_path / "mine", tmp_path / "metrics.jsonl"
    mine.write_text("last line without its end")
    path.symlink_to(mine if kind == "link" else tmp_path / "nothing")
    with pytest.raises(OSError, match="not a regular file"):
        open_own(path, os.O_RDWR | os.O_CREAT)
    warnings: list[str] = []
    file = RecordLog(path, warnings.append)
    file.append(b"{}\n")
    file.close()
    assert "not a regular file" in warnings[0]
    assert mine.read_text() == "last line without its end"
    assert not (tmp_path / "nothing").exists()
