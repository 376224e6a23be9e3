"""Read text files and tar archives; recognise every format, and those that another tool must turn into text. A new
format is a reader and a line in `FORMATS`."""

from __future__ import annotations

import codecs
import io
import re
import tarfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import PurePath, PurePosixPath
from typing import IO, BinaryIO, NamedTuple, cast

from llmscale.data.prepare.sources.records import (
    has_csv_column,
    is_csv,
    is_jsonl,
    read_arrow,
    read_csv,
    read_jsonl,
    read_parquet,
    without_lone_surrogates,
)
from llmscale.data.prepare.sources.source import (
    BESIDE_RECORDS,
    BESIDE_TEXT,
    GLOB_CHOOSES,
    ZERO_TAIL,
    Choice,
    Document,
    FileError,
    ReadOptions,
    Record,
    Rejected,
    TokenRules,
    UndecodableError,
    join_errors,
    pass_over,
    suffix_of,
)
from llmscale.data.prepare.sources.tokens import LLMC_MAGIC, has_header, is_token_array, read_npy, read_tokens
from llmscale.data.shards.compressed import head_of, unpacked
from llmscale.errors import DataError
from llmscale.untrusted.paths import POINTER, is_pointer

_CHUNK_BYTES = 1 << 20
#: A longer text file becomes several documents of at most _PIECE_CHARACTERS.
MAX_TEXT_BYTES = 16 << 20
_PIECE_CHARACTERS = 1 << 20
#: Names of text files that say nothing about their contents.
_VAGUE = frozenset({".txt", ".json"})
#: Files of each suffix that are opened to find out whether they are records, and members of an archive that are seen.
_MOST_LOOKED_AT = 8
_MOST_MEMBERS = 1000
_BUFFER_BYTES = 1 << 20


def read_text(file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None) -> Iterator[Record]:
    """Read a text file as one document, or as several beyond MAX_TEXT_BYTES, so that a share can be validation.

    Raises UndecodableError for another encoding, before the first document unless the file is longer than
    MAX_TEXT_BYTES.
    """
    return map(Document, _decode(file, name))


