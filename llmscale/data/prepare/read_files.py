"""The documents of one file: text (one), JSONL (one a line), Parquet (one a row), also compressed.

Files are read as a stream, and no document is larger than MAX_DOCUMENT_BYTES: what a file says about its sizes, or
unfolds to, does not decide how much memory is needed.
"""

from __future__ import annotations

import codecs
import io
import json
import re
import shutil
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, cast

from llmscale.data.shards.compressed import COMPRESSED_SUFFIXES, open_input
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
#: A longer text file is many documents, of _PIECE_CHARACTERS each.
MAX_TEXT_BYTES = 16 << 20
_PIECE_CHARACTERS = 1 << 20
#: A longer record of JSONL or Parquet, which cannot be read in parts, is refused.
MAX_DOCUMENT_BYTES = 64 << 20
#: Of at most MAX_DOCUMENT_BYTES each: few, as a column of one repeated text takes next to nothing in the file.
_PARQUET_BATCH_ROWS = 64
#: Names of fields that an error lists.
_MOST_FIELDS = 20
_CHUNK_BYTES = 1 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")


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
    encoding: before anything of the file is yielded, if it is no longer than MAX_TEXT_BYTES.
    """
    kind = kind_of(path)
    with open_input(path) as file:
        if kind == "jsonl":
            yield from _read_jsonl(file, path, text_field)
        elif kind == "parquet":
            yield from _read_parquet(file, path, text_field)
        else:
            yield from _read_text(file, path)


def _read_text(file: BinaryIO, path: Path) -> Iterator[str]:
    """One document; of more than MAX_TEXT_BYTES many, so that a share of them can be kept for validation."""
    head = file.read(_CHUNK_BYTES)
    encoding = "utf-8-sig"
    try:
        if path.suffix == ".py":
            encoding = tokenize.detect_encoding(io.BytesIO(head).readline)[0]
        b" ".decode(encoding)  # refuses codecs that are no text encodings, such as zlib
        decoder = codecs.getincrementaldecoder(encoding)()
        _refuse_zero_bytes(head, path)
        parts, size_bytes = [decoder.decode(head)], len(head)
        while chunk := file.read(_CHUNK_BYTES):
            _refuse_zero_bytes(chunk, path)
            parts.append(decoder.decode(chunk))
            size_bytes += len(chunk)
            if size_bytes > MAX_TEXT_BYTES:
                *done, rest = _cut("".join(parts))
                yield from map(_without_lone_surrogates, done)
                parts = [rest]
        parts.append(decoder.decode(b"", final=True))
    except (UnicodeError, SyntaxError, LookupError) as error:
        raise UndecodableError(f"{path} is not {encoding} text: {error}.") from None
    yield _without_lone_surrogates("".join(parts))


def _cut(text: str) -> Iterator[str]:
    """Pieces of at most _PIECE_CHARACTERS, each ended behind a line if one ends in its last half."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        border = text.rfind("\n", start + _PIECE_CHARACTERS // 2, start + _PIECE_CHARACTERS)
        end = border + 1 or start + _PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def _refuse_zero_bytes(chunk: bytes, path: Path) -> None:
    if b"\0" in chunk:
        raise UndecodableError(f"{path} holds zero bytes: it is binary, or in UTF-16, and no UTF-8 text.")


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of at most MAX_DOCUMENT_BYTES. Raises DataError for a longer one."""
    number = 0
    while line := file.readline(MAX_DOCUMENT_BYTES + 1):
        number += 1
        if len(line) > MAX_DOCUMENT_BYTES:
            raise _too_long(f"{path}, line {number}")
        yield number, line


def _too_long(where: str) -> DataError:
    return DataError(f"{where}: longer than {MAX_DOCUMENT_BYTES >> 20} MiB, the longest document. Split it.")


def _listed(names: Iterable[str]) -> str:
    """Names of fields for a message, the first few of many."""
    ordered = sorted(names)
    more = len(ordered) - _MOST_FIELDS
    return ", ".join(name[:80] for name in ordered[:_MOST_FIELDS]) + (f" and {more} more" if more > 0 else "")


def _read_jsonl(file: BinaryIO, path: Path, text_field: str) -> Iterator[str]:
    for number, line in _lines(file, path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not valid JSON ({error}).") from None
        except RecursionError:
            raise DataError(f"{path}, line {number}: nested too deeply.") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: expected a JSON object, found {type(record).__name__}.")
        if text_field not in record:
            raise DataError(
                f"{path}, line {number}: no field '{text_field}'. Its fields: {_listed(record)}; "
                "name one with --text-field."
            )
        text = record[text_field]
        if not isinstance(text, str):
            raise DataError(f"{path}, line {number}: the field '{text_field}' holds {type(text).__name__}, not text.")
        yield _without_lone_surrogates(text)


def _without_lone_surrogates(text: str) -> str:
    r"""JSON may hold half a surrogate pair (`\ud83d`), which UTF-8 cannot: U+FFFD takes its place."""
    if _SURROGATE.search(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_parquet(file: BinaryIO, path: Path, text_field: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import compute, parquet

    try:
        table = parquet.ParquetFile(_unpacked(file) if path.suffix in COMPRESSED_SUFFIXES else file)
        if text_field not in table.schema_arrow.names:
            fields = _listed(table.schema_arrow.names)
            raise DataError(f"{path}: no column '{text_field}'. Its columns: {fields}; name one with --text-field.")
        kind = table.schema_arrow.field(text_field).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"{path}: the column '{text_field}' holds {kind}, not strings.")
        for number, batch in enumerate(table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=[text_field])):
            if batch.nbytes > MAX_DOCUMENT_BYTES:
                longest_bytes = compute.max(compute.binary_length(batch.column(0))).as_py()
                if longest_bytes > MAX_DOCUMENT_BYTES:
                    raise _too_long(f"{path}, rows {number * _PARQUET_BATCH_ROWS} and following")
            if batch.nbytes > MAX_DOCUMENT_BYTES:
                yield from (text.as_py() or "" for text in batch.column(0))
            else:
                yield from (text or "" for text in batch.column(0).to_pylist())
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the column '{text_field}' holds a text that is not UTF-8 ({error}).") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}.") from None


def _unpacked(file: BinaryIO) -> BinaryIO:
    """Parquet is read from its end, so a compressed one is unpacked whole: into a file that has no name."""
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115  # gone when the reader lets go of it
    shutil.copyfileobj(file, unpacked, _CHUNK_BYTES)
    unpacked.seek(0)
    return cast(BinaryIO, unpacked)
