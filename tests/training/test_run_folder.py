from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from llmscale import __version__
from llmscale.data.mixture import KEPT_NAME
from llmscale.errors import ConfigError, DataError
from llmscale.files.folder_lock import lock_folder
from llmscale.training import run_folder
from llmscale.training.run_folder import (
    FAILURE_NAME,
    START_TEXT_NAME,
    RunFolderClaim,
    clear_failure,
    create_run_folder,
    open_start_text,
    record_failure,
    save_run_description,
    source_hashes,
    working_commit,
)

RESOLVED = {"plan": {"world_size": 2}}


def test_a_folder_is_made_with_its_parents_and_left_empty(tmp_path: Path) -> None:
    create_run_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    create_run_folder(tmp_path / "a" / "b")


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--run .*file/run cannot be written to: Not a directory\. Name a folder"):
        create_run_folder(tmp_path / "file" / "run")
    if os.path.isdir("/proc"):
        with pytest.raises(ConfigError, match="--run /proc/run cannot be written to"):
            create_run_folder(Path("/proc/run"))


def test_the_description_holds_what_explains_a_run_and_every_start_adds_a_line(tmp_path: Path) -> None:
    for lr in (1e-3, 2e-3):
        save_run_description(tmp_path, {"lr": lr}, RESOLVED, {"zero_optimization": {"stage": 2}}, is_new=lr == 1e-3)
    assert json.loads((tmp_path / "config.json").read_text()) == {"config": {"lr": 2e-3}, "resolved": RESOLVED}
    assert json.loads((tmp_path / "ds_config.json").read_text()) == {"zero_optimization": {"stage": 2}}
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert len(starts) == 2
    assert starts[0]["world_size"] == 2
    assert starts[0]["llmscale"] == __version__
    assert set(starts[0]["versions"]) >= {"torch", "deepspeed", "numpy"}
    assert starts[0]["versions"]["torch"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "ds_config.json", "starts.jsonl"]


