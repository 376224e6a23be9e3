from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llmscale import __version__
from llmscale.errors import ConfigError
from llmscale.training.run_folder import create_run_folder, save_run_description

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
        save_run_description(tmp_path, {"lr": lr}, RESOLVED, {"zero_optimization": {"stage": 2}})
    assert json.loads((tmp_path / "config.json").read_text()) == {"config": {"lr": 2e-3}, "resolved": RESOLVED}
    assert json.loads((tmp_path / "ds_config.json").read_text()) == {"zero_optimization": {"stage": 2}}
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert len(starts) == 2
    assert starts[0]["world_size"] == 2
    assert starts[0]["llmscale"] == __version__
    assert set(starts[0]["versions"]) >= {"torch", "deepspeed", "numpy"}
    assert starts[0]["versions"]["torch"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "ds_config.json", "starts.jsonl"]
