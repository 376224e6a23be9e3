"""The interface of all inputs: documents, each with the place from which reading resumes; and local files."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import BinaryIO, NamedTuple

from llmscale.data.prepare.conversations import FORMS, conversation_text
from llmscale.data.shards.compressed import COMPRESSED_SUFFIXES, most_unpacked_bytes, unfolds
from llmscale.data.tokenizers.tokenizer import TokenArray
from llmscale.errors import DataError
from llmscale.terminal.human_numbers import with_singulars
from llmscale.untrusted.paths import RefusedFile, open_regular

#: Place from which reading resumes: numbers that only its source interprets. () is the beginning.
Place = tuple[int, ...]
#: Longest record; a longer one is rejected.
MAX_DOCUMENT_BYTES = 64 << 20
#: Added to the bytes of each record, because a file can repeat empty records without end.
_RECORD_BYTES = 64
#: Most field names that an error lists.
_MOST_FIELDS = 20
#: Most names of files that are not read which are kept; of more, the suffixes.
_MOST_PASSED_OVER = 10_000
#: Reason of a Rejected, and of a text that is refused.
ZERO_TAIL = "zero bytes, as a crash or a full disk leaves them at a file's end: cut them off"
#: Reasons of a PassedOver.
UNDECODABLE = "texts (not UTF-8)"
GLOB_CHOOSES = " (--glob chooses files)"
BESIDE_RECORDS = f"files beside the records{GLOB_CHOOSES}"
BESIDE_TEXT = f"files beside the text: arrays, or tables that lack its column{GLOB_CHOOSES}"
HIDDEN = "files with hidden names"
HALF_PAIRS = "files with halves of surrogate pairs, which became U+FFFD"
NOT_REGULAR = "files (links to folders, pipes or devices: `cp -rL` makes a copy that includes them)"
#: Most names in a message.
MOST_NAMES = 20
_BUFFER_BYTES = 1 << 20


@dataclass(slots=True)  # frozen ones take three times as long to make
class Document:
    """A text, or its tokens without end-of-text and begin-of-text."""

    content: str | TokenArray
    place: Place = ()
    """Place after this document, which a source of files fills in."""


@dataclass(slots=True)
class Rejected:
    """A record that is not a document."""

    where: str
    """File and line, or another name of the record."""
    reason: str
    """A sentence without its full stop."""
    contents: bytes
    """Content of the record, or its beginning."""
    place: Place = ()
    """Place after this record, as in a Document."""
    is_undecodable: bool = False
    """True for text that is not UTF-8, which --skip-undecodable skips."""

    def describe(self) -> str:
        return f"{self.where}: {self.reason}."


Record = Document | Rejected


@dataclass(frozen=True)
class TokenRules:
    """Requirements on the tokens of an input that another program tokenised."""

    vocab_size: int
    eot_token: int
    """Token that ends a document."""
    bos_tokens: tuple[int, ...]
    """Tokens that may precede a document."""


class PassedOver(NamedTuple):
    """A file that is not read."""

    reason: str
    """Noun in the plural, with why it is not read."""
    name: str
    """Path below the folder that the user named, or in its archive."""


def pass_over(passed_over: set[PassedOver], reason: str, path: PurePath) -> None:
    """Add a file, or its suffix once there are very many."""
    if len(passed_over) < _MOST_PASSED_OVER:
        name = str(path)
    else:
        name = f"*{path.suffix}"
    passed_over.add(PassedOver(reason, name[-200:]))


@dataclass(frozen=True)
class Choice:
    """Choice of the files of a folder or an archive to read."""

    suffixes: frozenset[str]
    """Suffixes of formats."""
    are_records: bool
    """True if they are records; then plain text is not read."""


@dataclass(frozen=True)
class ReadOptions:
    """Options for turning records into documents."""

    text_field: str = "text"
    """Field that holds the text, in records of any format; `page.text` is the field text within the field page."""
    skip_undecodable: bool = False
    """Skip and count text that is not UTF-8."""
    hf_split: str = "train"
    """Split of a Hugging Face dataset, on the Hub or from save_to_disk."""
    passed_over: set[PassedOver] = field(default_factory=set)
    """Files that are not read."""
    is_plain: bool = False
    """True if every file is text whatever its contents."""
    has_plain: bool = False
    """True if some names are those of plain text; then a lone JSON object without the field is text, too."""
    choice: Choice | None = None
    """Choice of files of a folder or an archive; None for those that the user named."""
    is_chat: bool = False
    """True if records are conversations, whose document is their JSON."""

    def text_of(self, record: Mapping[str, object]) -> object:
        """Return a record's text. Raises KeyError."""
        if self.is_chat:
            return conversation_text(record, self.text_field)
        return field_of(record, self.text_field)


