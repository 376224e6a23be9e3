"""Every command that names something missing, or a word that is no argument, ends at once with status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmscale.cli.main import main
from tests.object_store import BUCKET, ObjectStore

MISSING = """
runs nope
report nope
eval nope
sample nope hi
export nope --to out
prune nope --to out
checkpoint list nope
checkpoint show nope
checkpoint verify nope
checkpoint prune nope
checkpoint diff nope nope
data inspect nope
data verify nope
data which nope --step 3
replay nope --step 3
data prepare --input nope --tokenizer bytes --seq-len 64 --out out
data clean --input nope --out out
data train-tokenizer --input nope --out out --vocab-size 300
ladder plan --flops 1e18 --data nope --out out
ladder run nope
ladder fit nope
doctor --hostfile nope
doctor --ds nope.json
doctor --run-config nope.yaml
doctor -- --config nope.yaml
doctor -- --ds nope.json
launch --hostfile nope -- --steps 3
launch -- --config nope.yaml
train --data nope
train --config nope.yaml
train --text nope
estimate --model hf:./nope --gpu h100-80gb
estimate --hf ./nope --gpu h100-80gb
estimate --ds nope.json --model gpt2-124m --gpu h100-80gb
plan --law nope.json --flops 1e20
plan --model hf:./nope
"""
STRAY = """
doctor foo
doctor -- foo
doctor foo -- --steps 3
launch foo
launch foo -- --steps 3
ladder run nope foo
estimate foo --model gpt2-124m --gpu h100-80gb
plan foo --flops 1e20
runs nope foo
train foo
"""
STORED = """
runs URL
report URL
eval URL
sample URL hi
export URL --to out
prune URL --to out
checkpoint list URL
checkpoint show URL
checkpoint verify URL
checkpoint diff URL URL
data inspect URL
data verify URL
data which URL --step 3
replay URL --step 3
data prepare --input URL --tokenizer bytes --seq-len 64 --out out
data clean --input URL --out out
"""


@pytest.fixture(autouse=True)
def no_host_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llmscale.cluster.doctor.diagnose._probe", lambda *_: pytest.fail("a host was asked"))


@pytest.mark.parametrize("words", [line for line in (MISSING + STRAY).splitlines() if line])
def test_a_missing_input_or_a_stray_word_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and ("foo" if " foo" in words else "nope") in error
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("words", [line for line in STORED.splitlines() if line])
def test_a_missing_url_is_refused(
    words: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMSCALE_RUNS", str(Path("copies").absolute()))
    url = f"s3://{BUCKET}/nothing/here"
    assert main(words.replace("URL", url).split()) == 2
    assert "nothing/here" in capsys.readouterr().err
