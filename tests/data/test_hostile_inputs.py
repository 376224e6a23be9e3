"""Inputs that unfold, never end, or are no files: bounded memory, one line, no hang."""

from __future__ import annotations

import gzip
import json
import os
import resource
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from llmscale.data.prepare.sources import formats, source
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.prepare.sources.source import describe_passed_over
from llmscale.data.tokenizers.hugging_face import load_huggingface
from llmscale.data.tokenizers.tokenizer import load_ranks_file
from llmscale.errors import DataError
from tests import warm_start

MIB = 1 << 20


def _gzip(total_bytes: int) -> bytes:
    return gzip.compress(b"a" * MIB) * (total_bytes // MIB)


def _zstd(total_bytes: int) -> bytes:
    compressor = zstandard.ZstdCompressor(3).compressobj()
    return b"".join(compressor.compress(b"a" * MIB) for _ in range(total_bytes // MIB)) + compressor.flush()


@pytest.mark.parametrize("name", ["bomb.txt.gz", "bomb.jsonl.zst", "bomb.parquet.zst"])
def test_a_bomb_is_refused_in_little_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes((_gzip if name.endswith("gz") else _zstd)(400 * MIB))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"unpacks to more than 256 times its size|longer than 64 MiB"):
        for _ in open_source(str(path)).documents():
            pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 350 * 1024  # KiB


def test_what_compresses_well_and_is_small_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(_gzip(12 * MIB))
    assert [len(text) for text in open_source(str(tmp_path / "a.txt.gz")).documents()] == [12 * MIB]


def test_a_long_text_is_several_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut behind a line, nothing lost, and said."""
    monkeypatch.setattr(formats, "MAX_TEXT_BYTES", 3 * MIB)
    text = "".join(f"line {number} naïve 数据\n" for number in range(500_000))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    (tmp_path / "one_line.txt").write_text("é" * (4 * MIB), encoding="utf-8")
    (tmp_path / "short.txt").write_text("short")
    opened = open_source(str(tmp_path))
    documents = list(opened.documents())
    assert "".join(documents) == text + "é" * (4 * MIB) + "short"
    assert max(len(document) for document in documents) <= MIB
    assert all(document.endswith("\n") for document in documents[:3])
    assert opened.num_cut == 2


def test_a_long_record_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_DOCUMENT_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "x" * 2000}) + "\n")
    with pytest.raises(DataError, match="line 2: longer than"):
        list(open_source(str(tmp_path / "a.jsonl")).documents())
    parquet.write_table(pa.table({"text": ["a", "x" * 2000]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 1: longer than"):
        list(open_source(str(tmp_path / "a.parquet")).documents())


def test_a_python_file_is_read_in_its_own_coding(tmp_path: Path) -> None:
    (tmp_path / "c.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
    assert list(open_source(str(tmp_path)).documents()) == ["# coding: latin-1\nx = 'é'\n"]


@pytest.mark.parametrize("coding", ["zlib", "unicode_escape", "nonsense"])
def test_codings_that_are_none(coding: str, tmp_path: Path) -> None:
    """Of a Python file: what its first line declares must not unpack it."""
    (tmp_path / "a.py").write_bytes(f"# coding: {coding}\nx = '\\ud800'\n".encode())
    try:
        text = "".join(open_source(str(tmp_path / "a.py")).documents())
    except DataError as error:
        assert "a.py is not" in str(error)
    else:
        text.encode()


def test_what_is_no_file_of_the_folder_is_left_out_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "input"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.txt").write_text("text")
    (folder / "alias.txt").symlink_to("sub/a.txt")
    os.mkfifo(folder / "pipe.txt")
    (folder / "loop").symlink_to(folder)
    opened = open_source(str(folder))
    assert list(opened.documents()) == ["text", "text"]
    assert any("(links to folders, pipes" in line for line in describe_passed_over(opened.passed_over))


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"\xff",
        b"[1]",
        b"{}",
        b'{"a":' * 2000,
        b'{"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}',
    ],
    ids=lambda contents: ascii(contents)[:20],
)
def test_hostile_tokenizers(contents: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(contents)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_huggingface(tmp_path)
    (tmp_path / "x.tiktoken").write_bytes(contents or b"YQ== -1")
    with pytest.raises(DataError, match=r"x\.tiktoken"):
        load_ranks_file(tmp_path / "x.tiktoken")


def test_names_with_control_characters_are_shown_as_text(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a\x1b]0;owned\x07\nerror: fine.txt").write_bytes(b"\xff")
    command = [sys.executable, "-m", "llmscale.cli.main", "data", "prepare", "--tokenizer", "bytes"]
    done = warm_start.run(
        [*command, "--input", str(tmp_path / "in"), "--out", str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "\x1b" not in done.stderr and done.stderr.count("\n") == 1
    assert r"a\x1b]0;owned\x07\nerror: fine.txt" in done.stderr
