"""What a file holds is decided by its contents; what it unfolds to is bounded."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from llmscale.data.clean.decontaminate import read_evaluation_text
from llmscale.data.prepare.sources import open_source as opening
from llmscale.errors import DataError
from tests.data.prepare.conftest import tar_of

TEXTS = [f"document {number} é" for number in range(40)]
LINES = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS).encode()
MIB = 1 << 20


def _read(path: Path, text_field: str | None = None) -> list[str]:
    return list(opening.open_source(str(path), text_field=text_field).documents())


@pytest.mark.parametrize(
    "name", ["c4-train.00000-of-01024.json", "X.JSONL", "a.jl", "a.jsonl.1", "a.jsonl.2.gz", "a.txt", "part-00000"]
)
@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf\r\n \n"])
def test_json_lines_are_known_by_their_contents(name: str, begin: bytes, tmp_path: Path) -> None:
    contents = begin + LINES
    (tmp_path / name).write_bytes(gzip.compress(contents) if name.endswith("gz") else contents)
    assert _read(tmp_path / name) == TEXTS
    if name != "part-00000":
        assert _read(tmp_path) == TEXTS


def _two_frames(data: bytes) -> bytes:
    """As parallel compressors write."""
    return zstandard.compress(data[:7]) + zstandard.compress(data[7:])


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstandard.compress, _two_frames])
@pytest.mark.parametrize("name", ["a.txt", "a.JSONL", "a"])
def test_compression_is_known_by_its_contents(pack: Callable[[bytes], bytes], name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pack(LINES))
    assert _read(tmp_path / name) == TEXTS
    (tmp_path / name).write_bytes(pack(LINES)[:-9])
    with pytest.raises(DataError, match="damaged or cut short"):
        _read(tmp_path / name)


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", "text")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "contents", "text"),
    [
        ("a.txt", _zip(), "packed with zip"),
        ("a", b"7z\xbc\xaf\x27\x1c" + bytes(20), "packed with 7z"),
        ("a.jsonl.lz4", b"\x04\x22\x4d\x18" + bytes(20), "packed with lz4"),
        ("a.txt.br", b"\x1b\x0f", "packed with brotli"),
        ("a.jsonl.gz", b"\xff\xfe" + LINES, "its contents are not gzip"),
        ("a.gz", gzip.compress(bz2.compress(LINES)), "compressed twice, bzip2 within gzip"),
        ("a.json", json.dumps([{"text": "a"}, {"text": "b"}]).encode(), r"a JSON array.*jq -c"),
        ("a.jsonl", json.dumps([{"text": "a"}], indent=1).encode(), r"a JSON array.*jq -c"),
        ("a.json", json.dumps({"text": "a"}, indent=1).encode(), r"a JSON array or document.*jq -c"),
        ("a.json", b'{"body": "x"}\n' * 9, r"line 1: no field 'text'\. Its fields: body"),
        ("a.txt", b'{"body": "x"}\n' * 9, r"line 1: no field 'text'\. Its fields: body"),
        ("a.json", b'{"text": "cut\n' + LINES, "line 1: not valid JSON"),
        ("a.txt", "text".encode("utf-16"), "UTF-16"),
        ("a.jsonl", LINES.decode().encode("utf-16-le"), "UTF-16"),
    ],
)
def test_what_is_not_read_is_named(name: str, contents: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(DataError, match=text) as caught:
        _read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("package.json", '{\n "name": "x"\n}'),
        ("users.json", '[{"id": 1}, {"id": 2}]'),
        ("numbers.json", "[1, 2]"),
        ("a.jl", "[1 2; 3 4]\nf(x) = x\n"),
        ("a.py", "{}\n{}\n"),
        ("a.md", '{"key": 1} is JSON.'),
    ],
)
def test_sources_and_settings_stay_text(name: str, contents: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(contents)
    (tmp_path / "z.py").write_text("x = 1")
    assert _read(tmp_path) == [contents, "x = 1"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (r'{"text": "a", "text": "b"}', "b"),
        (r'{"text": "a\u0000b"}', "a\0b"),
        (r'{"text": " \n"}', " \n"),
        ('{"text": "a", "x": NaN}', "a"),
        ('{"text": "a", "x": ' + "9" * 5000 + "}", "a"),
        ('{"text": "a\\r\\nb"}\r', "a\r\nb"),
    ],
    ids=["duplicate", "nul", "whitespace", "nan", "huge", "crlf"],
)
def test_edges_of_records(line: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n", newline="")
    assert _read(tmp_path / "a.jsonl") == [text]


@pytest.mark.parametrize("column", [pa.array([b"a"]), pa.nulls(1), pa.array([["a"]]), pa.array([{"a": "b"}])])
def test_other_parquet_columns_are_named(column: pa.Array, tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"the column 'text' holds (binary|null|list|struct).* Legal: string"):
        _read(tmp_path / "a.parquet")


def _repeated(text: str, rows: int) -> pa.Table:
    return pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * rows), pa.array([text]))})


@pytest.mark.parametrize(
    "table",
    [
        _repeated("x" * (100 * MIB), 64),
        pa.table({"text": pa.nulls(1 << 21, "string")}),
    ],
    ids=["long", "nothing"],
)
def test_a_parquet_bomb_is_refused_in_little_memory(table: pa.Table, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, compression="zstd")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"unpacks to more than 256 times its size: it has .* the limit is 67,108,864"):
        for _ in opening.open_source(str(path)).documents():
            pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 800 * 1024  # KiB


def test_members_of_a_tar_by_their_contents(tmp_path: Path) -> None:
    members = {"a.json": LINES, "b.TXT": gzip.compress(LINES), "c.json": b'{"name": "x"}'}
    (tmp_path / "a.dat").write_bytes(tar_of(members, "w:xz"))
    with pytest.raises(DataError, match=r"c\.json, line 1: no field 'text'"):
        _read(tmp_path / "a.dat")
    (tmp_path / "a.dat").rename(tmp_path / "a.txz")
    source = opening.open_source(str(tmp_path / "a.txz"))
    assert list(source.documents()) == [*TEXTS, *TEXTS]
    assert [one.name for one in source.passed_over] == [f"{tmp_path}/a.txz:c.json"]


def test_a_text_field_that_nothing_has(tmp_path: Path) -> None:
    names = ("a.txt", "a.py", "a.bin")
    for name in names:
        (tmp_path / name).write_text("text")
    for spec in (*(str(tmp_path / name) for name in names), "python-stdlib"):
        with pytest.raises(DataError, match="--text-field 'body' selects a field of"):
            opening.open_source(spec, text_field="body")
    (tmp_path / "b.txt").write_text('{"body": "x"}\n' * 2)
    assert _read(tmp_path / "b.txt", text_field="body") == ["x", "x"]


@pytest.mark.parametrize("name", ["a.jl", "A.JSONL", "a.jsonl.1", "a.txt"])
def test_evaluation_text_in_json_lines(name: str, tmp_path: Path) -> None:
    """Escapes would hide words in the text of a line."""
    question = " ".join(f"wörd{number}" for number in range(13))
    (tmp_path / name).write_text((json.dumps({"question": question}) + "\n") * 3)
    assert len(read_evaluation_text([tmp_path / name]).labels) == 3
