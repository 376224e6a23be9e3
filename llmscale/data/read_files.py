"""The documents of one file: text (one), JSONL (one a line), Parquet (one a row), also compressed."""

from __future__ import annotations

import io
import json
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from llmscale.data.compressed import COMPRESSED_SUFFIXES, open_input
from llmscale.errors import DataError

FileKind = Literal["text", "jsonl", "parquet"]

#: Suffixes that are taken for text, one document a file.
TEXT_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".org", ".tex", ".html", ".htm", ".xml", ".css", ".srt", ".csv", ".tsv", ".json"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".php"}
    | {".pl", ".lua", ".r", ".jl", ".scala", ".kt", ".swift", ".sh", ".sql"}
    | {".toml", ".yaml", ".yml", ".ini", ".cfg"}
)
_JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
_PARQUET_BATCH_ROWS = 1024


class UndecodableError(DataError):
    """A text file is not in the encoding that it should be in."""


def kind_of(path: Path) -> FileKind | None:
    """By suffix, behind a compression's suffix; None when unknown."""
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix
    if suffix in _JSONL_SUFFIXES:
        return "jsonl"
    if suffix == ".parquet":
        return "parquet"
    return "text" if suffix in TEXT_SUFFIXES else None


def read_documents(path: Path, text_field: str) -> Iterator[str]:
    """The documents of a file; one of an unknown suffix is text.

    Raises DataError naming file and line (JSONL) or row (Parquet), UndecodableError for text in another
    encoding.
    """
    kind = kind_of(path)
    with open_input(path) as file:
        if kind == "jsonl":
            yield from _read_jsonl(file, path, text_field)
        elif kind == "parquet":
            yield from _read_parquet(file, path, text_field)
        else:
            yield _decode(file.read(), path)


def _decode(contents: bytes, path: Path) -> str:
    """UTF-8 (a byte-order mark is dropped), or for Python what its coding line declares."""
    encoding = "utf-8-sig"
    try:
        if path.suffix == ".py":
            encoding = tokenize.detect_encoding(io.BytesIO(contents).readline)[0]
        return contents.decode(encoding)
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:
        raise UndecodableError(f"{path} is not {encoding} text: {error}.") from None


def _read_jsonl(file: BinaryIO, path: Path, text_field: str) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not valid JSON ({error}).") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: expected a JSON object, found {type(record).__name__}.")
        if text_field not in record:
            raise DataError(
                f"{path}, line {number}: no field '{text_field}'. Its fields: {', '.join(sorted(record))}; "
                "name one with --text-field."
            )
        text = record[text_field]
        if not isinstance(text, str):
            raise DataError(f"{path}, line {number}: the field '{text_field}' holds {type(text).__name__}, not text.")
        yield _without_lone_surrogates(text)


def _without_lone_surrogates(text: str) -> str:
    r"""JSON may hold half a surrogate pair (`\ud83d`), which UTF-8 cannot: U+FFFD takes its place."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_parquet(file: BinaryIO, path: Path, text_field: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        # Parquet is read from its end: a compressed one has to be unpacked whole.
        seekable = io.BytesIO(file.read()) if path.suffix in COMPRESSED_SUFFIXES else file
        table = parquet.ParquetFile(seekable)
        if text_field not in table.schema_arrow.names:
            fields = ", ".join(table.schema_arrow.names)
            raise DataError(f"{path}: no column '{text_field}'. Its columns: {fields}; name one with --text-field.")
        kind = table.schema_arrow.field(text_field).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"{path}: the column '{text_field}' holds {kind}, not strings.")
        for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=[text_field]):
            for text in batch.column(0).to_pylist():
                yield text or ""
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}.") from None
