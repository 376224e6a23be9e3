"""Names that somebody else chose, and files that are none."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.untrusted.paths import (
    RefusedFile,
    find_link,
    in_home,
    is_plain_name,
    open_regular,
    read_regular,
)

HOSTILE_NAMES = (
    "",
    ".",
    "..",
    "/",
    "/etc/passwd",
    "../x",
    "a/b",
    "a/../b",
    "a\\b",
    "..\\x",
    "~/x/y",
    "//x",
    "a/",
    "a\0b",
    "a\nb",
    "a\rb",
    "a\tb",
    "\x1b[2J",
    "a\x9b",
    "\x7f",
    "\u202etxt.exe",
    "\u200b",
    "\ufeffa",
    "\ud800",
    "-rf",
    "--out=x",
    "a" * 256,
    "é" * 128,
    None,
    3,
    True,
    1.5,
    [],
    {},
    ["a"],
    b"a",
)


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: ascii(name)[:20])
def test_hostile_names_are_refused(name: object) -> None:
    assert not is_plain_name(name)


@pytest.mark.parametrize("name", ["shard.00000.mds", "a", "é" * 127, "x y", ".hidden", "a-b_c~1", "数据.json", "~"])
def test_plain_names_are_legal(name: str) -> None:
    assert is_plain_name(name)


def test_a_link_is_found_wherever_it_stands(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("")
    (tmp_path / "linked").symlink_to("real")
    (tmp_path / "real" / "link").symlink_to("nowhere")
    assert find_link(tmp_path, "real/file") is None
    assert find_link(tmp_path, "linked/file") == tmp_path / "linked"
    assert find_link(tmp_path, "real/link") == tmp_path / "real" / "link"
    assert find_link(tmp_path, "real/missing") is None


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    (tmp_path / "to_pipe").symlink_to("pipe")
    (tmp_path / "to_zero").symlink_to("/dev/zero")
    kinds = {"pipe": "a named pipe", "folder": "a folder", "socket": "a socket", "to_pipe": "a named pipe"}
    for name, kind in {**kinds, "to_zero": "a device"}.items():
        with pytest.raises(RefusedFile) as caught:
            open_regular(tmp_path / name)
        assert caught.value.strerror == f"is {kind}, not a regular file"
    server.close()


def test_links_are_followed_where_a_user_named_them_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"contents")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 100) == b"contents"
    with pytest.raises(RefusedFile, match="is a symbolic link"):
        read_regular(tmp_path / "link", 100, follow_links=False)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "missing", 100)
    with pytest.raises(RefusedFile, match="larger than the limit of 7 bytes"):
        read_regular(tmp_path / "file", 7)


def test_a_user_without_a_home_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in /etc/passwd."""
    monkeypatch.setenv("HOME", "/home/me")
    assert in_home("~/.cache") == Path("/home/me/.cache")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert in_home("/tmp/x") == Path("/tmp/x")
    with pytest.raises(ConfigError, match=r"~/\.cache is in the home folder, and this user has none\. Set HOME"):
        in_home("~/.cache")
