"""Parquet: a document a row of one column of strings, which may be coded by a dictionary."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, cast

from llmscale.data.prepare.sources import source
from llmscale.data.prepare.sources.source import (
    Document,
    Place,
    ReadOptions,
    Record,
    Rejected,
    TokenRules,
    missing_field,
)
from llmscale.data.shards.compressed import most_unpacked_bytes, unfolds
from llmscale.errors import DataError

if TYPE_CHECKING:
    import pyarrow
    from pyarrow import parquet

#: Of at most MAX_DOCUMENT_BYTES each: few, as a column of one repeated text takes next to nothing in the file.
_BATCH_ROWS = 64
_CHUNK_BYTES = 1 << 20


def read_parquet(
    file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Places are (row,), the next one's. A row without a text is an empty one. Raises DataError."""
    import pyarrow
    from pyarrow import parquet

    (row,) = start or (0,)
    file = file if file.seekable() else _unpacked(file, name)
    try:
        table = parquet.ParquetFile(file)
        column = _find_column(table, options.text_field, name)
        coded = parquet.ParquetFile(
            file, metadata=table.metadata, read_dictionary=[options.text_field], buffer_size=_CHUNK_BYTES
        )
        first = 0
        for group in range(table.num_row_groups):
            num_rows = table.metadata.row_group(group).num_rows
            if row < first + num_rows:
                batch_rows = _most_rows(coded, group, column, options.text_field, name)
                # Of a group that was begun, what is done is read again and passed over.
                for batch in table.iter_batches(batch_rows, row_groups=[group], columns=[options.text_field]):
                    if row < first + len(batch):
                        texts = batch.column(0).slice(row - first)
                        if pyarrow.types.is_dictionary(texts.type):
                            texts = texts.dictionary_decode()
                        yield from _read_batch(texts, name, row)
                        row = first + len(batch)
                    first += len(batch)
            else:
                first += num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name} is not a readable Parquet file: {str(error).rstrip('.')}.") from None


def _find_column(table: parquet.ParquetFile, field: str, name: str) -> int:
    """Return the number of the column of text among those stored. Raises DataError."""
    from pyarrow import types

    schema = table.schema_arrow
    if schema.names.count(field) != 1:
        if field in schema.names:
            raise DataError(f"{name} has {schema.names.count(field)} columns '{field}'. Rename all but one.")
        raise missing_field(name, field, schema.names, "column")
    kind = schema.field(field).type
    value = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(value) or types.is_large_string(value)):
        raise DataError(
            f"{name}: the column '{field}' holds {kind}, not strings. Legal: string, large_string, a dictionary of "
            "these. Convert it, or name another column with --text-field."
        )
    return next(k for k in range(len(table.schema)) if table.schema.column(k).path == field)


def _most_rows(coded: parquet.ParquetFile, group: int, column: int, field: str, name: str) -> int:
    """Return how many rows of a group may be in memory at once: a value of its dictionary may stand in each of them.

    Raises DataError for a column that unfolds.
    """
    from pyarrow import compute

    sizes = coded.metadata.row_group(group).column(column)
    if sizes.total_uncompressed_size > most_unpacked_bytes(sizes.total_compressed_size):
        raise unfolds(f"{name}, column '{field}',", sizes.total_compressed_size)
    longest = 0
    for batch in coded.iter_batches(1, row_groups=[group], columns=[field]):
        longest = compute.max(compute.binary_length(batch.column(0).dictionary)).as_py() or 0
        break
    return max(1, min(_BATCH_ROWS, source.MAX_DOCUMENT_BYTES // max(1, longest)))


def _read_batch(texts: pyarrow.Array, name: str, row: int) -> Iterator[Record]:
    """Rows row, row + 1, ... of a column."""
    import pyarrow
    from pyarrow import compute

    if texts.nbytes <= source.MAX_DOCUMENT_BYTES:
        try:
            for row, text in enumerate(texts.to_pylist(), start=row + 1):  # noqa: B020
                yield Document(text or "", (row,))
        except UnicodeDecodeError:
            pass  # nothing was given yet: to_pylist makes the whole list first
        else:
            return
    lengths = compute.binary_length(texts).to_pylist()
    for place, (value, length) in enumerate(zip(texts, lengths, strict=True), start=row + 1):
        where = f"{name}, row {place - 1}"
        if length is not None and length > source.MAX_DOCUMENT_BYTES:
            beginning = bytes(value.as_buffer())[:_CHUNK_BYTES]
            reason = f"longer than {source.MAX_DOCUMENT_BYTES >> 20} MiB, the longest document"
            yield Rejected(where, reason, beginning, (place,))
            continue
        try:
            yield Document(value.as_py() or "", (place,))
        except UnicodeDecodeError as error:
            contents = value.cast(pyarrow.large_binary()).as_py()
            yield Rejected(where, f"not UTF-8 ({error.reason} at byte {error.start})", contents, (place,))


def _unpacked(file: BinaryIO, name: str) -> BinaryIO:
    """Parquet is read from its end, so a compressed one is unpacked whole: into a file that has no name.

    Raises DataError.
    """
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115  # gone when the reader lets go of it
    while chunk := file.read(_CHUNK_BYTES):
        try:
            unpacked.write(chunk)
        except OSError as error:
            where = tempfile.gettempdir()
            raise DataError(
                f"{name} cannot be unpacked in {where}: {error.strerror}. Set TMPDIR to a larger disk."
            ) from None
    unpacked.seek(0)
    return cast(BinaryIO, unpacked)
