"""Sources of files: several files in order, standard input, and several sources as one."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import BinaryIO

from llmscale.data.prepare.sources.formats import FILE_FORMATS, OpenedContents, is_plain_name, opened_contents
from llmscale.data.prepare.sources.source import (
    InputFile,
    Place,
    ReadOptions,
    Record,
    Source,
    TokenRules,
    UndecodableError,
    opened,
    within_budget,
)
from llmscale.errors import DataError

#: Most files that are opened to find out whether records have fields.
_MOST_LOOKED_AT = 1000


class FileSource(Source):
    """Files in the order given; one of an unknown format is text. Places are (file, ...)."""

    def __init__(self, name: str, files: Sequence[InputFile], options: ReadOptions) -> None:
        self.name = name
        self.files = files
        self.passed_over = Counter()
        has_plain = options.has_plain or any(is_plain_name(PurePath(file.name)) for file in files)
        self._options = replace(options, passed_over=self.passed_over, has_plain=has_plain)
        self.total_bytes = sum(file.size_bytes for file in files)

    def records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        first, inner = (start[0], start[1:]) if start else (0, ())
        self.read_bytes = sum(file.size_bytes for file in self.files[:first])
        for number in range(first, len(self.files)):
            file, done_bytes = self.files[number], self.read_bytes
            try:
                yield from self._read(number, inner, rules)
            except UndecodableError as error:
                if not self._options.skip_undecodable:
                    raise DataError(
                        f"{error} Convert it to UTF-8, or skip such files with --skip-undecodable."
                    ) from None
                self.skipped += 1
            self.read_bytes, inner = done_bytes + file.size_bytes, ()

    def _read(self, number: int, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        file, begin_bytes = self.files[number], self.read_bytes
        with opened(file) as raw, self._opened_contents(file, raw) as (kind, contents):
            records = kind.read(contents, file.name, self._options, rules, start)
            for record in within_budget(records, file.name, file.size_bytes):
                self.read_bytes = begin_bytes + _place_in(raw)
                # Counted once per file, wherever reading began.
                self.num_cut += not kind.makes_many and record.place == (2,)
                record.place = (number, *record.place)
                yield record

    def has_fields(self) -> bool:
        """Open the files, as text may be JSON; return True when there are more than _MOST_LOOKED_AT."""
        if self._options.is_plain:
            return False
        return any(map(self._holds_fields, self.files[:_MOST_LOOKED_AT])) or len(self.files) > _MOST_LOOKED_AT

    def _holds_fields(self, file: InputFile) -> bool:
        with suppress(UndecodableError), opened(file) as raw, self._opened_contents(file, raw) as (kind, _):
            return kind.has_fields
        return False

    def _opened_contents(self, file: InputFile, raw: BinaryIO) -> OpenedContents:
        return opened_contents(raw, file.name, file.size_bytes, self._options, FILE_FORMATS)

    def parts(self) -> list[Source]:
        """Return one source per file."""
        return [FileSource(self.name, [file], self._options) for file in self.files]

    def fingerprint(self) -> str:
        """Hash every file's path below the root, size and version."""
        options = self._options
        digest = hashlib.sha256(f"{options.text_field} {options.skip_undecodable}\n".encode())
        for file in self.files:
            digest.update(json.dumps([file.relative, file.size_bytes, file.version]).encode())
        return digest.hexdigest()


def _place_in(raw: BinaryIO) -> int:
    return raw.tell() if not raw.closed else 0


class ConcatSource(Source):
    """Several inputs, one after the other. Places are (input, ...)."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.name = ", ".join(source.name for source in sources)
        self.left_out = " ".join(source.left_out for source in sources if source.left_out) or None
        sizes = [source.total_bytes for source in sources]
        known = [size for size in sizes if size is not None]
        self.total_bytes = sum(known) if len(known) == len(sizes) else None

    @property
    def passed_over(self) -> Counter[str]:  # type: ignore[override]  # known at the end
        return sum((source.passed_over for source in self._sources), Counter())

    def records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        first, inner = (start[0], start[1:]) if start else (0, ())
        before = sum(source.total_bytes or 0 for source in self._sources[:first])
        for number, source in enumerate(self._sources[first:], start=first):
            source.skipped = source.num_cut = 0
            skipped, num_cut = self.skipped, self.num_cut
            for record in source.records(inner, rules):
                self.read_bytes = before + source.read_bytes
                self.skipped, self.num_cut = skipped + source.skipped, num_cut + source.num_cut
                record.place = (number, *record.place)
                yield record
            self.skipped, self.num_cut = skipped + source.skipped, num_cut + source.num_cut
            before, inner = before + source.read_bytes, ()

    def parts(self) -> list[Source]:
        """Return the parts of every input, in order."""
        return [part for source in self._sources for part in source.parts()]

    def fingerprint(self) -> str:
        """Hash every input's fingerprint, in order."""
        return hashlib.sha256(" ".join(source.fingerprint() for source in self._sources).encode()).hexdigest()


STDIN = "-"
_CHUNK_BYTES = 1 << 20


class StandardInput(InputFile):
    """Standard input, copied to an unnamed file in TMPDIR so that it can be read again; its version is the sha256."""

    def __init__(self) -> None:
        """Read stdin to its end. Raises DataError: a terminal, empty, disk full."""
        if sys.stdin is None or sys.stdin.isatty():
            raise DataError("--input - reads standard input, which is a terminal. Pipe the text in.")
        digest, self.size_bytes = hashlib.sha256(), 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # kept as long as the source
        try:
            while chunk := sys.stdin.buffer.read(_CHUNK_BYTES):
                digest.update(chunk)
                self._file.write(chunk)
                self.size_bytes += len(chunk)
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"--input - cannot be stored in {tempfile.gettempdir()}: {error.strerror}. Set TMPDIR to a larger disk."
            ) from None
        if not self.size_bytes:
            raise DataError("--input - reads standard input, which is empty.")
        self.name, self.relative, self.version = "stdin", STDIN, digest.hexdigest()

    def open(self) -> BinaryIO:
        descriptor = os.dup(self._file.fileno())
        os.lseek(descriptor, 0, os.SEEK_SET)
        return open(descriptor, "rb", _CHUNK_BYTES)
