"""The kinds of files that can be read. A new kind is a reader in a file of its own, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import BinaryIO

from llmscale.data.prepare.sources.jsonl import read_jsonl
from llmscale.data.prepare.sources.parquet import read_parquet
from llmscale.data.prepare.sources.source import Place, ReadOptions, Record, TokenRules
from llmscale.data.prepare.sources.text_files import read_text
from llmscale.data.prepare.sources.token_files import read_tokens
from llmscale.data.shards.compressed import COMPRESSED_SUFFIXES

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
)
FORMATS = (
    TEXT,
    Format(read_jsonl, frozenset({".jsonl", ".ndjson"})),
    Format(read_parquet, frozenset({".parquet"})),
    # Weights of a model have that suffix too.
    Format(read_tokens, frozenset({".bin"}), in_folders=False),
)


def format_of(path: PurePath, known: Iterable[Format] = FORMATS) -> Format | None:
    """By suffix, behind a compression's suffix; None when unknown."""
    if path.suffix == ".tgz":
        path = path.with_suffix(".tar.gz")
    suffix = PurePath(path.stem).suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix
    return next((kind for kind in known if suffix in kind.suffixes), None)
