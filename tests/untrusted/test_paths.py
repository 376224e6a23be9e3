"""Names that somebody else chose, and files that are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.untrusted.paths import (
    RefusedFile,
    in_home,
    is_plain_name,
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
