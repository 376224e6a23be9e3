from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.cli.main import main
from llmscale.training.run_folder import record_failure


def test_a_real_run_is_listed_without_torch(trained_run: Path, llmscale: Callable) -> None:
    done = llmscale("runs", str(trained_run.parent), torch_free=True)
    assert (done.returncode, done.stderr) == (0, "")
    head, line = done.stdout.splitlines()
    assert head.split() == ["run", "state", "step", "loss", "goodput", "last", "seen", "command"]
    assert line.split()[:5] == ["run", "finished", "3", "of", "3"]
    assert "train.py --data=" in line and line.endswith("--num-workers=0")
    (run,) = json.loads(llmscale("runs", str(trained_run.parent), "--json").stdout)
    assert (run["run"], run["state"], run["step"], run["total_steps"]) == (str(trained_run), "finished", 3, 3)
    assert 4 < run["loss"] < 7 and 0 < run["goodput"] < 1 and run["problem"] is None


def test_names_from_the_disk_cannot_act_on_the_terminal(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained_run, tmp_path / "a\x1b[2Jb", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(trained_run, tmp_path / ("long" * 20), ignore=shutil.ignore_patterns("checkpoints"))
    with (tmp_path / ("long" * 20) / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 3, "loss": 1e30}\n')
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for width in ("60", "80", "200"):
        monkeypatch.setenv("COLUMNS", width)
        assert main(["runs", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert "a\\x1b[2Jb" in out and "\x1b" not in out
        assert max(map(len, out.splitlines())) <= int(width)


def test_a_loss_that_is_not_finite_is_null_in_json(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained_run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 3, "loss": Infinity}\n')
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["loss"] is None
    assert main(["runs", str(tmp_path)]) == 0
    assert "not finite" in capsys.readouterr().out


def test_what_ended_a_run_stands_below(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained_run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "event", "event": "start", "step": 3, "history": "0", "branches": []}\n')
    record_failure(tmp_path / "run", RuntimeError("the \x1b[2J disk\nfailed"), step=3, rank=0)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["runs", str(tmp_path)]) == 0
    _, row, *_, note = capsys.readouterr().out.splitlines()
    assert row.split()[:2] == ["run", "failed"]
    assert note == "run: failed: RuntimeError: the \\x1b[2J disk"
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["error"] == "RuntimeError: the \x1b[2J disk"


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("No runs below ")
    assert main(["runs", str(tmp_path / "nothing")]) == 2
    assert "is not a folder" in capsys.readouterr().err
