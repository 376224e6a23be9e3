from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.cli.main import main


@pytest.fixture
def run(ranks: Callable, train_command: Callable, tmp_path: Path) -> Path:
    job = ranks(train_command("--steps", "4", "--log-every", "2"), 1)
    job.wait()
    assert job.exit_codes == [0]
    return tmp_path / "run"


def test_samples_of_a_step_with_their_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "which", str(run), "--step", "3", "--json"]) == 0
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sample["position"] for sample in samples] == list(range(16, 24))
    assert all(sample["shard"] == "train/shard.00000.mds" and len(sample["text"]) > 20 for sample in samples)
    assert main(["data", "which", str(run), "--step", "3", "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"sample {samples[0]['sample']:,} (" in shown
    assert "7 more" in shown
    # A step that was never done, and a folder that is no run.
    assert main(["data", "which", str(run), "--step", "5"]) == 2
    assert "1 to 4" in capsys.readouterr().err
    assert main(["data", "which", str(run.parent), "--step", "1"]) == 2
