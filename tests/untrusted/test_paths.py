"""Names that somebody else chose, and files that are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.untrusted.paths import (
    in_home,
    is_plain_name,
)

HOSTILE_NAMES = (
    "",
    ".",
    "..",
    "/etc/passwd",
    "a/b",
    "a/../b",
    "a\\b",
    "a\0b",
    "a\nb",
    "\x1b[2J",
    "a\x9b",
    "\u202etxt.exe",
    "\ufeffa",
    "\ud800",
    "-rf",
    "a" * 256,
    "é" * 128,
    None,
    3,
    [],
    b"a",
)


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: ascii(name)[:20])
def test_hostile_names_are_refused(name: object) -> None:
    assert not is_plain_name(name)


@pytest.mark.parametrize("name", ["shard.00000.mds", "a", "é" * 127, "x y", ".hidden", "a-b_c~1", "数据.json", "~"])
def test_plain_names_are_legal(name: str) -> None:
    assert is_plain_name(name)


def test_a_user_without_a_home_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in /etc/passwd."""
    monkeypatch.setenv("HOME", "/home/me")
    assert in_home("~/.cache") == Path("/home/me/.cache")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert in_home("/tmp/x") == Path("/tmp/x")
    with pytest.raises(ConfigError, match=r"~/\.cache is in the home folder, and this user has none\. Set HOME"):
        in_home("~/.cache")
