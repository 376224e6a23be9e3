from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from llmscale.data.prepare.sources.open_source import open_source
from llmscale.errors import DataError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    # Two frames, as parallel compressors write.
    ".zst": lambda data: zstandard.compress(data[:7]) + zstandard.compress(data[7:]),
}


def _documents(spec: Path | str, **options: str | bool | None) -> list[str]:
    return list(open_source(str(spec), **options).documents())


@pytest.mark.parametrize("suffix", COMPRESS)
def test_text_jsonl_and_parquet_compressed_or_not(tmp_path: Path, suffix: str) -> None:
    texts = ["first document\nwith two lines", "zweites Dokument: 你好 🙂"]
    jsonl = "\n".join(json.dumps({"text": text, "id": 1}) for text in texts) + "\n\n"
    parquet.write_table(pyarrow.table({"text": texts, "id": [1, 2]}), tmp_path / "plain.parquet")
    table = (tmp_path / "plain.parquet").read_bytes()
    (tmp_path / "plain.parquet").unlink()
    for name, contents in [("a.txt", texts[0].encode()), ("b.jsonl", jsonl.encode()), ("c.parquet", table)]:
        (tmp_path / f"{name}{suffix}").write_bytes(COMPRESS[suffix](contents))
    assert _documents(tmp_path, glob="*") == [texts[0], *texts, *texts]


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ["b.txt", "a/z.md", "a/b/c.py", ".hidden.txt", ".git/x.txt", "picture.png"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert _documents(tmp_path) == ["a/b/c.py", "a/z.md", "b.txt"]
    assert _documents(tmp_path, glob="*.png") == ["picture.png"]
    assert _documents(tmp_path, glob="a/*") == ["a/b/c.py", "a/z.md"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"text": 1', r"line 3: not valid JSON \(Expecting ',' delimiter at character 12\)"),
        ('{"body": "x"}', r"line 3: no field 'text'\. Its fields: body"),
        ('{"text": null}', "line 3: the field 'text' holds NoneType, not text"),
        ("[1]", "line 3: expected a JSON object, found list"),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=text) as caught:
        _documents(path)
    assert str(path) in str(caught.value)


def test_a_byte_order_mark_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n" + b'{"text": "a"}\n')
    assert _documents(path) == ["a"]


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": "a\\ud83db"}\n{"text": "\\ud83d\\ude42"}\n')
    assert _documents(path) == ["a\ufffdb", "🙂"]
    path.write_text('{"messages": [{"role": "user", "content": "a\\ud83d"}]}\n')
    [conversation] = _documents(path, is_chat=True, text_field="messages")
    assert json.loads(conversation)["messages"][0]["content"] == "a\ufffd"


def test_text_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    parquet.write_table(pyarrow.table({"body": ["y", None]}), tmp_path / "b.parquet")
    assert _documents(tmp_path, text_field="body") == ["x", "y", ""]
    with pytest.raises(DataError, match=r"no column 'text'\. Its columns: body"):
        _documents(tmp_path / "b.parquet")


def test_parquet_that_is_none_or_holds_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"a\.parquet is not a readable Parquet file"):
        _documents(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": [1]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="holds int64, not strings"):
        _documents(tmp_path / "b.parquet")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_truncated_and_damaged_archives_are_errors(tmp_path: Path, suffix: str) -> None:
    """zstandard's own reader takes a truncated file for a short one."""
    path = tmp_path / f"a.txt{suffix}"
    packed = COMPRESS[suffix](bytes(range(256)) * 4000)
    for damaged in (packed[:-9], b"x" + packed[1:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged or cut short"):
            _documents(path)


def test_undecodable_text_is_an_error_or_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.txt").write_text("good")
    (tmp_path / "c.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8.* --skip-undecodable"):
        _documents(tmp_path)
    source = open_source(str(tmp_path), skip_undecodable=True)
    assert list(source.documents()) == ["good", "# coding: latin-1\nx = 'é'\n"]
    assert source.skipped == 1


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist.* hf:NAME\[:CONFIG\] or python-stdlib"):
        open_source(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="Did you mean 'python-stdlib'"):
        open_source("python-stdlb")
    with pytest.raises(DataError, match="none of its files have a known suffix"):
        open_source(str(tmp_path))


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = open_source(str(tmp_path)).fingerprint()
    assert open_source(str(tmp_path)).fingerprint() == before
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert open_source(str(tmp_path)).fingerprint() != before


def test_standard_library_is_tens_of_megabytes_of_text() -> None:
    source = open_source("python-stdlib")
    assert source.total_bytes is not None and source.total_bytes > 10_000_000
    texts = source.documents()
    assert sum(len(next(texts)) for _ in range(20)) > 10_000


def test_hugging_face_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder goes through the same loader as the hub's names."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert _documents(f"hf:{tmp_path / 'data'}") == ["a", "b"]
    with pytest.raises(DataError, match=r"no field 'body'\. Its fields: text"):
        _documents(f"hf:{tmp_path / 'data'}", text_field="body")
    with pytest.raises(DataError, match=r"Cannot read hf:.*split test"):
        _documents(f"hf:{tmp_path / 'data'}", hf_split="test")
