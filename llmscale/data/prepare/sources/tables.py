"""Read a column of text from Parquet, Arrow and CSV files."""

from __future__ import annotations

import csv
import io
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from llmscale.data.prepare.sources import source
from llmscale.data.prepare.sources.source import (
    Document,
    FileError,
    Place,
    ReadOptions,
    Record,
    Rejected,
    TokenRules,
    lacks_field,
    missing_field,
)
from llmscale.data.shards.compressed import most_unpacked_bytes, unfolds
from llmscale.errors import DataError

if TYPE_CHECKING:
    import pyarrow

_CHUNK_BYTES = 1 << 20
#: Rows in memory at once.
_BATCH_ROWS = 64


def read_parquet(
    file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Read a column of a Parquet file. Places are (next row,). A null is an empty text. Raises DataError."""
    import pyarrow
    from pyarrow import parquet

    (row,) = start or (0,)
    file = file if file.seekable() else _unpacked(file, name)
    try:
        table = parquet.ParquetFile(file)
        column = _find_column(table.schema_arrow, options.text_field, name)
        path = ".".join(column)
        index = next(k for k in range(len(table.schema)) if table.schema.column(k).path == path)
        first = 0
        for group in range(table.num_row_groups):
            num_rows = table.metadata.row_group(group).num_rows
            if row < first + num_rows:
                sizes = table.metadata.row_group(group).column(index)
                if sizes.total_uncompressed_size > most_unpacked_bytes(sizes.total_compressed_size):
                    raise unfolds(f"{name}, column '{path}',", sizes.total_compressed_size)
                # A resumed row group is read again from its start; finished rows are skipped.
                for batch in table.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[path]):
                    if row < first + len(batch):
                        texts = _as_strings(_column_of(batch, column))
                        yield from _read_texts(texts.slice(row - first), name, row)
                        row = first + len(batch)
                    first += len(batch)
            else:
                first += num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name} is not a readable Parquet file: {str(error).rstrip('.')}.") from None


def read_arrow(
    file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Read a column of an Arrow file or stream, as `datasets` saves them. Places are (next row,). Raises DataError."""
    import pyarrow
    from pyarrow import ipc

    (row,) = start or (0,)
    first = 0
    try:
        if cast(io.BufferedReader, file).peek(1).startswith(b"ARROW1"):
            table = ipc.open_file(file if file.seekable() else _unpacked(file, name))
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
        else:
            table = ipc.open_stream(file)
            batches = iter(table)
        column = _find_column(table.schema, options.text_field, name)
        for batch in batches:
            values = _column_of(batch, column)
            for begin in range(max(0, row - first), len(batch), _BATCH_ROWS):
                part = values.slice(begin, _BATCH_ROWS)
                yield from _read_texts(_as_strings(part), name, first + begin)
            first += len(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name} is not a readable Arrow file: {str(error).rstrip('.')}.") from None


def _find_column(schema: pyarrow.Schema, field: str, name: str) -> Sequence[str]:
    """Return the path of the text column: its name, and names within it. Raises DataError."""
    from pyarrow import types

    path = (field,) if field in schema.names else tuple(field.split("."))
    fields: Any = schema
    kind: Any = None
    for part in path:
        names = [inner.name for inner in fields]
        if names.count(part) != 1:
            if part in names:
                raise DataError(f"{name} has {names.count(part)} columns '{part}'. Rename all but one.")
            raise _missing_column(schema, field, name)
        kind = fields.field(part).type
        fields = kind if types.is_struct(kind) else ()
    if not _is_text(kind):
        raise FileError(
            name,
            f": the column '{field}' holds {kind}, not strings",
            "Legal: string, large_string, string_view, a dictionary of these. Convert it, or name another column with "
            "--text-field.",
        )
    return path


def _is_text(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    value = kind.value_type if types.is_dictionary(kind) else kind
    # pyarrow below 16 has no views, and cannot ask for them.
    return types.is_string(value) or types.is_large_string(value) or str(value) == "string_view"


def _missing_column(schema: pyarrow.Schema, field: str, name: str) -> FileError:
    """Return the error for a table that lacks the text column, with the columns it has and those within them."""
    from pyarrow import types

    columns: dict[str, pyarrow.DataType] = {}
    for column in schema:
        is_struct = types.is_struct(column.type) and column.type.num_fields
        inner = {f"{column.name}.{one.name}": one.type for one in column.type} if is_struct else {}
        columns |= inner or {column.name: column.type}
    if any(map(_is_text, columns.values())):
        return missing_field(name, field, list(columns), "column")
    what = lacks_field(field, [f"{column} ({kind})" for column, kind in columns.items()], "column")
    return FileError(
        name, f": {what}; none holds text", "Leave the file out, or save token ids with numpy.save as one row."
    )


def _column_of(batch: pyarrow.RecordBatch, column: Sequence[str]) -> pyarrow.Array:
    from pyarrow import compute

    outer = batch.column(column[0])
    return compute.struct_field(outer, list(column[1:])) if column[1:] else outer


def _as_strings(texts: pyarrow.Array) -> pyarrow.Array:
    """Return texts as string or large_string."""
    import pyarrow

    if pyarrow.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    return texts.cast(pyarrow.large_string()) if str(texts.type) == "string_view" else texts


def _read_texts(texts: pyarrow.Array, name: str, row: int) -> Iterator[Record]:
    """Yield rows row, row + 1, ... of a column."""
    import pyarrow
    from pyarrow import compute

    if texts.nbytes <= source.MAX_DOCUMENT_BYTES:
        try:
            for row, text in enumerate(texts.to_pylist(), start=row + 1):  # noqa: B020
                yield Document(text or "", (row,))
        except UnicodeDecodeError:
            pass  # nothing was yielded yet: to_pylist builds the full list first
        else:
            return
    lengths = compute.binary_length(texts).to_pylist()
    for place, (value, length) in enumerate(zip(texts, lengths, strict=True), start=row + 1):
        where = f"{name}, row {place - 1}"
        if length is not None and length > source.MAX_DOCUMENT_BYTES:
            beginning = bytes(value.as_buffer())[:_CHUNK_BYTES]
            yield Rejected(where, source.describe_too_long(), beginning, (place,))
            continue
        try:
            yield Document(value.as_py() or "", (place,))
        except UnicodeDecodeError as error:
            contents = value.cast(pyarrow.large_binary()).as_py()
            reason = f"not UTF-8 ({error.reason} at byte {error.start})"
            yield Rejected(where, reason, contents, (place,), is_undecodable=True)


def _unpacked(file: BinaryIO, name: str) -> BinaryIO:
    """Unpack a compressed file into an unnamed temporary file, because Parquet is read from its end.

    Raises DataError.
    """
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115  # removed when it is closed
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


#: Bytes that are not UTF-8, as the decoder keeps them.
_UNDECODED = re.compile("[\udc80-\udcff]")


class _Lines:
    """Lines of a text for `csv.reader`."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text
        self.are_over = False
        """True once the reader asked for a line after the last."""
        self.row_size = 0
        """Characters read since this was last set to 0."""
        self.first = text.readline(source.MAX_DOCUMENT_BYTES + 1)
        self._next = self.first

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Return the next line. Raises csv.Error when a row is too long."""
        line, self._next = self._next or self._text.readline(source.MAX_DOCUMENT_BYTES + 1), ""
        self.row_size += len(line)
        if self.row_size > source.MAX_DOCUMENT_BYTES:
            raise csv.Error(source.describe_too_long())
        if not line:
            self.are_over = True
            raise StopIteration
        return line


def read_csv(
    file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Read a column of a CSV or TSV file with a header, quoted as for `csv` and pandas. Places are (next row,).

    A row that ends early has an empty text. Raises DataError: no such column, an open quote, a row that is too long.
    """
    (done,) = start or (0,)
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    lines = _Lines(text)
    # The limit of one value holds for the process; its default is 128 KiB.
    csv.field_size_limit(source.MAX_DOCUMENT_BYTES)
    number = 0
    try:
        rows = csv.reader(lines, delimiter=_delimiter_of(lines.first, options.text_field))
        if (header := next(rows, None)) is None:
            return
        field = options.text_field
        if header.count(field) > 1:
            raise DataError(f"{name} has {header.count(field)} columns '{field}'. Rename all but one.")
        if field not in header:
            raise missing_field(name, field, header, "column")
        column = header.index(field)
        lines.row_size = 0
        for row in rows:
            if lines.are_over:
                raise csv.Error("a quote is opened and never closed")
            lines.row_size = 0
            number += bool(row)  # an empty line is no row
            if row and number > done:
                yield _read_row(row, column, len(header), f"{name}, row {number - 1}", number)
    except csv.Error as error:
        raise DataError(f"{name}, row {number}: {error}. Correct it, or write the text as JSON lines.") from None
    finally:
        with suppress(ValueError):  # closed before, where reading was given up
            text.detach()


def _read_row(row: list[str], column: int, num_columns: int, where: str, place: int) -> Record:
    text = row[column] if column < len(row) else ""
    if len(row) > num_columns:
        reason = f"{len(row)} values for the header's {num_columns} columns"
        return Rejected(where, reason, text.encode(errors="surrogateescape"), (place,))
    if not text.isascii() and _UNDECODED.search(text):
        return Rejected(where, "not UTF-8", text.encode(errors="surrogateescape"), (place,), is_undecodable=True)
    return Document(text, (place,))


def has_csv_column(head: bytes, _name: str, options: ReadOptions) -> bool:
    """Return whether the first line of a CSV file names the text column."""
    return options.text_field in _header_of(head, options)


def is_csv(head: bytes, options: ReadOptions) -> bool:
    """Return whether a file of any name begins with a header of several columns, one of which is the text."""
    header = _header_of(head, options)
    return len(header) > 1 and options.text_field in header


def _header_of(head: bytes, options: ReadOptions) -> list[str]:
    line = head.decode("utf-8-sig", errors="ignore").partition("\n")[0]
    return _split_header(line, _delimiter_of(line, options.text_field))


def _delimiter_of(header: str, field: str) -> str:
    """Return the delimiter for which a header names the field; else the one that it has most of."""
    fitting = [one for one in ",\t;|" if field in _split_header(header, one)]
    return fitting[0] if fitting else max(",\t;|", key=header.count)


def _split_header(header: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([header.rstrip("\r\n")], delimiter=delimiter), [])
    except csv.Error:  # a value beyond the limit, or a line break alone
        return []
