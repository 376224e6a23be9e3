"""Locks of builds that were killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from llmscale.cluster.extension_locks import remove_stale_locks


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


def test_a_lock_of_processes_that_have_ended_goes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "py311_cpu" / "async_io").mkdir(parents=True)
    lock = tmp_path / "py311_cpu" / "async_io" / "lock"
    lock.touch()
    assert remove_stale_locks(since_s=time.time() + 1) == []
    assert remove_stale_locks(since_s=lock.stat().st_mtime) == [str(lock)]
