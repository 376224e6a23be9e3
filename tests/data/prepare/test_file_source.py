"""Which files of a folder or an archive are read, and which are named as what they are."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from llmscale.data.prepare.prepare_set import PrepareOptions, prepare
from llmscale.data.prepare.sources.file_source import FileSource
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.prepare.sources.source import describe_passed_over
from llmscale.data.tokenizers.load_tokenizer import load_tokenizer
from llmscale.errors import DataError
from tests.data.prepare.conftest import parquet_of, tar_of
from tests.object_store import ObjectStore

LINES = b'{"text": "one"}\n{"text": "two"}\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"6" * 64 + b"\nsize 146946961\n"
BESIDE = {
    "README.md": b"---\nlicense: mit\n---\nA card.",
    "LICENSE": b"MIT",
    "SHA256SUMS.txt": b"0 a",
    "infos.json": b'{"a": 1}',
    ".gitattributes": b"*",
}


def _read(spec: Path | str, **options: str | bool | None) -> list[str]:
    return list(open_source(str(spec), **options).documents())


def _write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, contents in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(contents)
    return folder


RECORDS = {
    "data/a.jsonl": LINES,
    "a.json.gz": gzip.compress(LINES),
    "a.txt": LINES,
    "a.csv": b"id,text\n1,one\n2,two\n",
    "x/a.parquet": parquet_of({"text": ["one", "two"]}),
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("kind", ["folder", "tar", "tar.gz", "store"])
def test_records_are_read_without_the_files_beside_them(
    name: str, kind: str, tmp_path: Path, object_store: ObjectStore
) -> None:
    files = {**BESIDE, name: RECORDS[name]}
    spec = str(tmp_path)
    if kind == "folder":
        _write(tmp_path, files)
    elif kind == "store":
        spec = "s3://bucket/in"
        for path, contents in files.items():
            object_store.put(f"in/{path}", contents)
    else:
        spec = str(tmp_path / "a.tar")
        (tmp_path / "a.tar").write_bytes(tar_of(files, "w:gz" if kind == "tar.gz" else "w"))
    source = open_source(spec)
    assert list(source.documents()) == ["one", "two"]
    assert {one.name.rpartition(":")[2] for one in source.passed_over} == set(BESIDE)
    lines = list(describe_passed_over(source.passed_over))
    assert any(line.startswith("Skipped ") and "README.md" in line for line in lines)


def test_text_is_read_without_tables_that_lack_its_column(tmp_path: Path) -> None:
    np.save(tmp_path / "weights.npy", np.zeros(3, np.float32))
    _write(tmp_path, {"1.txt": b"a book", "2.txt": b"another", "metadata.csv": b"id,title\n1,x\n"})
    source = open_source(str(tmp_path))
    assert list(source.documents()) == ["a book", "another"]
    assert {one.name for one in source.passed_over} == {"metadata.csv", "weights.npy"}
    with pytest.raises(DataError, match=r"metadata\.csv: no column 'text'"):
        _read(tmp_path / "metadata.csv")
    assert _read(tmp_path, glob="*.csv", text_field="title") == ["x"]


def test_what_save_to_disk_wrote(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(2500)]
    table = datasets.Dataset.from_dict({"id": range(2500), "text": texts})
    table.save_to_disk(str(tmp_path / "one" / "ds"), num_shards=3)
    datasets.DatasetDict({"train": table, "test": table.select(range(2))}).save_to_disk(str(tmp_path / "both"))
    (tmp_path / "one" / "ds" / "cache-1f.arrow").write_bytes(b"another table")
    assert _read(tmp_path / "one") == _read(tmp_path / "one" / "ds") == _read(tmp_path / "both") == texts
    assert _read(tmp_path / "both", hf_split="test") == texts[:2]
    with pytest.raises(DataError, match=r"no split 'val'\. Its splits: test, train; name one with --hf-split"):
        _read(tmp_path / "both", hf_split="val")


FOREIGN = {
    "a.html": (b"<p>", "trafilatura"),
    "a.txt": (b"<!DOCTYPE html>\n<html>", "trafilatura"),
    "CC-MAIN-1.warc.gz": (gzip.compress(b"WARC/1.0\r\n"), "trafilatura"),
    "part-0": (b"WARC/1.0\r\nWARC-Type: warcinfo\r\n", "trafilatura"),
    "dump.xml.bz2": (b"<mediawiki>", "wikiextractor"),
    "a.pdf": (b"%PDF-1.4", "pdftotext"),
    "b": (b"%PDF-1.4\n%\xe2\xe3", "pdftotext"),
    "a.docx": (b"PK\x03\x04", "pandoc"),
    "a.xlsx": (b"PK\x03\x04", "CSV"),
    "a.db": (b"SQLite format 3\0", "CSV or Parquet"),
    "a.pkl": (b"\x80\x04]", "never loaded"),
    "a.gguf": (b"GGUF\x03\0", "--init-from"),
    "b.txt": (b"<mediawiki xmlns='http://www.mediawiki.org/xml/export-0.11/'>", "wikiextractor"),
    "model": (b'\x10\0\0\0\0\0\0\0{"a": 1}', "--init-from"),
    "old.feather": (b"FEA1\0\0\0\0", "as Parquet"),
    "a.json": (b'["one", "two"]', "text: ."),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_formats_of_other_tools_are_refused_with_the_tool(name: str, tmp_path: Path) -> None:
    contents, tool = FOREIGN[name]
    (tmp_path / name).write_bytes(contents)
    for spec in (tmp_path / name, f"{tmp_path}/*"):
        with pytest.raises(DataError, match=tool) as caught:
            _read(spec)
        assert name in str(caught.value)


def test_all_files_that_cannot_be_read_are_listed_at_once(tmp_path: Path) -> None:
    bad = {"b.jsonl": POINTER, "c.txt": b"<html>", "d.txt": b"caf\xe9", "e.txt": b"w\xf6rd", "f.csv": b"id,body\n1,x\n"}
    _write(tmp_path, {"a.txt": b"good", **bad, "g.jsonl": LINES})
    with pytest.raises(DataError) as caught:
        _read(f"{tmp_path}/*")
    message = str(caught.value)
    assert message.startswith("5 files cannot be read: ") and "\n" not in message
    assert all(str(tmp_path / name) in message for name in bad)
    assert "git lfs pull" in message and "--skip-undecodable" in message and "trafilatura" in message
    for name in ("b.jsonl", "c.txt", "f.csv"):
        (tmp_path / name).unlink()
    source = open_source(f"{tmp_path}/*", skip_undecodable=True)
    assert list(source.documents()) == ["good", "one", "two"]
    assert source.skipped == 2
    assert {Path(one.name).name for one in source.passed_over} == {"d.txt", "e.txt"}


def test_files_that_cannot_be_read_are_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in the text they are; those from a store only as they are read."""
    _write(tmp_path / "in", {"a.txt": b"good " * 99, "z.txt": b"x" * (3 << 20) + b"\xe9"})
    monkeypatch.setattr(FileSource, "records", lambda *_: pytest.fail("reads already"))
    source = open_source(str(tmp_path / "in"), str(tmp_path / "in" / "a.txt"))
    with pytest.raises(DataError, match=r"z\.txt is not UTF-8 text.*--skip-undecodable"):
        prepare(source, tmp_path / "set", load_tokenizer("bytes"), PrepareOptions(seq_len=8))
    assert not (tmp_path / "set").exists()
    open_source(str(tmp_path / "in"), skip_undecodable=True).check()


