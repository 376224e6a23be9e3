"""The interface of all inputs: documents, each with the place from which reading resumes; and local files."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import BinaryIO

from llmscale.data.shards.compressed import most_unpacked_bytes, unfolds
from llmscale.data.tokenizers.tokenizer import TokenArray
from llmscale.errors import DataError
from llmscale.untrusted.paths import open_regular

#: Place from which reading resumes: numbers that only their source interprets. () is the beginning.
Place = tuple[int, ...]
#: Longest record; a longer one is rejected.
MAX_DOCUMENT_BYTES = 64 << 20
#: Added to the bytes of each record, because a file can repeat empty records without end.
_RECORD_BYTES = 64
#: Most field names that an error lists.
_MOST_FIELDS = 20


@dataclass(slots=True)  # frozen ones take three times as long to make
class Document:
    """A text, or its tokens without end-of-text and begin-of-text."""

    content: str | TokenArray
    place: Place
    """Place after this document."""


@dataclass(slots=True)
class Rejected:
    """A record that is not a document."""

    where: str
    """File and line, or another name of the record."""
    reason: str
    """A sentence without its full stop."""
    contents: bytes
    """Content of the record, or its beginning."""
    place: Place
    """Place after this record."""

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


@dataclass(frozen=True)
class ReadOptions:
    """Options for turning records into documents."""

    text_field: str = "text"
    """Field that holds the text, in JSON lines, Parquet, MDS and Hugging Face datasets."""
    skip_undecodable: bool = False
    """Skip and count text files that are not UTF-8."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """Counts of files that are not read, by suffix."""
    is_plain: bool = False
    """True if every file is text whatever its contents."""
    has_plain: bool = False
    """True if some names are those of plain text; then a lone JSON object without the field is text, too."""


class UndecodableError(DataError):
    """A text file is not in its expected encoding."""


class Source(ABC):
    """Documents in a fixed order."""

    name: str
    """Name as the user wrote it."""
    total_bytes: int | None = None
    """Bytes to read, as stored (compressed); None when unknown."""
    read_bytes: int = 0
    """Bytes that the latest pass has read so far."""
    left_out: str | None = None
    """One line on what `--input` names but is not read, or None."""
    passed_over: Counter[str]
    """Counts of files in folders that are not read, by suffix."""
    num_cut: int = 0
    """Texts that were cut into several documents because they are too long."""
    skipped: int = 0
    """Documents skipped because they could not be decoded."""

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


def missing_field(where: str, text_field: str, fields: list[str], word: str = "field") -> DataError:
    """Return the error for a file whose first record lacks the text field."""
    return DataError(
        f"{where}: {lacks_field(text_field, fields, word)}; name one with --text-field, or leave the file out."
    )


def lacks_field(text_field: str, fields: list[str], word: str = "field") -> str:
    """Return a sentence that a record lacks the text field, with the fields it has (the first of many)."""
    ordered = sorted(fields)
    more = len(ordered) - _MOST_FIELDS
    listed = ", ".join(name[:80] for name in ordered[:_MOST_FIELDS]) + (f" and {more} more" if more > 0 else "")
    return f"no {word} '{text_field}'. Its {word}s: {listed}"


_BUFFER_BYTES = 1 << 20


class InputFile(ABC):
    """A file that can be opened repeatedly."""

    name: str
    """Name for messages; its suffix tells the format."""
    relative: str
    """Path below the folder that the user named."""
    size_bytes: int
    version: int | str
    """Version of the contents: changes with them."""

    @abstractmethod
    def open(self) -> BinaryIO:
        """Open the file for reading. Raises OSError, RefusedFile, DataError."""


class LocalFile(InputFile):
    """A regular file on this machine."""

    def __init__(self, path: Path, root: Path, *, follow_links: bool = True) -> None:
        status = path.stat(follow_symlinks=follow_links)
        self._path, self._follow_links = path, follow_links
        self.name, self.relative = str(path), path.relative_to(root).as_posix()
        self.size_bytes, self.version = status.st_size, status.st_mtime_ns

    def open(self) -> BinaryIO:
        # Lines are longer than Python's default buffer of 8 KiB.
        return io.BufferedReader(open_regular(self._path, follow_links=self._follow_links).detach(), _BUFFER_BYTES)


@contextmanager
def opened(file: InputFile) -> Iterator[BinaryIO]:
    """Open a file as it is stored. Raises DataError."""
    try:
        raw = file.open()
    except OSError as error:
        raise DataError(f"Cannot read {file.name}: {error.strerror or error}.") from None
    with raw:
        yield raw


def walk(root: Path, skipped: Collection[str] = ()) -> tuple[list[Path], list[Path]]:
    """Return all regular files below `root` in path order, and all else that is not a folder of this tree: links that
    lead out of it or to a folder, FIFOs, sockets, devices. Hidden names and folders named in `skipped` are in neither
    list."""
    files, others = [], []
    inside = os.path.realpath(root)
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped]
        for name in [*names, *subfolders]:
            path = Path(folder, name)
            if name.startswith("."):
                continue
            if path.is_symlink() and (path.is_dir() or not Path(os.path.realpath(path)).is_relative_to(inside)):
                others.append(path)
            elif path.is_file():
                files.append(path)
            elif not path.is_dir():
                others.append(path)
    return sorted(files), sorted(others)


def matches(relative: PurePath, glob: str) -> bool:
    """Return whether the pattern matches the name or the path below the folder."""
    return fnmatch(relative.name, glob) or fnmatch(relative.as_posix(), glob)


def describe_left_out(root: Path, paths: list[Path]) -> str | None:
    """Return a line on the paths that `walk` found besides files, or None."""
    if not paths:
        return None
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return (
        f"Skipped {paths[0].relative_to(root)}{more}: not a regular file of this folder (a link out of it or to a "
        "folder, a pipe, a device). Copy it with `cp -rL` to include it."
    )
