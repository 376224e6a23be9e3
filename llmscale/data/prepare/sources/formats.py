"""The kinds of files that can be read. A new kind is a reader in a file of its own, and a line here."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import BinaryIO

from llmscale.data.prepare.sources.jsonl import is_jsonl, read_jsonl
from llmscale.data.prepare.sources.parquet import read_parquet
from llmscale.data.prepare.sources.source import Place, ReadOptions, Record, TokenRules, UndecodableError
from llmscale.data.prepare.sources.text_files import read_text
from llmscale.data.prepare.sources.token_files import read_tokens
from llmscale.data.shards.compressed import COMPRESSED_SUFFIXES, head_of, unpacked

#: Reads an open file, which may be one that cannot seek, from a place on: (file, its name, options, rules, start).
Reader = Callable[[BinaryIO, str, ReadOptions, TokenRules | None, Place], Iterator[Record]]


@dataclass(frozen=True)
class Format:
    """A kind of file."""

    read: Reader
    suffixes: frozenset[str]
    """Behind which a compression's may stand."""
    makes_many: bool = True
    """Whether several documents of one file are its records; else they are one text that was too long."""
    in_folders: bool = True
    """Whether a folder's files of this kind are read without being named or matched."""
    has_fields: bool = True
    """Whether its records have fields, of which one is the text."""
    magic: tuple[int, bytes] = (0, b"\0no file")
    """Offset and bytes by which it is known, whatever its name."""


#: One document a file.
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
# Weights of a model have that suffix too.
_TOKENS = Format(read_tokens, frozenset({".bin"}), in_folders=False, has_fields=False)
FORMATS = (TEXT, _JSONL, Format(read_parquet, frozenset({".parquet"}), magic=(0, b"PAR1\x15")), _TOKENS)


def suffix_of(path: PurePath) -> str:
    """Return the suffix that says what a file holds, in lower case: without those of a compression and of a number
    (`x.jsonl.1.gz`)."""
    while (suffix := path.suffix.lower()) in COMPRESSED_SUFFIXES or suffix[1:].isdecimal():
        if suffix.startswith(".t"):  # .tgz and its like
            return ".tar"
        path = PurePath(path.stem)
    return suffix


def format_of(path: PurePath, known: Sequence[Format] = FORMATS) -> Format | None:
    """By suffix; None when unknown."""
    suffix = suffix_of(path)
    return next((kind for kind in known if suffix in kind.suffixes), None)


def is_plain_name(path: PurePath) -> bool:
    """Return whether a name is that of plain text, or of an archive, which may hold some."""
    return suffix_of(path) in (TEXT.suffixes | {".tar"}) - {".json"}


OpenedContents = AbstractContextManager[tuple[Format, BinaryIO]]


@contextmanager
def opened_contents(
    raw: BinaryIO, name: str, size_bytes: int, options: ReadOptions, known: Sequence[Format] = FORMATS
) -> Iterator[tuple[Format, BinaryIO]]:
    """Yield the kind of an open file of `size_bytes`, by its contents and then by its name, and its contents,
    uncompressed. Raises DataError, also for what is read within the block."""
    with unpacked(raw, name, size_bytes) as contents:
        yield _kind_of(head_of(contents), name, options, known), contents


def _kind_of(head: bytes, name: str, options: ReadOptions, known: Sequence[Format]) -> Format:
    """Raises UndecodableError for text that is UTF-16."""
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
        raise UndecodableError(f"{name} holds zero bytes or UTF-16, and no UTF-8 text.")
    return _JSONL if is_jsonl(head, name, options) else named