class FileError(DataError):
    """A file cannot be read as it is. Those with the same remedy are reported together."""

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        """`problem` follows the name, `remedy` is a sentence."""
        super().__init__(f"{name}{problem}. {remedy}".rstrip())
        self.name = name
        self.problem = problem
        self.remedy = remedy


def join_errors(errors: Sequence[FileError]) -> FileError:
    """Return one error for several files: all of them, then each remedy once."""
    if len(errors) == 1:
        return errors[0]
    listed = "; ".join(f"{error.name}{error.problem}" for error in errors[:MOST_NAMES])
    if len(errors) > MOST_NAMES:
        more = f"; and {len(errors) - MOST_NAMES:,} more"
    else:
        more = ""
    remedies = " ".join(dict.fromkeys(error.remedy for error in errors if error.remedy))
    return FileError(f"{len(errors):,} files cannot be read", f": {listed}{more}", remedies)


class UndecodableError(FileError):
    """A text file is not in its expected encoding."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem, "Convert it to UTF-8, or skip such files with --skip-undecodable.")


class Source(ABC):
    """Documents in a fixed order."""

    name: str
    """Name as the user wrote it."""
    total_bytes: int | None = None
    """Bytes to read, as stored (compressed); None when unknown."""
    read_bytes: int = 0
    """Bytes that the latest pass has read so far."""
    passed_over: set[PassedOver]
    """Files in folders and archives that are not read."""
    num_cut: int = 0
    """Texts that were cut into several documents because they are too long."""
    skipped: int = 0
    """Documents skipped because they are not UTF-8."""

    @abstractmethod
    def records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        """Yield documents and rejected records in order, from a place on. Tokens need `rules`. Raises DataError when
        reading fails."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a cheap identity of the contents, equal when nothing has changed."""

    def has_fields(self) -> bool:
        """Return whether records have fields, one of which is the text. Raises DataError."""
        return True

    def check(self) -> None:  # noqa: B027  # most have nothing to check
        """Read ahead to find files that cannot be read, before anything is written. Raises one DataError for all."""

    def parts(self) -> list[Source]:
        """Return consecutive parts of this source that can be read independently."""
        return [self]

    def documents(self) -> Iterator[str]:
        """Yield the text of every document in order. Raises DataError for a rejected record."""
        self.skipped = self.num_cut = 0
        for record in self.records((), None):
            if isinstance(record, Rejected):
                raise DataError(record.describe())
            assert isinstance(record.content, str)
            yield record.content


def within_budget(records: Iterable[Record], name: str, size_bytes: int) -> Iterator[Record]:
    """Yield records; raise DataError once they hold more than a file of `size_bytes` may unpack to.

    Empty records count, too, because they take time.
    """
    left_bytes = most_unpacked_bytes(size_bytes)
    for record in records:
        left_bytes -= _RECORD_BYTES + len(record.content if isinstance(record, Document) else record.contents)
        if left_bytes < 0:
            raise unfolds(name, size_bytes)
        yield record


def without_undecodable(source: Source, records: Iterable[Record], options: ReadOptions) -> Iterator[Record]:
    """Yield records; with --skip-undecodable those that are not UTF-8 are counted in `source` instead."""
    for record in records:
        if options.skip_undecodable and isinstance(record, Rejected) and record.is_undecodable:
            source.skipped += 1
            pass_over(options.passed_over, UNDECODABLE, PurePath(record.where))
        else:
            yield record


def describe_too_long() -> str:
    return f"longer than {MAX_DOCUMENT_BYTES >> 20} MiB, the longest document"


def field_of(record: Mapping[str, object], name: str) -> object:
    """Return the value of a field by its name, or by the path `page.text` within fields. Raises KeyError."""
    if name in record or "." not in name:
        return record[name]
    first, _, rest = name.partition(".")
    inner = record[first]
    if not isinstance(inner, Mapping):
        raise KeyError(name)
    return field_of(inner, rest)


def missing_field(
    where: str, text_field: str, record: Mapping[str, object] | list[str], word: str = "field"
) -> FileError:
    """Return the error for a file whose first record lacks the text field."""
    what = f": {lacks_field(text_field, record, word)}; name one with --text-field, or leave the file out"
    return FileError(where, what, "")


