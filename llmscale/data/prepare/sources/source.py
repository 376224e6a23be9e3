"""What every kind of input gives: documents, each with the place at which reading goes on behind it."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import BinaryIO

from llmscale.data.shards.compressed import most_unpacked_bytes, unfolds
from llmscale.data.tokenizers.tokenizer import TokenArray
from llmscale.errors import DataError
from llmscale.untrusted.paths import open_regular

#: Where reading goes on: a source's own numbers, which only it can read. () is the beginning.
Place = tuple[int, ...]
#: A longer record, which cannot be read in parts, is set aside.
MAX_DOCUMENT_BYTES = 64 << 20
#: Added to the bytes of a record, of which a file may repeat an empty one without end.
_RECORD_BYTES = 64
#: Names of fields that an error lists.
_MOST_FIELDS = 20


@dataclass(slots=True)  # frozen ones take three times as long to make
class Document:
    """A text, or the tokens of one without what stands around it."""

    content: str | TokenArray
    place: Place
    """Behind this document."""


@dataclass(slots=True)
class Rejected:
    """A record that is no document."""

    where: str
    """File and line, or whatever names it."""
    reason: str
    """A sentence without its end."""
    contents: bytes
    """What stands there, or its beginning."""
    place: Place
    """Behind this record."""

    def describe(self) -> str:
        return f"{self.where}: {self.reason}."


Record = Document | Rejected


@dataclass(frozen=True)
class TokenRules:
    """What the tokens of an input that was tokenised elsewhere must be."""

    vocab_size: int
    eot_token: int
    """Ends a document."""
    bos_tokens: tuple[int, ...]
    """Stand before a document, perhaps."""


@dataclass(frozen=True)
class ReadOptions:
    """How records become documents."""

    text_field: str = "text"
    """Field of JSONL, Parquet, MDS and Hugging Face sets that holds the text."""
    skip_undecodable: bool = False
    """Leave out text files that are not UTF-8 and count them."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """Where files that are not read are counted by suffix."""
    is_plain: bool = False
    """Whether every file is text, whatever it holds."""
    has_plain: bool = False
    """Whether some names are those of plain text: among these, a JSON object without the field is text."""


class UndecodableError(DataError):
    """A text file is not in the encoding that it should be in."""


class Source(ABC):
    """Documents in a fixed order."""

    name: str
    """What the user wrote."""
    total_bytes: int | None = None
    """Bytes that will be read, compressed as they are; None when unknown."""
    read_bytes: int = 0
    """Of them, how many the last pass has read so far."""
    left_out: str | None = None
    """What `--input` names and is not read, in one line; None when everything is."""
    passed_over: Counter[str]
    """Files of folders that are not read, by suffix."""
    num_cut: int = 0
    """Texts of which several documents were made, because they are too long for one."""
    skipped: int = 0
    """Documents that were left out because they could not be decoded."""

    @abstractmethod
    def records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        """Every document in order from a place on, and what is none. `rules` are for tokens; without them only text is
        taken. Raises DataError for what cannot be read."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A cheap identity of the contents: equal when nothing has changed."""

    def has_fields(self) -> bool:
        """Return whether a record may have fields, of which one is the text. Raises DataError."""
        return True

    def parts(self) -> list[Source]:
        """Sources that have these documents one after the other: as many as can be read apart from each other."""
        return [self]

    def documents(self) -> Iterator[str]:
        """The text of every document, in order. Raises DataError for what is none."""
        self.skipped = self.num_cut = 0
        for record in self.records((), None):
            if isinstance(record, Rejected):
                raise DataError(record.describe())
            assert isinstance(record.content, str)
            yield record.content


def within_budget(records: Iterable[Record], name: str, size_bytes: int) -> Iterator[Record]:
    """Yield records until they hold more than a file of `size_bytes` may unfold to, whatever unfolds it.

    An empty record counts too: it takes time. Raises DataError.
    """
    left_bytes = most_unpacked_bytes(size_bytes)
    for record in records:
        left_bytes -= _RECORD_BYTES + len(record.content if isinstance(record, Document) else record.contents)
        if left_bytes < 0:
            raise unfolds(name, size_bytes)
        yield record


def missing_field(where: str, text_field: str, fields: list[str], word: str = "field") -> DataError:
    """What to say of a file whose first record has no such field."""
    return DataError(
        f"{where}: {lacks_field(text_field, fields, word)}; name one with --text-field, or leave the file out."
    )


def lacks_field(text_field: str, fields: list[str], word: str = "field") -> str:
    """Names of the fields seen, the first few of many."""
    ordered = sorted(fields)
    more = len(ordered) - _MOST_FIELDS
    listed = ", ".join(name[:80] for name in ordered[:_MOST_FIELDS]) + (f" and {more} more" if more > 0 else "")
    return f"no {word} '{text_field}'. Its {word}s: {listed}"


_BUFFER_BYTES = 1 << 20


class InputFile(ABC):
    """A file that can be opened as often as needed."""

    name: str
    """For messages; its suffix says what it is."""
    relative: str
    """Below the folder that was named."""
    size_bytes: int
    stamp: int | str
    """Changes with the contents."""

    @abstractmethod
    def open(self) -> BinaryIO:
        """Raises OSError, RefusedFile, DataError."""


class LocalFile(InputFile):
    """A regular file."""

    def __init__(self, path: Path, root: Path, *, follow_links: bool = True) -> None:
        status = path.stat(follow_symlinks=follow_links)
        self._path, self._follow_links = path, follow_links
        self.name, self.relative = str(path), path.relative_to(root).as_posix()
        self.size_bytes, self.stamp = status.st_size, status.st_mtime_ns

    def open(self) -> BinaryIO:
        # Lines are longer than the 8 KiB that Python reads at once.
        return io.BufferedReader(open_regular(self._path, follow_links=self._follow_links).detach(), _BUFFER_BYTES)


@contextmanager
def opened(file: InputFile) -> Iterator[BinaryIO]:
    """The file as it is stored. Raises DataError."""
    try:
        raw = file.open()
    except OSError as error:
        raise DataError(f"Cannot read {file.name}: {error.strerror or error}.") from None
    with raw:
        yield raw


def walk(root: Path) -> tuple[list[Path], list[Path]]:
    """All regular files below, in the order of their paths, and what is neither a file nor a folder of this tree: links
    that lead out of it or to a folder, FIFOs, sockets, devices. Hidden ones count for neither."""
    files, others = [], []
    inside = os.path.realpath(root)
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
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
    """By name, or by path below the folder."""
    return fnmatch(relative.name, glob) or fnmatch(relative.as_posix(), glob)


def describe_left_out(root: Path, paths: list[Path]) -> str | None:
    """What to say of what `walk` found besides files."""
    if not paths:
        return None
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return (
        f"Left out: {paths[0].relative_to(root)}{more}, no regular file of this folder (a link out of it or to a "
        "folder, a pipe, a device). Copy with `cp -rL` what should be read."
    )
