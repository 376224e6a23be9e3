from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest

from llmscale import __version__
from llmscale.checkpoint.manifest import CHECKPOINTS_NAME
from llmscale.checkpoint.published_files import PUBLISHED_NAME
from llmscale.cluster.launch.agent import CLAIMS_NAME
from llmscale.cluster.launch.attempts import ATTEMPTS_NAME, LOGS_NAME
from llmscale.cluster.launch.supervisor import LAUNCH_LOCK_NAME
from llmscale.data.mixture import KEPT_NAME
from llmscale.data.sample_log import FOLDER as SAMPLES_NAME
from llmscale.errors import ConfigError
from llmscale.training import run_folder
from llmscale.training.failure import FAILURE_NAME
from llmscale.training.run_folder import create_run_folder, lock_run_folder, save_run_description
from llmscale.training.trackers.tensorboard_files import FOLDER as TENSORBOARD_NAME

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
    with pytest.raises(ConfigError, match=r"--run .*new cannot be written to: No space left on device"):
        create_run_folder(disk / "b" / "new")
    assert sorted(os.listdir(disk)) == ["a", "ballast"]
    assert create_run_folder(run) == []
    lock = lock_run_folder(run)
    with pytest.raises(ConfigError, match="Free some space"):
        save_run_description(run, {"lr": 2.0}, RESOLVED, {}, is_new=True)
    save_run_description(run, {"lr": 2.0}, RESOLVED, {}, is_new=False)
    assert json.loads((run / "config.json").read_text())["config"] == {"lr": 1.0}
    assert sorted(os.listdir(run)) == [".lock", "config.json", "ds_config.json", "starts.jsonl"]
    lock.close()
    ballast.unlink()


def test_a_lock_that_its_owner_removes_meanwhile_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our opening the file and our locking it, its last owner gives up and removes it."""
    lock, opened = run_folder._lock, []

    def lock_late(file: TextIO) -> bool:
        if not opened:
            (tmp_path / ".lock").unlink()
        opened.append(file)
        return lock(file)

    monkeypatch.setattr(run_folder, "_lock", lock_late)
    file = lock_run_folder(tmp_path)
    assert len(opened) == 2
    assert os.fstat(file.fileno()).st_nlink == 1
    file.close()


def test_every_name_that_a_run_writes_to_is_guarded() -> None:
    assert {FAILURE_NAME, ATTEMPTS_NAME, LAUNCH_LOCK_NAME} < set(run_folder.OWN_FILES)
    folders = {CHECKPOINTS_NAME, LOGS_NAME, CLAIMS_NAME, SAMPLES_NAME, TENSORBOARD_NAME}
    assert folders < set(run_folder.OWN_FOLDERS)
    assert run_folder.ORIGIN_FOLDERS == (KEPT_NAME, PUBLISHED_NAME)


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


def test_the_probe_of_the_disk_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f".writable-{os.getpid()}").symlink_to(tmp_path / "mine")
    create_run_folder(tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "mine"