def lacks_field(text_field: str, record: Mapping[str, object] | list[str], word: str = "field") -> str:
    """Return a sentence that a record lacks the text field, with the fields it has (the first of many)."""
    ordered = sorted(_names_in(record) if isinstance(record, Mapping) else record)
    more = len(ordered) - _MOST_FIELDS
    listed = ", ".join(name[:80] for name in ordered[:_MOST_FIELDS]) + (f" and {more} more" if more > 0 else "")
    return f"no {word} '{text_field}'. Its {word}s: {listed}"


def document_of(
    record: Mapping[str, object], options: ReadOptions, where: str, contents: bytes, *, is_first: bool
) -> Record:
    """Return the document of a record with fields, or the record as rejected, with `contents`.

    Raises FileError if the first one lacks the field: then the user has named another.
    """
    try:
        text = options.text_of(record)
    except KeyError:
        if is_first and options.is_chat:
            raise FileError(where, f": {lacks_field(options.text_field, record)}", f"--chat reads {FORMS}.") from None
        if is_first:
            raise missing_field(where, options.text_field, record) from None
        return Rejected(where, lacks_field(options.text_field, record), contents)
    if text is None:
        # As in Parquet, where it is common.
        return Document("")
    if isinstance(text, str):
        return Document(text)
    return Rejected(where, f"the field '{options.text_field}' holds {type(text).__name__}, not text", contents)


def _names_in(record: Mapping[str, object]) -> Iterator[str]:
    """Yield the names of fields, and of the fields within them."""
    for name, value in record.items():
        yield from (f"{name}.{inner}" for inner in value) if isinstance(value, Mapping) and value else [name]


def suffix_of(path: PurePath) -> str:
    """Return the suffix of the format in lower case, without suffixes of a compression or a number (`x.jsonl.1.gz`)."""
    while (suffix := path.suffix.lower()) in COMPRESSED_SUFFIXES or suffix[1:].isdecimal():
        if suffix.startswith(".t"):  # .tgz and similar
            return ".tar"
        path = PurePath(path.stem)
    return suffix


class InputFile(ABC):
    """A file that can be opened repeatedly."""

    name: str
    """Name for messages; its suffix tells the format."""
    relative: str
    """Path below the folder that the user named."""
    size_bytes: int
    version: int | str
    """Version of the contents: changes with them."""
    is_remote: bool = False
    """True for a file in a store."""

    @abstractmethod
    def open(self) -> BinaryIO:
        """Open the file for reading. Raises OSError, RefusedFile, DataError."""


class LocalFile(InputFile):
    """A regular file on this machine."""

    def __init__(self, path: Path, root: Path) -> None:
        status = path.stat()
        self._path = path
        self.name = str(path)
        self.relative = path.relative_to(root).as_posix()
        self.size_bytes = status.st_size
        self.version = status.st_mtime_ns

    def open(self) -> BinaryIO:
        # Lines are longer than Python's default buffer of 8 KiB.
        return io.BufferedReader(open_regular(self._path).detach(), _BUFFER_BYTES)


@contextmanager
def opened(file: InputFile) -> Iterator[BinaryIO]:
    """Open a file as it is stored. Raises DataError."""
    try:
        raw = file.open()
    except RefusedFile as error:
        raise FileError(file.name, f" {error.strerror}", "") from None
    except OSError as error:
        raise DataError(f"Cannot read {file.name}: {error.strerror or error}.") from None
    with raw:
        yield raw


def walk(root: Path, skipped: Collection[str] = ()) -> tuple[list[Path], list[Path], list[Path]]:
    """Return all files below `root` in path order, all else that is not a folder of this tree (links to folders, pipes,
    devices), and what has a hidden name. Files in hidden folders and in those named in `skipped` is in no list."""
    files = []
    others = []
    hidden = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped]
        for name in [*names, *subfolders]:
            path = Path(folder, name)
            if name.startswith("."):
                hidden.append(path)
            elif path.is_file():
                files.append(path)
            elif path.is_symlink() or not path.is_dir():
                others.append(path)
    return sorted(files), sorted(others), sorted(hidden)


def matches(relative: PurePath, glob: str) -> bool:
    """Return whether the pattern matches the name or the path below the folder."""
    return fnmatch(relative.name, glob) or fnmatch(relative.as_posix(), glob)


def describe_passed_over(passed_over: Collection[PassedOver]) -> Iterator[str]:
    """Yield a line for each reason, with the names of its files."""
    by_reason: dict[str, list[str]] = {}
    for reason, name in sorted(passed_over):
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        if len(names) > MOST_NAMES:
            more = f" and {len(names) - MOST_NAMES:,} more"
        else:
            more = ""
        verb = "Read" if reason == HALF_PAIRS else "Skipped"
        yield with_singulars(f"{verb} {len(names):,} {reason}: {', '.join(names[:MOST_NAMES])}{more}.")
