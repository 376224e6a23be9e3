"""Documents from what `--input` names: files, folders, Hugging Face sets, Python's standard library."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from llmscale.data.read_files import TEXT_SUFFIXES, UndecodableError, kind_of, read_documents
from llmscale.errors import DataError, did_you_mean

STDLIB = "python-stdlib"
HF_PREFIX = "hf:"
#: Parts of the standard library's folder that are not its own text.
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}


class Source(ABC):
    """Documents in a fixed order."""

    name: str
    """What the user wrote."""
    total_bytes: int | None = None
    """Bytes that will be read, compressed as they are; None when unknown."""
    skipped: int = 0
    """Documents that the last pass left out because they could not be decoded."""

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """The text of every document, in order. Raises DataError for what cannot be read."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A cheap identity of the contents: equal when nothing has changed."""


class FileSource(Source):
    """Text, JSONL and Parquet files, sorted by path."""

    def __init__(self, name: str, root: Path, files: list[Path], text_field: str, *, skip_undecodable: bool) -> None:
        self.name = name
        self.files = files
        self._root = root
        self._text_field = text_field
        self._skip_undecodable = skip_undecodable
        self.total_bytes = sum(path.stat().st_size for path in files)

    def documents(self) -> Iterator[str]:
        self.skipped = 0
        for path in self.files:
            try:
                yield from read_documents(path, self._text_field)
            except UndecodableError as error:
                if not self._skip_undecodable:
                    raise DataError(
                        f"{error} Convert it to UTF-8, or skip such files with --skip-undecodable."
                    ) from None
                self.skipped += 1

    def fingerprint(self) -> str:
        """Of every file's path below the root, size and time of modification."""
        digest = hashlib.sha256(f"{self._text_field} {self._skip_undecodable}\n".encode())
        for path in self.files:
            status = path.stat()
            name = path.relative_to(self._root).as_posix()
            digest.update(json.dumps([name, status.st_size, status.st_mtime_ns]).encode())
        return digest.hexdigest()


class HuggingFaceSource(Source):
    """One split of a data set on the Hugging Face hub, or of a local folder, streamed."""

    def __init__(self, name: str, split: str, text_field: str) -> None:
        self.name = name
        self._split = split
        self._text_field = text_field

    def documents(self) -> Iterator[str]:
        dataset, _, config = self.name.removeprefix(HF_PREFIX).partition(":")
        try:
            from datasets import load_dataset

            records = load_dataset(dataset, config or None, split=self._split, streaming=True)
            for number, record in enumerate(records):
                text = record.get(self._text_field)
                if not isinstance(text, str):
                    fields = ", ".join(sorted(record))
                    raise DataError(
                        f"{self.name}, record {number}: no text in the field '{self._text_field}'. "
                        f"Its fields: {fields}; name one with --text-field."
                    )
                yield text
        except DataError:
            raise
        except ImportError:
            raise DataError("hf: needs the `datasets` library: pip install 'llmscale[data]'.") from None
        except Exception as error:  # the hub client raises many kinds: network, missing names, scripts, ...
            summary = str(error).strip().splitlines() or [type(error).__name__]
            raise DataError(f"Cannot read {self.name}, split {self._split}: {summary[0]}") from error

    def fingerprint(self) -> str:
        """Of the names alone: whether the hub's copy has changed is not asked."""
        return hashlib.sha256(json.dumps([self.name, self._split, self._text_field]).encode()).hexdigest()


def open_source(
    spec: str,
    *,
    text_field: str = "text",
    hf_split: str = "train",
    glob: str | None = None,
    skip_undecodable: bool = False,
) -> Source:
    """The source that `--input` names: `hf:NAME[:CONFIG]`, `python-stdlib`, a file or a folder (recursive).

    `glob` chooses among a folder's files by name or relative path; without it, those with a known suffix are
    taken. Raises DataError when there is nothing to read.
    """
    if spec.startswith(HF_PREFIX):
        return HuggingFaceSource(spec, hf_split, text_field)
    if spec == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in _walk(root) if not _STDLIB_EXCLUDED.intersection(path.relative_to(root).parts)]
        known = [path for path in files if path.suffix in TEXT_SUFFIXES]
        return FileSource(spec, root, known, text_field, skip_undecodable=True)
    path = Path(spec)
    if path.is_file():
        return FileSource(spec, path.parent, [path], text_field, skip_undecodable=skip_undecodable)
    if not path.is_dir():
        raise DataError(
            f"--input {spec} does not exist.{did_you_mean(spec, [STDLIB])} "
            f"Legal: a file, a folder, hf:NAME[:CONFIG] or {STDLIB}."
        )
    files = [file for file in _walk(path) if _is_wanted(file.relative_to(path), glob)]
    if not files:
        wanted = (
            f"match --glob '{glob}'"
            if glob
            else "have a known suffix (.txt, .md, .jsonl, .parquet, .py, ...; .gz, .zst)"
        )
        raise DataError(f"--input {spec}: none of its files {wanted}.")
    return FileSource(spec, path, files, text_field, skip_undecodable=skip_undecodable)


def _walk(root: Path) -> list[Path]:
    """All files below, hidden ones left out, in the order of their paths."""
    return sorted(
        path
        for path in root.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(root).parts) and path.is_file()
    )


def _is_wanted(relative: Path, glob: str | None) -> bool:
    if glob is not None:
        return fnmatch(relative.name, glob) or fnmatch(relative.as_posix(), glob)
    return kind_of(relative) is not None
