"""A column of text in CSV, Arrow and Parquet, as pandas, `datasets` and pyarrow wrote it."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pandas
import pyarrow as pa
import pytest
import zstandard
from pyarrow import feather, ipc

from llmscale.data.prepare.sources import source
from llmscale.data.prepare.sources.open_source import open_source
from llmscale.data.prepare.sources.source import Document, Rejected
from llmscale.errors import DataError
from tests.data.prepare.conftest import parquet_of, tar_of

TEXTS = ["plain é", 'with "quotes", commas; and\ttabs', "two\nlines", "two\r\nmore", " spaces ", "NA", "x" * 200_000]
TEXTS += [f"document {number}" for number in range(150)]


def _csv(delimiter: str = ",", *, quoting: int = csv.QUOTE_MINIMAL, begin: str = "", end: str = "\r\n") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter, quoting=quoting, lineterminator=end)  # type: ignore[arg-type]
    writer.writerows([["id", "text"], *([number, text] for number, text in enumerate(TEXTS))])
    return (begin + file.getvalue()).encode()


TABLES = {
    "a.csv": _csv(),
    "quoted.csv": _csv(quoting=csv.QUOTE_ALL, end="\n"),
    "bom.CSV": _csv(begin="\ufeff"),
    "semicolons.csv": _csv(";"),
    "a.tsv": _csv("\t"),
    "a.csv.gz": gzip.compress(_csv()),
    "plain.csv.gz": _csv(),
    "a.tsv.zst": zstandard.compress(_csv("\t")),
    "a.tgz": tar_of({"README.md": b"a card", "data/a.csv": _csv()}, "w:gz"),
    "a.txt": _csv(),
    "part-0": _csv("\t"),
}


def _read(spec: Path | str, text_field: str | None = None) -> list[str]:
    return list(open_source(str(spec), text_field=text_field).documents())


@pytest.mark.parametrize("name", TABLES)
def test_csv_is_read_by_column_from_any_place(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(TABLES[name])
    opened = open_source(str(tmp_path / name))
    records = list(opened.records((), None))
    assert [record.content for record in records if isinstance(record, Document)] == TEXTS
    for number in (0, 3, 100):
        assert list(opened.records(records[number].place, None)) == records[number + 1 :]


def test_csv_is_what_pandas_reads(tmp_path: Path) -> None:
    contents = 'id,text\n1,"a ""b"" c"\n\n2,it\'s "so"\n3,\n4\n5,"x"y\n'
    (tmp_path / "a.csv").write_text(contents)
    frame = pandas.read_csv(tmp_path / "a.csv")
    assert _read(tmp_path / "a.csv") == frame["text"].fillna("").tolist()


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"id,body\n1,x\n", r"no column 'text'\. Its columns: body, id; name one with --text-field"),
        (b"text,text\n1,x\n", "2 columns 'text'"),
        (b'id,text\n1,"open\n2,x\n', "a quote is opened and never closed"),
        (b"id,text\n1,a,b\n", "row 0: 3 values for the header's 2 columns"),
        (b"id,text\n1,caf\xe9\n", "row 0: not UTF-8"),
        ("id,text\n1,a\n".encode("utf-16"), "UTF-16"),
    ],
)
def test_csv_that_cannot_be_read_is_named(contents: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(contents)
    with pytest.raises(DataError, match=words) as caught:
        _read(tmp_path / "a.csv")
    assert str(tmp_path / "a.csv") in str(caught.value)


@pytest.mark.parametrize("row", ['1,"' + "x\n" * 600, "1," + "x" * 1200, "1," * 600])
def test_a_row_of_csv_is_bounded(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_DOCUMENT_BYTES", 1000)
    (tmp_path / "a.csv").write_text("id,text\n" + row)
    with pytest.raises(DataError, match="longer than"):
        _read(tmp_path / "a.csv")


def _arrow_stream(table: pa.Table) -> bytes:
    file = io.BytesIO()
    with ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return file.getvalue()


def _arrow_file(table: pa.Table) -> bytes:
    file = io.BytesIO()
    feather.write_feather(table, file)
    return file.getvalue()


KINDS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("write", [_arrow_stream, _arrow_file, parquet_of])
def test_columns_of_text(write: Callable[[pa.Table], bytes], kind: pa.DataType, tmp_path: Path) -> None:
    texts = [*TEXTS, None]
    column = pa.array(texts).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(texts, kind)
    contents = write(pa.table({"text": column}))
    for name, packed in (("a", contents), ("a.gz", gzip.compress(contents)), ("plain.gz", contents)):
        (tmp_path / name).write_bytes(packed)
        opened = open_source(str(tmp_path / name))
        records = list(opened.records((), None))
        assert [record.content for record in records] == [*TEXTS, ""]  # type: ignore[union-attr]
        assert list(opened.records(records[80].place, None)) == records[81:]


@pytest.mark.parametrize("write", [_arrow_stream, _arrow_file, parquet_of])
def test_a_field_within_a_field(write: Callable[[pa.Table], bytes], tmp_path: Path) -> None:
    pages = [{"text": "a", "url": "x"}, None, {"text": None, "url": "y"}, {"text": "b", "url": "z"}]
    (tmp_path / "a.bin0").write_bytes(write(pa.table({"page": pages})))
    assert _read(tmp_path / "a.bin0", "page.text") == ["a", "", "", "b"]
    with pytest.raises(DataError, match=r"no column 'text'\. Its columns: page\.text, page\.url"):
        _read(tmp_path / "a.bin0")


def test_a_field_within_a_field_of_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"page": {"text": text, "n": {"m": text}}}) + "\n" for text in TEXTS))
    assert _read(path, "page.text") == _read(path, "page.n.m") == TEXTS
    with pytest.raises(DataError, match=r"no field 'text'\. Its fields: page\.n, page\.text"):
        _read(path)
    path.write_text(json.dumps({"page.text": "literal", "page": {"text": "nested"}}) + "\n")
    assert _read(path, "page.text") == ["literal"]
    path.write_text('{"page": {"text": "a"}}\n{"page": "b"}\n')
    first, second = open_source(str(path), text_field="page.text").records((), None)
    assert isinstance(first, Document) and isinstance(second, Rejected)


def test_damaged_arrow_is_one_line(tmp_path: Path) -> None:
    contents = _arrow_stream(pa.table({"text": TEXTS}))
    (tmp_path / "a.arrow").write_bytes(contents[: len(contents) // 2])
    with pytest.raises(DataError, match="is not a readable Arrow file"):
        _read(tmp_path / "a.arrow")
    (tmp_path / "a.arrow").write_bytes(_arrow_stream(pa.table({"text": [1]})))
    with pytest.raises(DataError, match="holds int64, not strings"):
        _read(tmp_path / "a.arrow")


def _read_all(path: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the texts of a file, the reasons of rejected records, and the notes."""
    opened = open_source(str(path))
    records = list(opened.records((), None))
    texts = [str(record.content) for record in records if isinstance(record, Document)]
    rejected = [record.reason for record in records if isinstance(record, Rejected)]
    return texts, rejected, list(source.describe_passed_over(opened.passed_over))


