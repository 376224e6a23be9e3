"""Parquet: a document a row of one column of strings."""

from __future__ import annotations

import shutil
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
from llmscale.errors import DataError

if TYPE_CHECKING:
    import pyarrow

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
    try:
        table = parquet.ParquetFile(file if file.seekable() else _unpacked(file))
        schema = table.schema_arrow
        if options.text_field not in schema.names:
            raise missing_field(name, options.text_field, schema.names, "column")
        kind = schema.field(options.text_field).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"{name}: the column '{options.text_field}' holds {kind}, not strings.")
        first = 0
        for group in range(table.num_row_groups):
            num_rows = table.metadata.row_group(group).num_rows
            if row < first + num_rows:
                # Of a group that was begun, what is done is read again and passed over.
                for batch in table.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[options.text_field]):
                    if row < first + len(batch):
                        yield from _read_batch(batch.column(0).slice(row - first), name, row)
                        row = first + len(batch)
                    first += len(batch)
            else:
                first += num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name} is not a readable Parquet file: {error}.") from None


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


def _unpacked(file: BinaryIO) -> BinaryIO:
    """Parquet is read from its end, so a compressed one is unpacked whole: into a file that has no name."""
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115  # gone when the reader lets go of it
    shutil.copyfileobj(file, unpacked, _CHUNK_BYTES)
    unpacked.seek(0)
    return cast(BinaryIO, unpacked)
