"""`llmscale report`: what a user reads after a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmscale.checkpoint.manifest import CheckpointManifest, save_manifest
from llmscale.cli.main import main


@pytest.fixture
def run(tmp_path: Path, tiny_set: Path) -> Path:
    """A run folder on the tiny set, with two logged steps and a validation."""
    (tmp_path / "config.json").write_text(json.dumps({"config": {"data": str(tiny_set)}}))
    records: list[dict[str, object]] = [
        {"kind": "train", "step": step, "loss": loss, "tokens_seen": step * 1000, "tokens_per_second": 2000.0}
        for step, loss in ((1, 5.5), (20, 1.25))
    ]
    records.append({"kind": "validation", "step": 20, "loss": 9.5, "num_samples": 4})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    folder = tmp_path / "checkpoints" / "step-00000020"
    folder.mkdir(parents=True)
    save_manifest(folder, CheckpointManifest(20, 20_000, 1, 2, "fp32", "now", ()))
    return tmp_path


def test_compares_the_losses_with_the_unigram_entropy(
    run: Path, tiny_set: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    output = capsys.readouterr().out
    splits = json.loads((tiny_set / "manifest.json").read_text())["splits"]
    entropy, val_entropy = splits["train"]["unigram_entropy_nats"], splits["val"]["unigram_entropy_nats"]
    assert f"5.500 -> 1.250  ({entropy - 1.25:.3f} below the unigram entropy of its tokens, {entropy:.3f})" in output
    assert f"9.500  ({9.5 - val_entropy:.3f} ABOVE the unigram entropy of its tokens, {val_entropy:.3f})" in output
    assert "20 steps, 20,000 tokens, 2,000 tokens/s" in output
    assert str(run / "checkpoints" / "step-00000020") in output
    assert "-----" in output


def test_a_run_whose_set_is_gone_still_has_a_curve(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.json").unlink()
    assert main(["report", str(run)]) == 0
    output = capsys.readouterr().out
    assert "training loss    5.500 -> 1.250\n" in output
    assert "entropy" not in output


def test_no_run_is_one_line_of_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
