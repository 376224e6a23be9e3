"""Read text files, JSON lines and tar archives; recognise every format. A new format is a reader and a line in
`FORMATS`."""

from __future__ import annotations

import codecs
import io
import json
import re
import tarfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import PurePath, PurePosixPath
from typing import BinaryIO, cast

from llmscale.data.prepare.sources import source
from llmscale.data.prepare.sources.foreign import foreign_format, refuse_foreign_contents
from llmscale.data.prepare.sources.source import (
    BESIDE_RECORDS,
    BESIDE_TEXT,
    GLOB_CHOOSES,
    Choice,
    Document,
    FileError,
    Place,
    ReadOptions,
    Record,
    Rejected,
    TokenRules,
    UndecodableError,
    field_of,
    lacks_field,
    missing_field,
    pass_over,
)
from llmscale.data.prepare.sources.tables import has_csv_column, is_csv, read_arrow, read_csv, read_parquet
from llmscale.data.prepare.sources.tokens import LLMC_MAGIC, has_header, is_token_array, read_npy, read_tokens
from llmscale.data.shards.compressed import COMPRESSED_SUFFIXES, head_of, unpacked
from llmscale.errors import DataError
from llmscale.untrusted.paths import POINTER, is_pointer

_CHUNK_BYTES = 1 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")
_BOM = b"\xef\xbb\xbf"
_NOT_UTF8 = "not UTF-8"
_OBJECT_BEGINS = re.compile(r'\ufeff?\s*(\[\s*)?(?=\{\s*")')
_TEXTS_BEGIN = re.compile(r'\ufeff?\s*\[\s*"')
#: Parses integers as floats, which avoids Python's limit of 4,300 digits.
_DECODER = json.JSONDecoder(parse_int=float)


def is_jsonl(head: bytes, name: str, options: ReadOptions) -> bool:
    """Return whether a file of text that begins with `head` is JSON lines.

    A lone object or array without the field is text among plain text files, such as a settings file in a folder of
    code. Raises DataError for JSON records that are not one per line.
    """
    text = head.decode(errors="ignore")
    if not options.has_plain and suffix_of(PurePath(name)) == ".json" and _TEXTS_BEGIN.match(text):
        raise FileError(
            name,
            " is a JSON array of texts, but records are read from JSON lines",
            "Write one record per line: `jq -c '.[] | {text: .}' FILE`.",
        )
    if (begin := _OBJECT_BEGINS.match(text)) is None:
        return False
    line_end = text.find("\n", begin.end()) % (len(text) + 1)
    try:
        record, end = _DECODER.raw_decode(text, begin.end())
        is_alone = begin[1] is not None or not text[end:].lstrip().startswith("{")
        if is_alone and options.has_plain and not has_field(record, options.text_field):
            return False
    except (ValueError, RecursionError):  # damaged, or longer than the head
        last = options.text_field.rpartition(".")[2]
        if not re.search(rf"{re.escape(json.dumps(last))}\s*:", text):
            return False
        end = line_end + text[begin.end() : line_end].rstrip().endswith(("{", "[", ","))
    if begin[1] is not None or end > line_end:
        raise FileError(
            name,
            " is a JSON array or document, but records are read from JSON lines",
            "Write one record per line: `jq -c '.[]' FILE` of an array, `jq -c . FILE` of objects.",
        )
    return True


def has_field(record: dict[str, object], name: str) -> bool:
    """Return whether a record has a field, as field_of finds it."""
    with suppress(KeyError):
        field_of(record, name)
        return True
    return False


