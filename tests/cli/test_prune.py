from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.cli.main import main
from llmscale.terminal import progress


def test_a_pruned_run_is_a_model_with_both_losses_said(
    trained_run: Path,
    tiny_set: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, again = tmp_path / "pruned", tmp_path / "again"
    monkeypatch.setattr(progress, "_LINE_INTERVAL_S", 0.0)
    assert main(["prune", str(trained_run), "--to", str(out)]) == 0
    out_text, err_text = capsys.readouterr()
    for label in ("Taking the loss before", "Taking the loss after"):
        assert re.search(rf"{label}: .*sequences.* 100%", err_text), err_text
    assert "4 linear layers, 6,144 of 12,288 weights zero (50.0%)" in out_text
    _, after = re.search(r"validation loss (\S+) -> (\S+)", out_text).groups()
    assert main(["eval", str(out), "--data", str(tiny_set), "--json", str(tmp_path / "result.json")]) == 0
    assert f"{json.loads((tmp_path / 'result.json').read_text())['validation']['loss']:.4f}" == after
    # What is pruned already stays as it is.
    assert main(["prune", str(out), "--to", str(again), "--val-samples", "0"]) == 0
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert main(["prune", str(trained_run), "--to", str(out), "--overwrite", "--val-samples", "0"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("RUN", "--to", "RUN/checkpoints/x"), "only training writes"),
        (("RUN", "--to", "full"), "which no export wrote"),
        (("RUN", "--to", "out", "--gpu", "h100"), "Did you mean 'h100-80gb'? GPUs: a100-40gb"),
        (("RUN/checkpoints", "--to", "out"), "holds checkpoints, and is not a run folder. Name a run folder"),
        (("model", "--to", "out"), "the model hf:model: model_type"),
    ],
)
def test_what_is_wrong_is_said_without_torch(
    words: tuple[str, ...], message: str, trained_run: Path, llmscale: Callable, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": 1}')
    (tmp_path / "model" / "model.safetensors").touch()
    done = llmscale("prune", *(word.replace("RUN", str(trained_run)) for word in words), torch_free=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "--gpu-memory-gib" not in done.stderr
    assert not (tmp_path / "out").exists()
