"""llmscale.api, as docs/api.md describes it. Here for the trained run of tests/cli/conftest.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmscale import api
from llmscale.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_has_its_checkpoints_model_and_metrics(trained_run: Path) -> None:
    run, before = api.load_run(trained_run), api.load_run(str(trained_run), step=2)
    assert (run.step, before.step, run.shape.n_embd) == (3, 2, 32)
    model = run.load_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == run.shape.num_parameters
    assert run.tokenizer.decode(run.tokenizer.encode("one two")) == "one two"
    metrics = api.read_metrics(trained_run)
    assert metrics["step"].tolist() == [1, 3]
    assert np.isfinite(metrics["loss"]).all() and len(metrics["lr"]) == 2
    assert api.read_metrics(trained_run, "validation")["step"].size == 0


def test_an_estimate_is_the_command_s(capsys: pytest.CaptureFixture[str]) -> None:
    words = "estimate --model gpt2-124m --gpu h100-80gb --num-gpus 8 --precision bf16 --json"
    assert main(words.split()) == 0
    printed = json.loads(capsys.readouterr().out)
    estimate = api.estimate("gpt2-124m", gpu="h100-80gb", num_gpus=8, precision="bf16")
    assert json.loads(json.dumps(estimate)) == {key: printed[key] for key in estimate}
    assert estimate["rows"][estimate["recommended"]["row"]]["fits"]


def test_a_dataset_has_samples_and_their_text(tiny_set: Path) -> None:
    dataset = api.open_dataset(tiny_set)
    assert len(dataset) == dataset.manifest.splits["train"].num_samples
    tokens = dataset[0]
    assert tokens.shape == (dataset.manifest.seq_len + 1,)
    assert dataset.text(0) == dataset.tokenizer.decode(tokens.tolist())
    assert dataset[-1].tolist() == dataset[len(dataset) - 1].tolist()
    with pytest.raises(IndexError, match="no sample"):
        dataset[len(dataset)]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: api.load_run("no/such/run"), "no/such/run"),
        (lambda: api.estimate("gpt2-124", gpu="h100-80gb"), "gpt2-124m"),
        (lambda: api.estimate("gpt2-124m", gpu="h100-80gb", seqlen=7), "--seq-len"),
        (lambda: api.estimate("gpt2-124m", gpu="h100-80gb", emit="x.json"), "emit"),
        (lambda: api.open_dataset("no/such/set"), "no/such/set"),
        (lambda: api.read_metrics("ftp://a/b"), "ftp://a/b"),
    ],
)
def test_mistakes_are_one_clear_error(call: Callable[[], object], named: str) -> None:
    with pytest.raises(api.LlmscaleError) as caught:
        call()
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_the_page_names_every_function_and_its_example_runs(
    trained_run: Path, tiny_set: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for name in api.__all__:
        assert f"`{name}" in page, name
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    example = example.replace("runs/default", str(trained_run)).replace("data/mine", str(tiny_set))
    exec(example, {})
    assert "GiB of each GPU free" in capsys.readouterr().out