def read_jsonl(
    file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Read JSON lines. Places are (byte, line) of the next line, from 0. Raises DataError when the first record lacks
    the field."""
    offset, number = start or (0, 0)
    skip_bytes(file, offset)
    is_first = not offset
    limit_bytes = source.MAX_DOCUMENT_BYTES
    field, parse_fast = options.text_field, _fast_parser()
    while line := file.readline(limit_bytes + 1):
        size_bytes = len(line)
        offset, number = offset + size_bytes, number + 1
        line = line.removeprefix(_BOM) if number == 1 else line
        reason, is_undecodable = "", False
        if size_bytes > limit_bytes:
            reason = source.describe_too_long()
            offset += _skip_line(file) if not line.endswith(b"\n") else 0
        elif line.isspace() or not line:
            continue
        if not reason:
            record = _parse(line, parse_fast)
            if isinstance(record, dict):
                try:
                    text = options.text_of(record)
                except KeyError:
                    if is_first:
                        raise missing_field(f"{name}, line {number}", field, record) from None
                    reason = lacks_field(field, record)
                else:
                    if isinstance(text, str):
                        is_first = False
                        yield Document(text, (offset, number))
                        continue
                    reason = f"the field '{field}' holds {type(text).__name__}, not text"
            else:
                reason, is_undecodable = record, record.startswith(_NOT_UTF8)
        yield Rejected(f"{name}, line {number}", reason, line, (offset, number), is_undecodable)


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
        return f"{_NOT_UTF8} ({error.reason} at byte {error.start})"
    except json.JSONDecodeError as error:
        return f"not valid JSON ({error.msg} at character {error.pos + 1})"
    except (ValueError, RecursionError) as error:
        return f"not valid JSON ({error})"
    if not isinstance(record, dict):
        return f"expected a JSON object, found {type(record).__name__}"
    # Only an escape can hold half a surrogate pair.
    if b"\\ud" in line or b"\\uD" in line:
        record = cast("dict[str, object]", json.loads(without_lone_surrogates(json.dumps(record, ensure_ascii=False))))
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
        expected = "UTF-8" if encoding in ("utf-8-sig", "utf-8") else encoding
        raise UndecodableError(name, f" is not {expected} text: {error}") from None
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
        raise UndecodableError(name, " holds zero bytes: it is binary or UTF-16, not UTF-8 text")


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
    magic: tuple[int, tuple[bytes, ...]] = (0, ())
    """Offset and bytes, any of which identify the format whatever the file's name."""
    are_records: Callable[[bytes, str, ReadOptions], bool] | None = None
    """Function that tells whether a file with these first bytes and this name holds records in a folder or an archive;
    None: always."""


def _never(_head: bytes, _name: str, _options: ReadOptions) -> bool:
    return False


#: Plain text: one document per file.
TEXT = Format(
    read_text,
    frozenset(
        {".txt", ".md", ".rst", ".org", ".tex", ".css", ".srt", ".json"}
        | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".php"}
        | {".pl", ".lua", ".r", ".jl", ".scala", ".kt", ".swift", ".sh", ".sql"}
        | {".toml", ".yaml", ".yml", ".ini", ".cfg"}
    ),
    makes_many=False,
    has_fields=False,
    are_records=_never,
)
#: Names of text files that say nothing about their contents.
_VAGUE = frozenset({".txt", ".json"})
_JSONL = Format(read_jsonl, frozenset({".jsonl", ".ndjson"}))
_CSV = Format(read_csv, frozenset({".csv", ".tsv", ".tab"}), are_records=has_csv_column)
_PARQUET = Format(read_parquet, frozenset({".parquet"}), magic=(0, (b"PAR1\x15",)))
# A stream begins with the mark of a message.
_ARROW = Format(read_arrow, frozenset({".arrow", ".feather", ".ipc"}), magic=(0, (b"ARROW1\0\0", b"\xff\xff\xff\xff")))
_ARRAY = Format(read_npy, frozenset({".npy"}), has_fields=False, magic=(0, (b"\x93NUMPY",)), are_records=is_token_array)
# Not read from folders unasked: model weights have this suffix, too.
_TOKENS = Format(
    read_tokens, frozenset({".bin"}), in_folders=False, has_fields=False, magic=(0, LLMC_MAGIC), are_records=has_header
)
FORMATS = (TEXT, _JSONL, _CSV, _PARQUET, _ARROW, _ARRAY, _TOKENS)


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
    """Return the format of a file that begins with `head`. Raises FileError for a Git LFS pointer, a format that is
    refused, and UTF-16."""
    if options.is_plain:
        return TEXT
    named = format_of(PurePath(name), known) or TEXT
    if is_pointer(head):
        raise FileError(name, f" {POINTER}", "")
    for kind in known:
        begin, magic = kind.magic
        if head.startswith(magic, begin):
            return kind
    if named is _TOKENS:
        return named
    is_code = suffix_of(PurePath(name)) in TEXT.suffixes - _VAGUE
    refuse_foreign_contents(head, name, is_code=is_code)
    is_binary = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head[:4]
    if is_binary and named in (TEXT, _JSONL, _CSV):
        raise UndecodableError(name, " holds zero bytes or UTF-16 instead of UTF-8 text")
    if not is_binary and is_jsonl(head, name, options):
        return _JSONL
    return _CSV if not is_binary and not is_code and is_csv(head, options) else named


def is_beside_records(kind: Format, options: ReadOptions) -> bool:
    """Return whether a file of a folder or an archive turns out to be text among records."""
    return kind is TEXT and options.choice is not None and options.choice.are_records


#: Files of each suffix that are opened to find out whether they are records, and members of an archive that are seen.
_MOST_LOOKED_AT, _MOST_MEMBERS = 8, 1000