def test_null_is_an_empty_document_in_every_format(tmp_path: Path) -> None:
    lines = [{"text": "a"}, {"text": None}, {"text": "b"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pandas.DataFrame(lines).to_parquet(tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert _read_all(tmp_path / name) == (["a", "", "b"], [], [])


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_zero_bytes_that_a_crash_left_at_the_end_are_named(tmp_path: Path, name: str) -> None:
    contents = b'{"text": "a"}\n' if name == "a.jsonl" else b"text\na\n"
    (tmp_path / name).write_bytes(contents + b"\0" * 5000)
    texts, rejected, _ = _read_all(tmp_path / name)
    assert texts == ["a"]
    assert rejected == [source.ZERO_TAIL]


@pytest.mark.parametrize(
    ("contents", "words"), [(b"text\n" + b"\0" * 5000, "ends in zero bytes"), (b"text\0b", "is binary")]
)
def test_zero_bytes_in_text_are_named(tmp_path: Path, contents: bytes, words: str) -> None:
    (tmp_path / "a.txt").write_bytes(contents)
    with pytest.raises(DataError, match=words):
        _read_all(tmp_path / "a.txt")


def test_halves_of_surrogate_pairs_are_replaced_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a \\ud83d b"}\n{"text": "\\ud83d\\ude00"}\n')
    texts, rejected, notes = _read_all(tmp_path / "a.jsonl")
    assert texts == ["a \ufffd b", "\U0001f600"]
    assert not rejected
    assert len(notes) == 1 and notes[0].startswith("Read 1 file with halves of surrogate pairs")


def test_zstd_with_a_window_as_long_as_reddits_dumps(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=31, write_content_size=False)
    packed = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(packed.compress(b'{"text": "a"}\n') + packed.flush())
    assert _read_all(tmp_path / "a.jsonl.zst")[0] == ["a"]
