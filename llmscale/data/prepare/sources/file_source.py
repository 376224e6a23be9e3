"""Files, one after the other."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import BinaryIO

from llmscale.data.prepare.sources.formats import TEXT, format_of
from llmscale.data.prepare.sources.input_files import InputFile, opened
from llmscale.data.prepare.sources.source import (
    Place,
    ReadOptions,
    Record,
    Source,
    TokenRules,
)
from llmscale.data.prepare.sources.tar import FILE_FORMATS
from llmscale.data.prepare.sources.text_files import UndecodableError
from llmscale.data.shards.compressed import unpacked
from llmscale.errors import DataError


class FileSource(Source):
    """Files of the known kinds in the order given; one of an unknown suffix is text. Places are (file, ...)."""

    def __init__(self, name: str, files: Sequence[InputFile], options: ReadOptions) -> None:
        self.name = name
        self.files = files
        self.passed_over = Counter()
        self._options = replace(options, passed_over=self.passed_over)
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
        kind = format_of(PurePath(file.name), FILE_FORMATS) or TEXT
        with opened(file) as raw, unpacked(raw, file.name, file.size_bytes) as contents:
            for record in kind.read(contents, file.name, self._options, rules, start):
                self.read_bytes = begin_bytes + _place_in(raw)
                # Once a file, wherever reading began.
                self.num_cut += not kind.makes_many and record.place == (2,)
                record.place = (number, *record.place)
                yield record

    def parts(self) -> list[Source]:
        """One for each file."""
        return [FileSource(self.name, [file], self._options) for file in self.files]

    def fingerprint(self) -> str:
        """Of every file's path below the root, size and time of modification."""
        options = self._options
        digest = hashlib.sha256(f"{options.text_field} {options.skip_undecodable}\n".encode())
        for file in self.files:
            digest.update(json.dumps([file.relative, file.size_bytes, file.stamp]).encode())
        return digest.hexdigest()


def _place_in(raw: BinaryIO) -> int:
    return raw.tell() if not raw.closed else 0
