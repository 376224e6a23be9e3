"""`llmscale data` as a user calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmscale.cli import data
from llmscale.config.command_line import FlagParser
from llmscale.data.shards.manifest import load_manifest


def _call(*words: str | Path) -> int:
    parser = FlagParser()
    data.add_parser(parser.add_subparsers())
    args = parser.parse_args(["data", *map(str, words)])
    status: int = args.handler(args)
    return status


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"document {number}: the cat sat on the mat\n" * 6)
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
    output = capsys.readouterr().out
    assert "280 tokens" in output and "the cat sat on the mat" in output and "unigram entropy" in output
    assert "documents by their tokens" in output and "[end of document]" in output and "copies of another" in output
    assert _call("verify", tmp_path / "set") == 0
    assert "0 damaged" in capsys.readouterr().out
    shard = tmp_path / "set" / "train" / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    assert _call("verify", tmp_path / "set") == 1
    captured = capsys.readouterr()
    assert "1 damaged" in captured.out and "was altered" in captured.err and "--overwrite" in captured.err
    assert load_manifest(tmp_path / "set").splits.keys() == {"train", "val"}


@pytest.mark.parametrize(
    ("num_words", "flags", "words", "has_val"),
    [
        (20, (), "Validation is the last 17 of the text's 361 tokens", True),
        (1, (), "No validation split: the text is too short, 19 tokens", False),
        (20, ("--val-fraction", "0"), "No validation split: --val-fraction is 0.", False),
    ],
)
def test_how_one_document_is_split_is_said(
    num_words: int,
    flags: tuple[str, ...],
    words: str,
    has_val: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "one.txt").write_text("a single document " * num_words)
    assert _call("prepare", "--input", tmp_path / "one.txt", "--out", tmp_path / "set", "--tokenizer", "bytes",
                 "--seq-len", "16", "--workers", "1", *flags) == 0  # fmt: skip
    assert words in capsys.readouterr().err
    assert (tmp_path / "set" / "val").exists() == has_val


def test_files_that_are_passed_over_and_a_large_validation_split_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.txt").write_text(f"text number {number} " * 20)
    for name in ("a.bin", "b.bin", "LICENSE"):
        (folder / name).write_text("not read")
    assert _call("prepare", "--input", folder, "--out", tmp_path / "set", "--tokenizer", "bytes", "--seq-len", "16",
                 "--seed", "5", "--workers", "1") == 0  # fmt: skip
    errors = capsys.readouterr().err
    assert "(.bin is read if --input or --glob names it): a.bin, b.bin." in errors
    assert "Skipped 1 file of unknown type (--glob chooses files): LICENSE." in errors
    assert "Validation has 10% of the tokens, not 1%: 1 of 10 documents" in errors


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from llmscale.cli.main import main
try:
    main(["data", "prepare", "--help"])
except SystemExit:
    pass
heavy = {"torch", "streaming", "tiktoken", "tokenizers", "pyarrow", "datasets", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
