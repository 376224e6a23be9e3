"""Claiming a run folder, giving it up, and what becomes of one that is removed, renamed or taken over."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.training import run_claim
from llmscale.training.run_claim import RunFolderClaim
from llmscale.training.run_folder import create_run_folder, save_run_description
from tests import warm_start
from tests.conftest import REPOSITORY

CLAIM_ELSEWHERE = """
import sys, pathlib
from llmscale.training.run_folder import lock_run_folder
held = lock_run_folder(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    create_run_folder(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def claim(run: Path) -> Iterator[RunFolderClaim]:
    claim = RunFolderClaim(run)
    claim.take()
    claim.describe((run / "config.json").touch)
    yield claim
    claim.close()


def claim_elsewhere(run: Path) -> subprocess.Popen[str]:
    """Another process that claims a folder, until its stdin is closed."""
    command = [sys.executable, "-c", CLAIM_ELSEWHERE, str(run)]
    return warm_start.Process(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def is_claimed(run: Path) -> bool:
    """Whether another process is refused."""
    return "is in use by process" in claim_elsewhere(run).communicate("")[1]


def test_looking_does_not_give_the_folder_up(run: Path, claim: RunFolderClaim) -> None:
    for _ in range(3):
        assert claim.find_loss() is None
        claim.check()
    assert not claim.renew(print)
    assert is_claimed(run)


@pytest.mark.parametrize("how", ["remove", "rename"])
def test_a_folder_that_is_gone_is_made_again_as_a_whole(run: Path, claim: RunFolderClaim, how: str) -> None:
    shutil.rmtree(run) if how == "remove" else run.rename(run.with_name("renamed"))
    assert f"{run} was removed or renamed" in str(claim.find_loss())
    with pytest.raises(OSError, match="was removed or renamed during training"):
        claim.check()
    lines: list[str] = []
    assert claim.renew(lines.append)
    assert "It is made again" in lines[0]
    assert sorted(path.name for path in run.iterdir()) == [".lock", "config.json"]
    assert claim.find_loss() is None
    assert is_claimed(run)
    assert not claim.renew(lines.append)
    assert len(lines) == 1


def test_a_lock_file_that_was_deleted_is_taken_again(run: Path, claim: RunFolderClaim) -> None:
    (run / ".lock").unlink()
    assert f"{run / '.lock'} was removed" in str(claim.find_loss())
    assert claim.renew(lambda _: None)
    assert is_claimed(run)


def test_a_copy_that_was_put_back_is_as_good(run: Path, claim: RunFolderClaim) -> None:
    copy = shutil.copytree(run, run.with_name("copy"))
    shutil.rmtree(run)
    Path(copy).rename(run)
    assert claim.find_loss() is None


def test_another_runs_folder_of_the_same_name_gets_nothing(run: Path, claim: RunFolderClaim) -> None:
    seen = RunFolderClaim(run)
    assert seen.find_loss() is None
    seen.check_is_seen((run / ".lock").read_text())
    assert seen.find_loss() is None
    assert not seen.renew(print)
    run.rename(run.with_name("renamed"))
    run.mkdir()
    other = claim_elsewhere(run)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    assert f"is not this run's folder any more but that of process {other.pid}" in str(claim.find_loss())
    assert f"that of process {other.pid}" in str(seen.find_loss()), "nor do the other ranks write there"
    assert not claim.renew(print)
    assert [path.name for path in run.iterdir()] == [".lock"]
    other.communicate("")


def test_a_folder_that_cannot_be_described_is_tried_again(run: Path) -> None:
    """The disk is full when it is made again, and not the time after."""
    claim = RunFolderClaim(run)
    claim.take()
    failures = [OSError(28, "No space left on device")]

    def describe() -> None:
        if lines and failures:
            raise failures.pop()
        (run / "config.json").touch()

    lines: list[str] = []
    claim.describe(describe)
    shutil.rmtree(run)
    lines.append("removed")
    assert not claim.renew(lines.append)
    assert "No space left on device" in lines[-1]
    assert claim.renew(lines.append)
    assert (run / "config.json").exists()
    claim.close()


def test_a_folder_that_cannot_be_made_again_is_said(run: Path, claim: RunFolderClaim) -> None:
    shutil.rmtree(run)
    run.write_text("a file")
    lines: list[str] = []
    assert not claim.renew(lines.append)
    assert "cannot be made again" in lines[0]
    with pytest.raises(OSError, match="was removed or renamed"):
        claim.check()
    with pytest.raises(ConfigError):
        create_run_folder(run)


def test_a_claim_given_up_leaves_what_was_there(tmp_path: Path) -> None:
    claim = RunFolderClaim(tmp_path / "a" / "b" / "run")
    claim.take()
    save_run_description(tmp_path / "a" / "b" / "run", {}, {"plan": {"world_size": 2}}, {}, is_new=True)
    (tmp_path / "a" / "b" / "run" / "samples" / "session-0000").mkdir(parents=True)
    claim.give_up()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    claim = RunFolderClaim(tmp_path / "mine")
    claim.take()
    claim.give_up()
    assert list((tmp_path / "mine").iterdir()) == [], "the user's folder stays, without our lock"
    (tmp_path / "mine" / "config.json").write_text("an earlier start's")
    claim = RunFolderClaim(tmp_path / "mine")
    claim.take()
    claim.give_up()
    assert (tmp_path / "mine" / "config.json").exists()
    claim = RunFolderClaim(tmp_path / "new")
    claim.take()
    (tmp_path / "new" / "notes.txt").write_text("the user's")
    claim.give_up()
    assert {path.name for path in (tmp_path / "new").iterdir()} >= {"notes.txt"}


def test_a_claim_is_seen_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_claim, "_VISIBLE_PAUSE_S", 0.001)
    claim = RunFolderClaim(tmp_path / "run")
    taken_by = claim.take()
    RunFolderClaim(tmp_path / "run").check_is_seen(taken_by)
    for run, owner in (("run", "process 1 on host elsewhere\n"), ("other", taken_by), ("other", "")):
        with pytest.raises(ConfigError, match="is not the main rank's folder"):
            RunFolderClaim(tmp_path / run).check_is_seen(owner)
    claim.give_up()
