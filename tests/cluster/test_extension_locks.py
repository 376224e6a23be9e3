"""Locks of builds that were killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from llmscale.cluster.extension_locks import HeldLocks, remove_stale_locks


def test_stale_locks_go_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    old = time.time() - 3600
    for name in ("dead", "held", "young"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text("")
        if name != "young":
            os.utime(tmp_path / name / "lock", (old, old))
    with (tmp_path / "held" / "lock").open():
        assert remove_stale_locks() == [str(tmp_path / "dead" / "lock")]


def test_a_lock_that_was_held_goes_and_a_successor_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("killed", "taken_anew"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    held = HeldLocks()
    with (tmp_path / "killed" / "lock").open(), (tmp_path / "taken_anew" / "lock").open():
        held.note([os.getpid()])
    (tmp_path / "taken_anew" / "lock").unlink()
    (tmp_path / "taken_anew" / "new").touch()
    (tmp_path / "taken_anew" / "new").rename(tmp_path / "taken_anew" / "lock")
    held.remove()
    assert not (tmp_path / "killed" / "lock").exists()
    assert (tmp_path / "taken_anew" / "lock").exists()