UNDECODABLE = {
    "a.jsonl": b'{"text": "caf\xe9"}\n' + LINES,
    "a.csv": b"text\ncaf\xe9\none\ntwo\n",
    "a.tar": tar_of({"a.txt": b"caf\xe9", "b.txt": b"one", "c.txt": b"two"}),
}


@pytest.mark.parametrize("name", UNDECODABLE)
def test_text_that_is_not_utf8_is_skipped_everywhere(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(UNDECODABLE[name])
    with pytest.raises(DataError, match="not UTF-8"):
        _read(tmp_path / name)
    source = open_source(str(tmp_path / name), skip_undecodable=True)
    assert list(source.documents()) == ["one", "two"]
    assert source.skipped == len(source.passed_over) == 1


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.txt", "a.csv", "a.npy", "a.bin", "a.tar", "a.jsonl.gz"])
def test_a_git_lfs_pointer_is_named(name: str, tmp_path: Path, object_store: ObjectStore) -> None:
    (tmp_path / name).write_bytes(POINTER)
    object_store.put(f"in/{name}", POINTER)
    for spec in (str(tmp_path / name), f"s3://bucket/in/{name}"):
        with pytest.raises(DataError, match=rf"{name} is a Git LFS pointer, .*git lfs pull"):
            _read(spec)


def test_an_archive_within_an_archive_is_named(tmp_path: Path) -> None:
    inner = lzma.compress(tar_of({"a.txt": b"text"}))
    (tmp_path / "a.tar").write_bytes(tar_of({"openwebtext/subset_data.xz": inner}))
    with pytest.raises(DataError, match=r"has no text\. Skipped 1 file .archives within .*subset_data\.xz"):
        _read(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(tar_of({"subset_data.xz": inner, "b.txt": b"text"}))
    source = open_source(str(tmp_path / "a.tar"))
    assert list(source.documents()) == ["text"] and len(source.passed_over) == 1


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.npy", "a.csv", "a.jsonl.zst"])
@pytest.mark.parametrize(
    "contents",
    [LINES, b"id,text\n1,one\n2,two\n", parquet_of({"text": ["one", "two"]})],
    ids=["jsonl", "csv", "parquet"],
)
def test_records_are_read_whatever_the_name(name: str, contents: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(contents)
    assert _read(tmp_path / name) == _read(tmp_path) == ["one", "two"]


def test_a_table_without_texts_says_so(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"input_ids": [[1, 2]]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"columns: input_ids \(list<.*int64>\); none holds text\. .*numpy\.save"):
        _read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.npy", "a.bin", "a"])
def test_tokens_with_the_header_of_llm_c_are_read_whatever_the_name(name: str, tmp_path: Path) -> None:
    header = np.array([20240520, 1, 160] + [0] * 253, "<i4")
    tokens = np.array([*b"one", 256] * 40, "<u2")
    (tmp_path / name).write_bytes(header.tobytes() + tokens.tobytes())
    specs = [tmp_path / name, tmp_path] if name == "a.npy" else [tmp_path / name]
    for number, spec in enumerate(specs):
        out = tmp_path.parent / f"{tmp_path.name}-{number}"
        options = PrepareOptions(seq_len=8, val_fraction=0)
        prepared = prepare(open_source(str(spec)), out, load_tokenizer("bytes"), options)
        assert prepared.manifest.splits["train"].num_documents == 40


def test_token_shards_of_a_folder(tmp_path: Path) -> None:
    """llm.c's FineWeb as numpy saves it is read; .bin, which may be weights, must be named."""
    tokens = [*b"one", 256, *b"two", 256] * 20
    np.save(tmp_path / "val_000.npy", np.array(tokens, np.uint16))
    np.save(tmp_path / "train_001.npy", np.array(tokens, ">u4"))
    _write(tmp_path, {"README.md": b"card"})
    options = PrepareOptions(seq_len=8, val_fraction=0)
    prepared = prepare(open_source(str(tmp_path)), tmp_path.parent / "set", load_tokenizer("bytes"), options)
    assert prepared.manifest.splits["train"].num_documents == 80
    with pytest.raises(DataError, match="holds tokens, but text is needed"):
        _read(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    for name in ("train.bin", "val.bin"):
        np.array(tokens, np.uint16).tofile(tmp_path / name)
    with pytest.raises(DataError, match=r"read if --input or --glob names it\): train\.bin, val\.bin"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("a.npy", np.zeros((3, 4), np.int64), r"an array of int64 of shape \(3, 4\), not token ids"),
        ("a.npy", np.zeros(3, np.float32), "an array of float32"),
        ("a.npy", np.array([{"a": 1}], object), "an array of object"),
        ("a.bin", np.arange(100, dtype=np.int32), "integers of more than 16 bits, not nanoGPT's"),
    ],
)
def test_arrays_that_are_no_tokens(name: str, array: np.ndarray, words: str, tmp_path: Path) -> None:
    if name == "a.npy":
        np.save(tmp_path / name, array)
    else:
        array.tofile(tmp_path / name)
    options = PrepareOptions(seq_len=8)
    with pytest.raises(DataError, match=words):
        prepare(open_source(str(tmp_path / name)), tmp_path / "set", load_tokenizer("bytes"), options)
    if name == "a.npy":
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:40])
        with pytest.raises(DataError, match=r"is not a readable \.npy file"):
            prepare(open_source(str(tmp_path / name)), tmp_path / "set", load_tokenizer("bytes"), options)


def test_records_keep_their_json(tmp_path: Path) -> None:
    """A lone JSON object beside records is no record."""
    _write(tmp_path, {"a.json": LINES, "b.json": json.dumps({"name": "x"}).encode()})
    assert _read(tmp_path) == ["one", "two"]
