"""Read text files, JSON lines, Parquet and tar archives. A new format is a reader here and a line in `FORMATS`."""

from __future__ import annotations

import codecs
import io
import json
import re
import tarfile
import tempfile
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath
from typing import IO, TYPE_CHECKING, BinaryIO, NoReturn, cast

from llmscale.data.prepare.sources import source
from llmscale.data.prepare.sources.source import (
    Document,
    Place,
    ReadOptions,
    Record,
    Rejected,
    TokenRules,
    UndecodableError,
    lacks_field,
    missing_field,
)
from llmscale.data.prepare.sources.tokens import read_tokens
from llmscale.data.shards.compressed import COMPRESSED_SUFFIXES, head_of, most_unpacked_bytes, unfolds, unpacked
from llmscale.errors import DataError

_CHUNK_BYTES = 1 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")
_BOM = b"\xef\xbb\xbf"
_OBJECT_BEGINS = re.compile(r'\ufeff?\s*(\[\s*)?(?=\{\s*")')
#: Parses integers as floats, which avoids Python's limit of 4,300 digits.
_DECODER = json.JSONDecoder(parse_int=float)


def is_jsonl(head: bytes, name: str, options: ReadOptions) -> bool:
    """Return whether a file of text that begins with `head` is JSON lines.

    A lone object or array without the field is text among plain text files, such as a settings file in a folder of
    code. Raises DataError for JSON records that are not one per line.
    """
    text = head.decode(errors="ignore")
    if (begin := _OBJECT_BEGINS.match(text)) is None:
        return False
    line_end = text.find("\n", begin.end()) % (len(text) + 1)
    try:
        record, end = _DECODER.raw_decode(text, begin.end())
        is_alone = begin[1] is not None or not text[end:].lstrip().startswith("{")
        if is_alone and options.has_plain and options.text_field not in record:
            return False
    except (ValueError, RecursionError):  # damaged, or longer than the head
        if not re.search(rf"{re.escape(json.dumps(options.text_field))}\s*:", text):
            return False
        end = line_end + text[begin.end() : line_end].rstrip().endswith(("{", "[", ","))
    if begin[1] is not None or end > line_end:
        raise DataError(
            f"{name} is a JSON array or document, but records are read from JSON lines. Write one record per line: `jq "
            "-c '.[]' FILE` of an array, `jq -c . FILE` of objects."
        )
    return True


