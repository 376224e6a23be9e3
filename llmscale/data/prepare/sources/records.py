"""Read the text of records: a field of JSON lines, a column of CSV, Parquet and Arrow."""

from __future__ import annotations

import csv
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from llmscale.data.prepare.conversations import without_nulls
from llmscale.data.prepare.sources import source
from llmscale.data.prepare.sources.source import (
    HALF_PAIRS,
    ZERO_TAIL,
    Document,
    FileError,
    ReadOptions,
    Record,
    Rejected,
    TokenRules,
    document_of,
    field_of,
    lacks_field,
    missing_field,
    pass_over,
    suffix_of,
)
from llmscale.data.shards.compressed import most_unpacked_bytes, unfolds
from llmscale.errors import DataError

if TYPE_CHECKING:
    import pyarrow

_CHUNK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")
_OBJECT_BEGINS = re.compile(r'\ufeff?\s*(\[\s*)?(?=\{\s*")')
_TEXTS_BEGIN = re.compile(r'\ufeff?\s*\[\s*"')
#: Parses integers as floats, which avoids Python's limit of 4,300 digits.
_DECODER = json.JSONDecoder(parse_int=float)
#: Rows in memory at once.
_BATCH_ROWS = 64


def is_jsonl(head: bytes, name: str, options: ReadOptions) -> bool:
    """Return whether a file of text that begins with `head` is JSON lines.

    A lone object or array without the field is text among plain text files, such as a settings file in a folder of
    code. Raises FileError for JSON records that are not one per line.
    """
    text = head.decode(errors="ignore")
    if not options.has_plain and suffix_of(PurePath(name)) == ".json" and _TEXTS_BEGIN.match(text):
        raise _not_lines(name, "array of texts", "`jq -c '.[] | {text: .}' FILE`")
    if (begin := _OBJECT_BEGINS.match(text)) is None:
        return False
    line_end = text.find("\n", begin.end()) % (len(text) + 1)
    try:
        record, end = _DECODER.raw_decode(text, begin.end())
        is_alone = begin[1] is not None or not text[end:].lstrip().startswith("{")
        if is_alone and options.has_plain:
            field_of(record, options.text_field)
    except KeyError:
        return False
    except (ValueError, RecursionError):  # damaged, or longer than the head
        last = options.text_field.rpartition(".")[2]
        if not re.search(rf"{re.escape(json.dumps(last))}\s*:", text):
            return False
        end = line_end + text[begin.end() : line_end].rstrip().endswith(("{", "[", ","))
    if begin[1] is not None or end > line_end:
        raise _not_lines(name, "array or document", "`jq -c '.[]' FILE` of an array, `jq -c . FILE` of objects")
    return True


def _not_lines(name: str, what: str, command: str) -> FileError:
    problem = f" is a JSON {what}, but records are read from JSON lines"
    return FileError(name, problem, f"Write one record per line: {command}.")


def read_jsonl(file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None) -> Iterator[Record]:
    """Read JSON lines. Raises DataError when the first record lacks the field."""
    number = 0
    is_first = True
    limit_bytes = source.MAX_DOCUMENT_BYTES
    parse_fast = _fast_parser()
    while line := file.readline(limit_bytes + 1):
        number += 1
        where = f"{name}, line {number}"
        if len(line) > limit_bytes:
            part = line
            while part and not part.endswith(b"\n"):
                part = file.readline(_CHUNK_BYTES)
            yield Rejected(where, source.describe_too_long(), line)
            continue
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.isspace() or not line:
            continue
        if not line.strip(b"\0\r\n"):
            yield Rejected(where, ZERO_TAIL, line[:_CHUNK_BYTES])
            continue
        record = _parse(line, parse_fast)
        if isinstance(record, dict):
            record = _without_half_pairs(record, line, name, options)
            document = document_of(record, options, where, line, is_first=is_first)
            is_first = is_first and isinstance(document, Rejected)
            yield document
        else:
            yield Rejected(where, record, line, is_undecodable=record.startswith("not UTF-8"))


def _fast_parser() -> Callable[[bytes], object]:
    """Return orjson's parser, or one that parses nothing where the extra `data` is not installed."""
    try:
        import orjson
    except ImportError:
        return lambda _: None
    return cast(Callable[[bytes], object], orjson.loads)


