"""wandb in its offline mode, for real."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.training.trackers.wandb_run import start_wandb


@pytest.mark.slow
def test_offline_runs_leave_their_files_in_the_run_folder_and_continue_under_one_id(
    ranks: Callable, train_command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    flags = ("--wandb", "--wandb-name", "a name", "--steps", "3", "--val-every", "3")
    job = ranks([__file__, *train_command(*flags)[1:]], 2)
    outputs = job.wait()
    assert job.exit_codes == [0, 0], outputs
    assert "wandb imported: True" in outputs[0]
    assert "wandb imported: False" in outputs[1], "only the main rank logs"
    files = list(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1
    content = files[0].read_bytes()
    for word in (b"train/loss", b"train/tokens_per_second", b"validation/loss", b"a name"):
        assert word in content
    state = json.loads((run / "checkpoints/step-00000003/state.json").read_text())
    assert state["wandb_run_id"] == files[0].stem.removeprefix("run-")


def test_without_the_flag_wandb_is_not_even_imported(ranks: Callable, train_command: Callable, tmp_path: Path) -> None:
    job = ranks([__file__, *train_command("--steps", "1")[1:]], 1)
    output = job.wait()[0]
    assert job.exit_codes == [0], output
    assert "wandb imported: False" in output
    assert not (tmp_path / "run" / "wandb").exists()


def test_a_missing_wandb_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"--wandb needs the wandb package: `pip install -e .*\[train\]"):
        start_wandb(tmp_path, project="p", name="n", config={}, run_id=None)


def test_without_an_account_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError) as raised:
        start_wandb(tmp_path, project="p", name="n", config={}, run_id=None)
    assert "No API key configured. Use `wandb login` to log in." in str(raised.value)
    assert "WANDB_MODE=offline" in str(raised.value)
    assert "\n" not in str(raised.value)


if __name__ == "__main__":
    from llmscale.train import main

    status = main()
    print("wandb imported:", "wandb" in sys.modules, flush=True)
    sys.exit(status)