def read_jsonl(
    file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Read JSON lines. Places are (byte, line) of the next line, from 0. Raises DataError when the first record lacks
    the field."""
    offset, number = start or (0, 0)
    skip_bytes(file, offset)
    is_first = not offset
    limit_bytes = source.MAX_DOCUMENT_BYTES
    field, fast = options.text_field, _fast_parser()
    while line := file.readline(limit_bytes + 1):
        size_bytes = len(line)
        offset, number = offset + size_bytes, number + 1
        line = line.removeprefix(_BOM) if number == 1 else line
        reason = ""
        if size_bytes > limit_bytes:
            reason = f"longer than {limit_bytes >> 20} MiB, the longest document"
            offset += _skip_line(file) if not line.endswith(b"\n") else 0
        elif line.isspace() or not line:
            continue
        if not reason:
            record = _parse(line, fast)
            if isinstance(record, dict):
                text = record.get(field)
                if isinstance(text, str):
                    is_first = False
                    yield Document(text, (offset, number))
                    continue
                if field in record:
                    reason = f"the field '{field}' holds {type(text).__name__}, not text"
                elif is_first:
                    raise missing_field(f"{name}, line {number}", field, list(record))
                else:
                    reason = lacks_field(field, list(record))
            else:
                reason = record
        yield Rejected(f"{name}, line {number}", reason, line, (offset, number))


def _fast_parser() -> Callable[[bytes], object]:
    """Return orjson's parser if installed. `json` parses what it accepts to the same value. `json` handles what it
    refuses (NaN, half a surrogate pair, deep nesting) and gives the reason of an error."""
    try:
        import orjson
    except ImportError:
        return lambda _: None
    return cast(Callable[[bytes], object], orjson.loads)


def _parse(line: bytes, fast: Callable[[bytes], object]) -> dict[str, object] | str:
    """Return the JSON object in a line, or the reason why it is not one."""
    with suppress(ValueError):
        record = fast(line)
        if isinstance(record, dict):
            return record
    try:
        record = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 ({error.reason} at byte {error.start})"
    except json.JSONDecodeError as error:
        return f"not valid JSON ({error.msg} at character {error.pos + 1})"
    except ValueError as error:
        return f"not valid JSON ({error})"
    except RecursionError:
        return "nested too deeply"
    if not isinstance(record, dict):
        return f"expected a JSON object, found {type(record).__name__}"
    # Only an escape can hold half a surrogate pair.
    if b"\\ud" in line or b"\\uD" in line:
        record = {key: without_lone_surrogates(v) if isinstance(v, str) else v for key, v in record.items()}
    return record


def skip_bytes(file: BinaryIO, count: int) -> None:
    """Move to byte `count` of a newly opened file."""
    if file.seekable():
        file.seek(count)
        return
    while count > 0 and (chunk := file.read(min(count, _CHUNK_BYTES))):
        count -= len(chunk)


def _skip_line(file: BinaryIO) -> int:
    """Skip the rest of a line and return its number of bytes."""
    count = 0
    while chunk := file.readline(_CHUNK_BYTES):
        count += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return count


def without_lone_surrogates(text: str) -> str:
    r"""Replace half a surrogate pair (`\\ud83d`), which JSON can hold and UTF-8 cannot, by U+FFFD."""
    if _SURROGATE.search(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


#: A longer text file becomes several documents of at most _PIECE_CHARACTERS.
MAX_TEXT_BYTES = 16 << 20
_PIECE_CHARACTERS = 1 << 20


def read_text(
    file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Read a text file as one document, or as several beyond MAX_TEXT_BYTES, so that a share can be validation.

    Places are (number of documents given,). Raises UndecodableError for another encoding, before the first document
    unless the file is longer than MAX_TEXT_BYTES.
    """
    (done,) = start or (0,)
    for number, text in enumerate(_read_texts(file, name), start=1):
        if number > done:
            yield Document(text, (number,))


def _read_texts(file: BinaryIO, name: str) -> Iterator[str]:
    head = file.read(_CHUNK_BYTES)
    encoding = "utf-8-sig"
    try:
        if name.lower().endswith(".py"):
            encoding = tokenize.detect_encoding(io.BytesIO(head).readline)[0]
        b" ".decode(encoding)  # refuses codecs that are not text encodings, such as zlib
        decoder = codecs.getincrementaldecoder(encoding)()
        _refuse_zero_bytes(head, name)
        parts, size_bytes = [decoder.decode(head)], len(head)
        while chunk := file.read(_CHUNK_BYTES):
            _refuse_zero_bytes(chunk, name)
            parts.append(decoder.decode(chunk))
            size_bytes += len(chunk)
            if size_bytes > MAX_TEXT_BYTES:
                *done, rest = _cut("".join(parts))
                yield from map(without_lone_surrogates, done)
                parts = [rest]
        parts.append(decoder.decode(b"", final=True))
    except (UnicodeError, SyntaxError, LookupError) as error:
        shown = "UTF-8" if encoding in ("utf-8-sig", "utf-8") else encoding
        raise UndecodableError(f"{name} is not {shown} text: {error}.") from None
    yield without_lone_surrogates("".join(parts))


def _cut(text: str) -> Iterator[str]:
    """Yield pieces of at most _PIECE_CHARACTERS, each ending after a line if one ends in its second half."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        border = text.rfind("\n", start + _PIECE_CHARACTERS // 2, start + _PIECE_CHARACTERS)
        end = border + 1 or start + _PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def _refuse_zero_bytes(chunk: bytes, name: str) -> None:
    if b"\0" in chunk:
        raise UndecodableError(f"{name} holds zero bytes: it is binary or UTF-16, not UTF-8 text.")


if TYPE_CHECKING:
    import pyarrow
    from pyarrow import parquet

#: Rows in memory at once, each at most MAX_DOCUMENT_BYTES: a column that repeats one text is tiny in the file.
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
        column = _find_column(table, options.text_field, name)
        coded = parquet.ParquetFile(
            file, metadata=table.metadata, read_dictionary=[options.text_field], buffer_size=_CHUNK_BYTES
        )
        first = 0
        for group in range(table.num_row_groups):
            num_rows = table.metadata.row_group(group).num_rows
            if row < first + num_rows:
                batch_rows = _most_rows(coded, group, column, options.text_field, name)
                # A resumed row group is read again from its start; finished rows are skipped.
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
    """Return the index of the text column among the stored ones. Raises DataError."""
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
    """Return how many rows of a group may be in memory at once, as each may be the dictionary's longest value.

    Raises DataError for a column that unpacks to more than its limit.
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
            reason = f"longer than {source.MAX_DOCUMENT_BYTES >> 20} MiB, the longest document"
            yield Rejected(where, reason, beginning, (place,))
            continue
        try:
            yield Document(value.as_py() or "", (place,))
        except UnicodeDecodeError as error:
            contents = value.cast(pyarrow.large_binary()).as_py()
            yield Rejected(where, f"not UTF-8 ({error.reason} at byte {error.start})", contents, (place,))


def _unpacked(file: BinaryIO, name: str) -> BinaryIO:
    """Unpack a compressed Parquet file into an unnamed temporary file, because Parquet is read from its end.

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


#: Reads an open file, which may not be seekable, from a place on: (file, its name, options, rules, start).
Reader = Callable[[BinaryIO, str, ReadOptions, TokenRules | None, Place], Iterator[Record]]


@dataclass(frozen=True)
class Format:
    """A file format."""

    read: Reader
    suffixes: frozenset[str]
    """Suffixes, which a compression's suffix may follow."""
    makes_many: bool = True
    """True if several documents of one file are its records; otherwise they are parts of one long text."""
    in_folders: bool = True
    """True if files of this format in a folder are read without --glob."""
    has_fields: bool = True
    """True if records have fields, one of which is the text."""
    magic: tuple[int, bytes] = (0, b"\0no file")
    """Offset and bytes that identify the format whatever the file's name."""


#: Plain text: one document per file.
TEXT = Format(
    read_text,
    frozenset(
        {".txt", ".md", ".rst", ".org", ".tex", ".html", ".htm", ".xml", ".css", ".srt", ".csv", ".tsv", ".json"}
        | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".php"}
        | {".pl", ".lua", ".r", ".jl", ".scala", ".kt", ".swift", ".sh", ".sql"}
        | {".toml", ".yaml", ".yml", ".ini", ".cfg"}
    ),
    makes_many=False,
    has_fields=False,
)
_JSONL = Format(read_jsonl, frozenset({".jsonl", ".ndjson"}))
# Not read from folders unasked: model weights have this suffix, too.
_TOKENS = Format(read_tokens, frozenset({".bin"}), in_folders=False, has_fields=False)
FORMATS = (TEXT, _JSONL, Format(read_parquet, frozenset({".parquet"}), magic=(0, b"PAR1\x15")), _TOKENS)