def _parse(line: bytes, parse_fast: Callable[[bytes], object]) -> dict[str, object] | str:
    """Return the JSON object in a line, or the reason why it is not one.

    `json` parses what orjson refuses (NaN, half a surrogate pair), and gives the reason of an error.
    """
    with suppress(ValueError):
        record = parse_fast(line)
        if isinstance(record, dict):
            return record
    try:
        record = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 ({error.reason} at byte {error.start})"
    except json.JSONDecodeError as error:
        return f"not valid JSON ({error.msg.removesuffix(' at')} at character {error.pos + 1})"
    except (ValueError, RecursionError) as error:
        return f"not valid JSON ({error})"
    if not isinstance(record, dict):
        return f"expected a JSON object, found {type(record).__name__}"
    return record


def _without_half_pairs(record: dict[str, object], line: bytes, name: str, options: ReadOptions) -> dict[str, object]:
    """Return the record of a line with U+FFFD for each half of a surrogate pair; its file is noted in `options`."""
    # Only an escape can hold one.
    if b"\\ud" not in line and b"\\uD" not in line:
        return record
    text = json.dumps(record, ensure_ascii=False)
    if not _SURROGATE.search(text):
        return record
    pass_over(options.passed_over, HALF_PAIRS, PurePath(name))
    return cast("dict[str, object]", json.loads(without_lone_surrogates(text)))


def without_lone_surrogates(text: str) -> str:
    r"""Replace half a surrogate pair (`\\ud83d`), which JSON can hold and UTF-8 cannot, by U+FFFD."""
    if _SURROGATE.search(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


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
        line = self._next or self._text.readline(source.MAX_DOCUMENT_BYTES + 1)
        self._next = ""
        self.row_size += len(line)
        if self.row_size > source.MAX_DOCUMENT_BYTES:
            raise csv.Error(source.describe_too_long())
        if not line:
            self.are_over = True
            raise StopIteration
        return line


def read_csv(file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None) -> Iterator[Record]:
    """Read a column of a CSV or TSV file with a header, quoted as for `csv` and pandas.

    A row that ends early has an empty text. Raises DataError: no such column, an open quote, a row that is too long.
    """
    if options.is_chat:
        raise DataError(f"{name}: --chat reads conversations from JSON lines and Parquet, not from CSV.")
    lines = _Lines(io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=""))
    # The limit of one value holds for the process; its default is 128 KiB.
    csv.field_size_limit(source.MAX_DOCUMENT_BYTES)
    field = options.text_field
    number = 0
    try:
        rows = csv.reader(lines, delimiter=_delimiter_of(lines.first, field))
        if (header := next(rows, None)) is None:
            return
        _check_once(field, header, name)
        if field not in header:
            raise missing_field(name, field, header, "column")
        column = header.index(field)
        lines.row_size = 0
        for row in rows:
            if lines.are_over:
                raise csv.Error("a quote is opened and never closed")
            lines.row_size = 0
            if row:  # an empty line is no row
                number += 1
                yield _read_row(row, column, len(header), f"{name}, row {number - 1}")
    except csv.Error as error:
        raise DataError(f"{name}, row {number}: {error}. Correct it, or write the text as JSON lines.") from None


def _check_once(column: str, names: Sequence[str], where: str) -> None:
    if names.count(column) > 1:
        raise DataError(f"{where} has {names.count(column)} columns '{column}'. Rename all but one.")


def _read_row(row: list[str], column: int, num_columns: int, where: str) -> Record:
    text = row[column] if column < len(row) else ""
    if text and not text.strip("\0"):
        return Rejected(where, ZERO_TAIL, text[:_CHUNK_BYTES].encode())
    if len(row) > num_columns:
        reason = f"{len(row)} values for the header's {num_columns} columns"
        return Rejected(where, reason, text.encode(errors="surrogateescape"))
    if not text.isascii() and _SURROGATE.search(text):  # bytes that are not UTF-8, as the decoder keeps them
        return Rejected(where, "not UTF-8", text.encode(errors="surrogateescape"), is_undecodable=True)
    return Document(text)


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
    if fitting:
        return fitting[0]
    return max(",\t;|", key=header.count)


def _split_header(header: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([header.rstrip("\r\n")], delimiter=delimiter), [])
    except csv.Error:  # a value beyond the limit, or a line break alone
        return []


def read_parquet(file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None) -> Iterator[Record]:
    """Read a column of a Parquet file. A null is an empty text. Raises DataError."""
    yield from _read_table(_parquet_batches, "Parquet", file, name, options)


def read_arrow(file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None) -> Iterator[Record]:
    """Read a column of an Arrow file or stream, as `datasets` saves them. Raises DataError."""
    yield from _read_table(_arrow_batches, "Arrow", file, name, options)