def _decode(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield the parts of a text, at least one."""
    chunk = file.read(_CHUNK_BYTES)
    parts = [""]
    size_bytes = 0
    encoding = "utf-8-sig"
    try:
        if name.lower().endswith(".py"):
            encoding = tokenize.detect_encoding(io.BytesIO(chunk).readline)[0]
        b" ".decode(encoding)  # refuses codecs that are not text encodings, such as zlib
        is_utf8 = encoding in ("utf-8-sig", "utf-8")  # which has no lone surrogates
        decoder = codecs.getincrementaldecoder(encoding)()
        while chunk:
            if b"\0" in chunk:
                raise UndecodableError(name, _describe_zeros(chunk, file))
            parts.append(decoder.decode(chunk))
            size_bytes += len(chunk)
            if size_bytes > MAX_TEXT_BYTES:
                *done, rest = _cut("".join(parts))
                yield from done if is_utf8 else map(without_lone_surrogates, done)
                parts = [rest]
            chunk = file.read(_CHUNK_BYTES)
        parts.append(decoder.decode(b"", final=True))
    except (UnicodeError, SyntaxError, LookupError) as error:
        expected = encoding.replace("utf-8-sig", "utf-8").replace("utf-8", "UTF-8")
        raise UndecodableError(name, f" is not {expected} text: {error}") from None
    text = "".join(parts)
    yield text if is_utf8 else without_lone_surrogates(text)


def _describe_zeros(chunk: bytes, file: BinaryIO) -> str:
    """Return what is wrong with a text of whose bytes some are zero: `chunk` and the rest of the file."""
    while chunk and b"\0" not in chunk.rstrip(b"\0"):
        chunk = file.read(_CHUNK_BYTES)
    if chunk:
        return " holds zero bytes: it is binary or UTF-16, not UTF-8 text"
    return f" ends in {ZERO_TAIL}"


def _cut(text: str) -> Iterator[str]:
    """Yield pieces of at most _PIECE_CHARACTERS, each ending after a line if one ends in its second half."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        border = text.rfind("\n", start + _PIECE_CHARACTERS // 2, start + _PIECE_CHARACTERS)
        end = border + 1 or start + _PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


class ForeignFormat(NamedTuple):
    """A format that is refused."""

    what: str
    """Noun in the plural."""
    suffixes: str
    """Suffixes between spaces."""
    tool: str
    """Fix, as an order."""
    begins: bytes = rb"(?!)"
    """Pattern of the first bytes of such a file, whatever its name and their case; by default none."""
    is_markup: bool = False
    """True if source code, too, may begin like that."""


_FOREIGN = (
    ForeignFormat(
        "web archives (WARC)",
        ".warc .arc .wet .wat",
        "extract the text with trafilatura (of WET files with warcio), and write it as JSON lines",
        rb"WARC/\d",
    ),
    ForeignFormat(
        "HTML pages",
        ".html .htm .xhtml .mhtml .mht",
        "extract the text with trafilatura, and write it as JSON lines",
        rb"(?:\xef\xbb\xbf)?\s*(?:<!--(?s:.{0,500}?)-->\s*)?"
        rb"(?:<!doctype\s+html|<(?:html|head|body|title|meta|div)[\s>])",
        is_markup=True,
    ),
    ForeignFormat(
        "XML documents",
        ".xml .rss .atom .tei",
        "extract the text (of a wiki's dump with wikiextractor, else with pandoc), and write it as JSON lines",
        # A dump of Wikipedia begins with its namespace.
        rb"(?:\xef\xbb\xbf)?\s*<(?:\?xml\s|[a-z][\w:-]{0,40}\s[^<>]{0,500}?\bxmlns\b)",
        is_markup=True,
    ),
    ForeignFormat("PDF files", ".pdf", "extract the text with pdftotext", rb"%PDF-"),
    ForeignFormat("PostScript files", ".ps .eps", "extract the text with ps2ascii", rb"%!PS"),
    ForeignFormat("DjVu files", ".djvu", "extract the text with djvutxt", rb"AT&TFORM"),
    ForeignFormat(
        "e-books",
        ".epub .fb2 .mobi .azw .azw3",
        "extract the text with `pandoc -t plain` (of Kindle's files with Calibre's ebook-convert)",
    ),
    ForeignFormat(
        "office documents",
        ".docx .doc .odt .rtf .pptx .ppt .odp",
        "extract the text with `pandoc -t plain` (of .doc and .ppt with `soffice --convert-to txt`)",
        rb"\{\\rtf\d|\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
    ),
    ForeignFormat("spreadsheets", ".xlsx .xls .xlsm .ods", "save them as CSV"),
    ForeignFormat("notebooks", ".ipynb", "convert them with `jupyter nbconvert --to markdown`"),
    ForeignFormat(
        "databases", ".sqlite .sqlite3 .db .duckdb .mdb", "export the table as CSV or Parquet", rb"SQLite format 3\0"
    ),
    ForeignFormat(
        "tables of other formats",
        ".avro .orc .tfrecord .h5 .hdf5 .rds .sas7bdat .dta",
        "write them as Parquet",
        rb"Obj\x01|ORC[\x00-\x08]|\x89HDF\r\n|FEA1",
    ),
    ForeignFormat(
        "pickles, which are never loaded",
        ".pkl .pickle .pt .pth .npz .joblib",
        "write text as JSON lines, and tokens with numpy.save",
        rb"\x80[\x02-\x05][\x00-\xff]{0,10}[.c(}\]X\x8c\x95]",
    ),
    ForeignFormat(
        "weights of a model",
        ".safetensors .gguf .onnx",
        "give the text that it is to be trained on; train takes a model with --init-from",
        rb"GGUF[\x01-\x04]\0|[\x00-\xff]{4}\0{4}\{\"",
    ),
    ForeignFormat("archives of another kind", ".zip .7z .rar", "unpack them"),
)


def _foreign_format(path: PurePath) -> ForeignFormat | None:
    suffix = suffix_of(path)
    return next((kind for kind in _FOREIGN if suffix in kind.suffixes.split()), None)


def refuse_foreign_names(names: Iterable[str]) -> None:
    """Refuse files by their suffixes, all in one error. Raises FileError."""
    refused = [_refusal(name, kind) for name in names if (kind := _foreign_format(PurePath(name)))]
    if refused:
        raise join_errors(refused)


def _refusal(name: str, kind: ForeignFormat) -> FileError:
    return FileError(name, f" is not read: {kind.what}", f"{kind.tool[0].upper()}{kind.tool[1:]}.")


#: Reads an open file, which may not be seekable: (file, its name, options, rules).
Reader = Callable[[BinaryIO, str, ReadOptions, TokenRules | None], Iterator[Record]]


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
    for foreign in _FOREIGN:
        if re.match(foreign.begins, head, re.IGNORECASE) and not (foreign.is_markup and is_code):
            raise _refusal(name, foreign)
    is_binary = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head[:4]
    if is_binary and named in (TEXT, _JSONL, _CSV):
        raise UndecodableError(name, " holds zero bytes or UTF-16 instead of UTF-8 text")
    if not is_binary and is_jsonl(head, name, options):
        return _JSONL
    return _CSV if not is_binary and not is_code and is_csv(head, options) else named


def is_beside_records(kind: Format, options: ReadOptions) -> bool:
    """Return whether a file of a folder or an archive turns out to be text among records."""
    return kind is TEXT and options.choice is not None and options.choice.are_records


def choose(files: Iterable[tuple[PurePath, AbstractContextManager[BinaryIO], int]], options: ReadOptions) -> Choice:
    """Choose which files of a folder or an archive are read: its records if it has any, else its text.

    `files` are names of known formats, the files as they are stored, and their sizes.
    """
    options = replace(options, has_plain=True, passed_over=set())
    num_looked_at: Counter[str] = Counter()
    records: set[str] = set()
    for path, file, size_bytes in files:
        suffix = suffix_of(path)
        kind = format_of(path)
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


def choose_members(file: BinaryIO, name: str, options: ReadOptions) -> Choice:
    """Choose which members of a tar archive are read, by the first of them. Raises DataError."""
    visible = (
        (path, nullcontext(contents), member.size)
        for member, contents in islice(_members(file), _MOST_MEMBERS)
        if member.isreg() and not _is_hidden(path := PurePosixPath(member.name)) and format_of(path)
    )
    with _refuse_damage(name):
        return choose(visible, options)


def reason_of(path: PurePath) -> str:
    """Return why a file of this name is not read from a folder or an archive."""
    if foreign := _foreign_format(path):
        return f"files ({foreign.what}: {foreign.tool})"
    if (suffix := suffix_of(path)) in _TOKENS.suffixes | TAR.suffixes:
        return f"files ({suffix} is read if --input or --glob names it)"
    return f"files of unknown type{GLOB_CHOOSES}"


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


class _Contents(io.RawIOBase):
    """The contents of a member, which are read once, in order."""

    def __init__(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self._open = partial(archive.extractfile, member)
        self._contents: IO[bytes] | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._contents = self._contents or self._open()
        if self._contents:
            contents = self._contents.read(len(buffer))
        else:
            contents = b""
        buffer[: len(contents)] = contents
        return len(contents)


@contextmanager
def _refuse_damage(name: str) -> Iterator[None]:
    """Turn errors of tarfile into DataErrors."""
    try:
        yield
    except (tarfile.TarError, EOFError, ValueError) as error:  # the last comes from headers
        raise DataError(f"{name} is damaged, truncated or not a tar: {error}.") from None


def _members(file: BinaryIO) -> Iterator[tuple[tarfile.TarInfo, BinaryIO]]:
    """Yield the members of a tar archive with their contents. Raises errors of tarfile."""
    with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as archive:
        for member in archive:
            # tarfile would keep every member in memory.
            archive.members = []  # type: ignore[attr-defined]
            yield member, cast(BinaryIO, io.BufferedReader(_Contents(archive, member), _BUFFER_BYTES))


def _is_hidden(path: PurePosixPath) -> bool:
    return any(part.startswith(".") and part not in (".", "..") for part in path.parts)


def read_tar(file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None) -> Iterator[Record]:
    """Read every member of a tar archive of a known format. Links, devices, hidden and unknown members are skipped and
    counted. Raises DataError."""
    with _refuse_damage(name):
        for member, contents in _members(file):
            if member.isdir():
                continue
            where = f"{name}:{member.name}"
            if reason := _reason_to_skip(member, contents, options):
                # --glob chooses files of a folder only.
                pass_over(options.passed_over, reason.removesuffix(GLOB_CHOOSES), PurePath(where))
                continue
            yield from _read_member(contents, where, member.size, options, rules)


def _reason_to_skip(member: tarfile.TarInfo, contents: BinaryIO, options: ReadOptions) -> str:
    """Return why a member is not read, empty if it is."""
    path = PurePosixPath(member.name)
    if not member.isreg() or _is_hidden(path):
        return "files (links, devices or hidden names)"
    if format_of(path) is None:
        with suppress(DataError), opened_contents(contents, member.name, member.size, options, FILE_FORMATS) as opened:
            if opened[0] is TAR:
                return "files (archives within an archive: unpack the outer one)"
        return reason_of(path)
    if (choice := options.choice) is not None and suffix_of(path) not in choice.suffixes:
        return BESIDE_RECORDS if choice.are_records else BESIDE_TEXT
    return ""


def _read_member(
    file: BinaryIO, where: str, size_bytes: int, options: ReadOptions, rules: TokenRules | None
) -> Iterator[Record]:
    """Read a member; one that is refused or not UTF-8 becomes one rejected record."""
    try:
        with opened_contents(file, where, size_bytes, options) as (kind, contents):
            if is_beside_records(kind, options):
                pass_over(options.passed_over, BESIDE_RECORDS.removesuffix(GLOB_CHOOSES), PurePath(where))
            else:
                yield from kind.read(contents, where, options, rules)
    except UndecodableError as error:
        yield Rejected(where, error.problem.strip(), b"", is_undecodable=True)


TAR = Format(read_tar, frozenset({".tar"}), in_folders=False, magic=(257, (b"ustar",)), are_records=_never)
#: All formats that `--input` accepts.
FILE_FORMATS = (*FORMATS, TAR)