def suffix_of(path: PurePath) -> str:
    """Return the suffix of the format in lower case, without suffixes of a compression or a number (`x.jsonl.1.gz`)."""
    while (suffix := path.suffix.lower()) in COMPRESSED_SUFFIXES or suffix[1:].isdecimal():
        if suffix.startswith(".t"):  # .tgz and similar
            return ".tar"
        path = PurePath(path.stem)
    return suffix


def format_of(path: PurePath, known: Sequence[Format] = FORMATS) -> Format | None:
    """Return the format by suffix, None when unknown."""
    suffix = suffix_of(path)
    return next((kind for kind in known if suffix in kind.suffixes), None)


def is_plain_name(path: PurePath) -> bool:
    """Return whether a name is that of plain text or of an archive, which may hold plain text."""
    return suffix_of(path) in (TEXT.suffixes | {".tar"}) - {".json"}


OpenedContents = AbstractContextManager[tuple[Format, BinaryIO]]


@contextmanager
def opened_contents(
    raw: BinaryIO, name: str, size_bytes: int, options: ReadOptions, known: Sequence[Format] = FORMATS
) -> Iterator[tuple[Format, BinaryIO]]:
    """Yield the format of an open file of `size_bytes`, by contents first and name second, and its uncompressed
    contents. Raises DataError, also within the block."""
    with unpacked(raw, name, size_bytes) as contents:
        yield _kind_of(head_of(contents), name, options, known), contents