#: Consecutive values of a column, or with `is_chat` consecutive rows: (file, its name, options).
_Batches = Callable[[BinaryIO, str, ReadOptions], Iterator[Any]]


def _read_table(batches: _Batches, kind: str, file: BinaryIO, name: str, options: ReadOptions) -> Iterator[Record]:
    import pyarrow

    row = 0
    try:
        for values in batches(file, name, options):
            for begin in range(0, len(values), _BATCH_ROWS):
                part = values.slice(begin, _BATCH_ROWS)
                if options.is_chat:
                    yield from _read_conversations(part, name, row + begin, options)
                else:
                    yield from _read_texts(part, name, row + begin)
            row += len(values)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name} is not a readable {kind} file: {str(error).rstrip('.')}.") from None


def _read_conversations(rows: pyarrow.RecordBatch, name: str, number: int, options: ReadOptions) -> Iterator[Record]:
    for place, row in enumerate(rows.to_pylist(), start=number):
        record = cast("dict[str, object]", without_nulls(row))
        yield document_of(record, options, f"{name}, row {place}", str(record).encode(), is_first=place == 0)


def _parquet_batches(file: BinaryIO, name: str, options: ReadOptions) -> Iterator[Any]:
    from pyarrow import parquet

    table = parquet.ParquetFile(_seekable(file, name))
    if options.is_chat:
        column = None
    else:
        column = _find_column(table.schema_arrow, options.text_field, name)
    path = ".".join(column or ())
    leaves = [k for k in range(len(table.schema)) if column is None or table.schema.column(k).path == path]
    for number in range(table.num_row_groups):
        for leaf in leaves if column is None else leaves[:1]:
            sizes = table.metadata.row_group(number).column(leaf)
            if sizes.total_uncompressed_size > most_unpacked_bytes(sizes.total_compressed_size):
                raise unfolds(f"{name}, column '{sizes.path_in_schema}',", sizes.total_compressed_size)
        for batch in table.iter_batches(_BATCH_ROWS, row_groups=[number], columns=column and [path]):
            yield batch if column is None else _column_of(batch, column)


def _arrow_batches(file: BinaryIO, name: str, options: ReadOptions) -> Iterator[Any]:
    from pyarrow import ipc

    if cast(io.BufferedReader, file).peek(1).startswith(b"ARROW1"):
        table = ipc.open_file(_seekable(file, name))
        batches = (table.get_batch(number) for number in range(table.num_record_batches))
    else:
        table = ipc.open_stream(file)
        batches = iter(table)
    if options.is_chat:
        column = None
    else:
        column = _find_column(table.schema, options.text_field, name)
    for batch in batches:
        yield batch if column is None else _column_of(batch, column)


def _find_column(schema: pyarrow.Schema, field: str, name: str) -> Sequence[str]:
    """Return the path of the text column: its name, and names within it. Raises DataError."""
    from pyarrow import types

    path = (field,) if field in schema.names else tuple(field.split("."))
    fields: Any = schema
    kind: Any = None
    for part in path:
        names = [inner.name for inner in fields]
        _check_once(part, names, name)
        if part not in names:
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
        if is_struct:
            inner = {f"{column.name}.{one.name}": one.type for one in column.type}
        else:
            inner = {}
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
    if column[1:]:
        return compute.struct_field(outer, list(column[1:]))
    return outer


def _read_texts(texts: pyarrow.Array, name: str, row: int) -> Iterator[Record]:
    """Yield rows row, row + 1, ... of a column."""
    import pyarrow

    if pyarrow.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    if str(texts.type) == "string_view":
        texts = texts.cast(pyarrow.large_string())
    for number, value in enumerate(texts.cast(pyarrow.large_binary()), start=row):
        contents: bytes = value.as_py() or b""  # one at a time: a batch of books is large
        if len(contents) > source.MAX_DOCUMENT_BYTES:
            yield Rejected(f"{name}, row {number}", source.describe_too_long(), contents[:_CHUNK_BYTES])
            continue
        try:
            yield Document(contents.decode())
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 ({error.reason} at byte {error.start})"
            yield Rejected(f"{name}, row {number}", reason, contents, is_undecodable=True)


def _seekable(file: BinaryIO, name: str) -> BinaryIO:
    """Return the file, or a compressed one unpacked into an unnamed temporary file, because Parquet is read from its
    end. Raises DataError."""
    if file.seekable():
        return file
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
