"""`llmscale data` as a user calls it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from llmscale.cli import data
from llmscale.data.manifest import load_manifest
from llmscale.errors import DataError


def _call(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    data.add_parser(parser.add_subparsers())
    args = parser.parse_args(["data", *map(str, words)])
    status: int = args.handler(args)
    return status


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"document {number}: the cat sat on the mat\n" * 20)
    return folder


def test_train_prepare_inspect_verify(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call("train-tokenizer", "--input", corpus, "--out", tmp_path / "bpe", "--vocab-size", "280") == 0
    prepare = ["prepare", "--input", corpus, "--out", tmp_path / "set", "--tokenizer", tmp_path / "bpe"]
    prepare += ["--seq-len", "32", "--val-fraction", "0.1", "--workers", "1"]
    assert _call(*prepare) == 0
    assert "Prepared in" in capsys.readouterr().out
    assert _call(*prepare) == 0
    assert "Already prepared" in capsys.readouterr().out
    assert _call("inspect", tmp_path / "set") == 0
    shown = capsys.readouterr().out
    assert "280 tokens" in shown and "the cat sat on the mat" in shown and "unigram entropy" in shown
    assert _call("verify", tmp_path / "set") == 0
    assert "0 damaged" in capsys.readouterr().out
    shard = tmp_path / "set" / "train" / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    assert _call("verify", tmp_path / "set") == 1
    captured = capsys.readouterr()
    assert "1 damaged" in captured.out and "was altered" in captured.err
    assert load_manifest(tmp_path / "set").splits.keys() == {"train", "val"}


def test_one_document_makes_no_validation_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("a single document " * 20)
    assert _call("prepare", "--input", tmp_path / "one.txt", "--out", tmp_path / "set", "--tokenizer", "bytes",
                 "--seq-len", "16", "--workers", "1") == 0  # fmt: skip
    assert "No validation split" in capsys.readouterr().err
    assert not (tmp_path / "set" / "val").exists()


def test_errors_come_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--seq-len must be at least 1"):
        _call(
            "prepare", "--input", "python-stdlib", "--out", tmp_path / "set", "--tokenizer", "bytes", "--seq-len", "0"
        )
    with pytest.raises(DataError, match="Did you mean 'gpt2'"):
        _call("prepare", "--input", "python-stdlib", "--out", tmp_path / "set", "--tokenizer", "gpt-2")
    assert not any(tmp_path.iterdir())


def test_help_imports_nothing_heavy() -> None:
    code = """
import argparse, sys
from llmscale.cli import data
parser = argparse.ArgumentParser()
data.add_parser(parser.add_subparsers())
try:
    parser.parse_args(["data", "prepare", "--help"])
except SystemExit:
    pass
heavy = {"torch", "streaming", "tiktoken", "tokenizers", "pyarrow", "datasets", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