def choose(files: Iterable[tuple[PurePath, AbstractContextManager[BinaryIO], int]], options: ReadOptions) -> Choice:
    """Choose which files of a folder or an archive are read: its records if it has any, else its text.

    `files` are names of known formats, the files as they are stored, and their sizes.
    """
    options = replace(options, has_plain=True, passed_over=set())
    num_looked_at: Counter[str] = Counter()
    records: set[str] = set()
    for path, file, size_bytes in files:
        suffix, kind = suffix_of(path), format_of(path)
        num_looked_at[suffix] += 1
        if kind is not None and kind.are_records is None:
            records.add(suffix)
        elif (kind is TEXT and suffix not in _VAGUE) or num_looked_at[suffix] > _MOST_LOOKED_AT:
            continue
        elif suffix not in records and _are_records(str(path), file, size_bytes, options):
            records.add(suffix)
    if records:
        always = (kind.suffixes for kind in FORMATS if kind.are_records is None)
        return Choice(frozenset(records.union(*always)), are_records=True)
    return Choice(TEXT.suffixes if TEXT.suffixes.intersection(num_looked_at) else frozenset(num_looked_at), False)


def _are_records(name: str, file: AbstractContextManager[BinaryIO], size_bytes: int, options: ReadOptions) -> bool:
    with suppress(DataError), file as raw, opened_contents(raw, name, size_bytes, options) as (kind, contents):
        return kind.are_records is None or kind.are_records(head_of(contents), name, options)
    return False


def choose_members(file: BinaryIO, options: ReadOptions) -> Choice:
    """Choose which members of a tar archive are read, by the first of them."""

    def members() -> Iterator[tuple[PurePath, AbstractContextManager[BinaryIO], int]]:
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as archive:
            for _, member in zip(range(_MOST_MEMBERS), archive, strict=False):
                archive.members = []  # type: ignore[attr-defined]
                path = PurePosixPath(member.name)
                if member.isreg() and not _is_hidden(path) and format_of(path):
                    yield path, nullcontext(_open_member(archive, member)), member.size

    with suppress(*_TAR_ERRORS):  # reported when it is read
        return choose(members(), options)
    return Choice(frozenset(), False)


def reason_of(path: PurePath) -> str:
    """Return why a file of this name is not read from a folder or an archive."""
    suffix = suffix_of(path)
    if foreign := foreign_format(suffix):
        return f"files ({foreign.what}: {foreign.tool})"
    if suffix in _TOKENS.suffixes | TAR.suffixes:
        return f"files ({suffix} is read if --input or --glob names it)"
    return f"files of unknown type{GLOB_CHOOSES}"


_BUFFER_BYTES = 1 << 20


class _Member(tarfile.TarInfo):
    """Refuses damaged headers, which tarfile would treat as the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise
            raise tarfile.ReadError(str(error)) from None


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
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as archive:
            for number, member in enumerate(archive):
                # tarfile would keep every member in memory.
                archive.members = []  # type: ignore[attr-defined]
                if number < first or member.isdir():
                    continue
                where = f"{name}:{member.name}"
                if reason := _reason_to_skip(archive, member, options):
                    # --glob chooses files of a folder only.
                    pass_over(options.passed_over, reason.removesuffix(GLOB_CHOOSES), PurePath(where))
                    continue
                contents = _open_member(archive, member)
                for record in _read_member(contents, where, member.size, options, rules, inner):
                    record.place = (number, *record.place)
                    yield record
                inner = ()
    except _TAR_ERRORS as error:
        raise DataError(f"{name} is damaged, truncated or not a tar: {error}.") from None


#: Errors of tarfile; the last comes from headers.
_TAR_ERRORS = (tarfile.TarError, EOFError, ValueError)


def _open_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_Forward(archive, member), _BUFFER_BYTES))


def _reason_to_skip(archive: tarfile.TarFile, member: tarfile.TarInfo, options: ReadOptions) -> str:
    """Return why a member is not read, empty if it is."""
    path = PurePosixPath(member.name)
    if not member.isreg() or _is_hidden(path):
        return "files (links, devices or hidden names)"
    kind, choice = format_of(path), options.choice
    if kind is None:
        contents = _open_member(archive, member)
        with suppress(DataError), opened_contents(contents, member.name, member.size, options, FILE_FORMATS) as opened:
            if opened[0] is TAR:
                return "files (archives within an archive: unpack the outer one)"
        return reason_of(path)
    if choice is not None and suffix_of(path) not in choice.suffixes:
        return BESIDE_RECORDS if choice.are_records else BESIDE_TEXT
    return ""


def _read_member(
    file: BinaryIO, where: str, size_bytes: int, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Read a member; one that is refused or not UTF-8 becomes one rejected record."""
    try:
        with opened_contents(file, where, size_bytes, options) as (kind, contents):
            if is_beside_records(kind, options):
                pass_over(options.passed_over, BESIDE_RECORDS.removesuffix(GLOB_CHOOSES), PurePath(where))
            else:
                yield from kind.read(contents, where, options, rules, start)
    except UndecodableError as error:
        yield Rejected(where, error.problem.strip(), b"", (1,), is_undecodable=True)


TAR = Format(read_tar, frozenset({".tar"}), in_folders=False, magic=(257, (b"ustar",)), are_records=_never)
#: All formats that `--input` accepts.
FILE_FORMATS = (*FORMATS, TAR)