def test_a_start_names_the_commit_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert working_commit() == {}
    (tmp_path / "run").mkdir()
    (tmp_path / "file").write_text("one")
    words = ("-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--no-verify", "--message=first")
    for command in (("init", "--quiet"), ("add", "file"), words):
        subprocess.run(["git", *command], check=True)
    save_run_description(tmp_path / "run", {}, RESOLVED, {}, is_new=False)
    (tmp_path / "file").write_text("two")
    save_run_description(tmp_path / "run", {}, RESOLVED, {}, is_new=False)
    clean, dirty = map(json.loads, (tmp_path / "run" / "starts.jsonl").read_text().splitlines())
    assert len(clean["commit"]) == 40
    assert (dirty["commit"], clean["dirty"], dirty["dirty"]) == (clean["commit"], False, True)
    # Neither a program of the repository's configuration nor a name that is not UTF-8 disturbs it.
    (tmp_path / "monitor").write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    (tmp_path / "monitor").chmod(0o755)
    (tmp_path / os.fsdecode(b"\xff")).write_text("")
    for setting in (("core.fsmonitor", str(tmp_path / "monitor")), ("core.quotePath", "false")):
        subprocess.run(["git", "config", *setting], check=True)
    subprocess.run(["git", "-c", "core.fsmonitor=false", "add", os.fsdecode(b"\xff")], check=True)
    assert working_commit() == {"commit": clean["commit"], "dirty": True}
    assert not (tmp_path / "was-run").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert working_commit() == {}


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def test_a_full_disk_refuses_a_new_run_and_lets_one_go_on(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(1 << 18)
    run = disk / "a" / "old"
    create_run_folder(run)
    save_run_description(run, {"lr": 1.0}, RESOLVED, {}, is_new=True)
    ballast = fill(disk)
    claim = RunFolderClaim(disk / "b" / "new")
    with pytest.raises(ConfigError, match=r"--run .*new.*No space left on device"):
        claim.take()
        save_run_description(disk / "b" / "new", {"lr": 1.0}, RESOLVED, {}, is_new=True)
    claim.give_up()
    assert sorted(os.listdir(disk)) == ["a", "ballast"]
    assert create_run_folder(run) == []
    lock = lock_folder(run)
    with pytest.raises(ConfigError, match="Free some space"):
        save_run_description(run, {"lr": 2.0}, RESOLVED, {}, is_new=True)
    save_run_description(run, {"lr": 2.0}, RESOLVED, {}, is_new=False)
    assert json.loads((run / "config.json").read_text())["config"] == {"lr": 1.0}
    assert sorted(os.listdir(run)) == [".lock", "config.json", "ds_config.json", "starts.jsonl"]
    lock.close()
    ballast.unlink()


@pytest.mark.parametrize("name", [*run_folder.OWN_FILES, *run_folder.OWN_FOLDERS])
def test_a_link_in_the_place_of_what_a_run_writes_is_refused(tmp_path: Path, name: str) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    run.mkdir()
    mine.write_text("mine")
    (run / name).symlink_to(mine)
    with pytest.raises(ConfigError, match=rf"--run .*run: {name} is a symbolic link.* may itself be a link"):
        create_run_folder(run)
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(ConfigError, match=f"{name} is not a fi|{name} is not a fo"):
        create_run_folder(run)
    assert os.listdir(run) == [name]
    assert mine.read_text() == "mine"


def test_a_run_folder_may_itself_be_a_link_and_hold_links_that_no_run_writes_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "notes").symlink_to(tmp_path / "elsewhere")
    create_run_folder(tmp_path / "run")
    save_run_description(tmp_path / "run", {}, RESOLVED, {}, is_new=True)
    assert (tmp_path / "disk" / "starts.jsonl").is_file()


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
def test_nothing_is_saved_to_a_folder_that_is_not_this_runs_any_more(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    claim = RunFolderClaim(run)
    claim.check()
    claim.take()
    claim.check()
    shutil.rmtree(run) if how == "removed" else run.rename(run.with_name("renamed"))
    other = RunFolderClaim(run)
    if how == "replaced":
        other.take()
        other.check()
    with pytest.raises(OSError, match=f"{run} was removed, renamed or replaced during training"):
        claim.check()
    claim.close()
    other.close()


def test_a_claim_given_up_leaves_what_was_there(tmp_path: Path) -> None:
    claim = RunFolderClaim(tmp_path / "a" / "b" / "run")
    claim.take()
    save_run_description(tmp_path / "a" / "b" / "run", {}, {"plan": {"world_size": 2}}, {}, is_new=True)
    (tmp_path / "a" / "b" / "run" / KEPT_NAME).mkdir()
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


def test_a_claim_is_visible_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_VISIBLE_PAUSE_S", 0.001)
    claim = RunFolderClaim(tmp_path / "run")
    taken_by = claim.take()
    assert RunFolderClaim(tmp_path / "run").is_visible(taken_by)
    for run, owner in (("run", "process 1 on host elsewhere\n"), ("other", taken_by), ("other", "")):
        assert not RunFolderClaim(tmp_path / run).is_visible(owner)
    claim.give_up()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (DataError("no token\nsecond line"), "no token"),
        (RuntimeError("\n CUDA out of memory. \nTried"), "RuntimeError: CUDA out of memory."),
        (ValueError(), "ValueError"),
        (KeyError("x" * 10_000), "KeyError: '" + "x" * 589),
    ],
)
def test_the_first_rank_that_fails_says_why(error: Exception, message: str, tmp_path: Path) -> None:
    record_failure(tmp_path, error, step=3, rank=1)
    record_failure(tmp_path, RuntimeError("connection closed by peer"), step=3, rank=0)
    record = json.loads((tmp_path / FAILURE_NAME).read_text())
    assert (record["error"], record["step"], record["rank"]) == (message, 3, 1)
    assert [path.name for path in tmp_path.iterdir()] == [FAILURE_NAME]
    clear_failure(tmp_path)
    clear_failure(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone_or_full_is_no_second_error(tmp_path: Path) -> None:
    record_failure(tmp_path / "gone", RuntimeError("x"), step=0, rank=0)
    assert not list(tmp_path.iterdir())
    (tmp_path / FAILURE_NAME).mkdir()
    record_failure(tmp_path, RuntimeError("x"), step=0, rank=0)
    clear_failure(tmp_path)


def test_every_python_file_by_its_path_and_a_reason_where_one_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_bytes(b"x = 1\n")
    (tmp_path / "note.txt").write_text("not code")
    (tmp_path / "gone.py").symlink_to("nowhere")
    assert source_hashes(tmp_path) == {
        "gone.py": "cannot be read: No such file or directory",
        "inner/a.py": hashlib.sha256(b"x = 1\n").hexdigest(),
    }


def test_a_start_whose_text_cannot_be_written_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / START_TEXT_NAME).mkdir()
    write = open_start_text(tmp_path)
    for line in ("first", "second"):
        write(line)
    assert capsys.readouterr().err.count("WARNING") == 1
