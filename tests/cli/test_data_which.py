from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmscale.cli.main import main


def test_samples_of_a_step_with_their_text(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a step that was not logged."""
    run = str(trained_run)
    assert main(["data", "which", run, "--step", "2", "--json"]) == 0
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sample["position"] for sample in samples] == list(range(4, 8))
    assert all(sample["shard"] == "train/shard.00000.mds" and len(sample["text"]) > 20 for sample in samples)
    assert main(["data", "which", run, "--step", "2", "--samples", "1"]) == 0
    lines = capsys.readouterr().out
    assert f"sample {samples[0]['sample']:,} (" in lines
    assert "3 more" in lines
    # A step that was never done, and a folder that is no run.
    assert main(["data", "which", run, "--step", "4"]) == 2
    assert "1 to 3" in capsys.readouterr().err
    assert main(["data", "which", str(trained_run.parent), "--step", "1"]) == 2