def _kind_of(head: bytes, name: str, options: ReadOptions, known: Sequence[Format]) -> Format:
    """Return the format of a file that begins with `head`. Raises UndecodableError for UTF-16."""
    named = format_of(PurePath(name), known) or TEXT
    if options.is_plain or named is _TOKENS:
        return named
    for kind in known:
        begin, magic = kind.magic
        if head.startswith(magic, begin):
            return kind
    if named not in (TEXT, _JSONL):
        return named
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head[:4]:
        raise UndecodableError(f"{name} holds zero bytes or UTF-16 instead of UTF-8 text.")
    return _JSONL if is_jsonl(head, name, options) else named


_BUFFER_BYTES = 1 << 20
#: Limit of a name or an attribute list before a member, which tarfile reads into memory.
_MOST_HEADER_BYTES = 1 << 20
_HEADER_TYPES = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


class _Member(tarfile.TarInfo):
    """Refuses headers that would fill memory, and damaged ones that tarfile would treat as the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise
            raise tarfile.ReadError(str(error)) from None

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADER_TYPES and self.size > _MOST_HEADER_BYTES:
            raise tarfile.HeaderError(f"a header of {self.size:,} bytes")
        return cast(tarfile.TarInfo, super()._proc_member(archive))  # type: ignore[misc]

    def _refuse_sparse(self, *_: object) -> NoReturn:
        raise tarfile.ReadError("a sparse file, which is not supported: pack it without --sparse")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


class _Ending:
    """A file that refuses repeated reads at its end, with which tarfile skips any stated size."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_ends = 0

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes. Raises ReadError."""
        self._num_ends += not (contents := self._file.read(size))
        if self._num_ends > 2:
            raise tarfile.ReadError("unexpected end of data")
        return contents


class _Forward(io.RawIOBase):
    """A non-seekable member of an archive."""

    def __init__(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        contents = archive.extractfile(member)
        assert contents is not None
        self._contents = contents

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        contents = self._contents.read(len(buffer))
        buffer[: len(contents)] = contents
        return len(contents)


def _is_hidden(path: PurePosixPath) -> bool:
    return any(part.startswith(".") and part not in (".", "..") for part in path.parts)


def read_tar(
    file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Read every member of a tar archive of a known format. Places are (member, ...). Links, devices, hidden and
    unknown members are skipped and counted. Raises DataError."""
    first, inner = (start[0], start[1:]) if start else (0, ())
    try:
        with tarfile.open(fileobj=cast(IO[bytes], _Ending(file)), mode="r|", tarinfo=_Member) as archive:
            for number, member in enumerate(archive):
                # tarfile would keep every member in memory.
                archive.members = []  # type: ignore[attr-defined]
                if number < first:
                    continue
                path = PurePosixPath(member.name)
                kind = format_of(path)
                if not member.isreg() or kind is None or _is_hidden(path):
                    if not member.isdir():
                        options.passed_over[(path.suffix or path.name)[:80]] += 1
                    continue
                contents = cast(BinaryIO, io.BufferedReader(_Forward(archive, member), _BUFFER_BYTES))
                where = f"{name}:{member.name}"
                for record in _read_member(contents, where, member.size, options, rules, inner):
                    record.place = (number, *record.place)
                    yield record
                inner = ()
    except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:  # the last two come from headers
        raise DataError(f"{name} is damaged, truncated or not a tar: {error}.") from None


def _read_member(
    file: BinaryIO, where: str, size_bytes: int, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Read a member; one that is not UTF-8 becomes one rejected record."""
    try:
        with opened_contents(file, where, size_bytes, options) as (kind, contents):
            yield from kind.read(contents, where, options, rules, start)
    except UndecodableError as error:
        yield Rejected(where, str(error).removeprefix(f"{where} ").rstrip("."), b"", (1,))


TAR = Format(read_tar, frozenset({".tar"}), in_folders=False, magic=(257, b"ustar"))
#: All formats that `--input` accepts.
FILE_FORMATS = (*FORMATS, TAR)
