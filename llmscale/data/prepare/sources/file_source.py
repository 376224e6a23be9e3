"""Files, one after the other."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import BinaryIO

from llmscale.data.prepare.sources.formats import OpenedContents, is_plain_name, opened_contents
from llmscale.data.prepare.sources.input_files import InputFile, opened
from llmscale.data.prepare.sources.source import (
    Place,
    ReadOptions,
    Record,
    Source,
    TokenRules,
    UndecodableError,
    within_budget,
)
from llmscale.data.prepare.sources.tar import FILE_FORMATS
from llmscale.errors import DataError

#: Files that are opened to find out whether their records have fields.
_MOST_LOOKED_AT = 1000


class FileSource(Source):
    """Files of the known kinds in the order given; one of an unknown kind is text. Places are (file, ...)."""

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
                # Once a file, wherever reading began.
                self.num_cut += not kind.makes_many and record.place == (2,)
                record.place = (number, *record.place)
                yield record

    def has_fields(self) -> bool:
        """Look into the files, as text may be JSON; of more than _MOST_LOOKED_AT it is not decided."""
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
