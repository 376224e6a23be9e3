"""Sources of files: several files in order, standard input, and several sources as one."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import BinaryIO

from llmscale.data.prepare.sources.formats import (
    FILE_FORMATS,
    TAR,
    TEXT,
    OpenedContents,
    choose,
    choose_members,
    format_of,
    is_beside_records,
    is_plain_name,
    opened_contents,
    reason_of,
    refuse_foreign_names,
)
from llmscale.data.prepare.sources.source import (
    BESIDE_RECORDS,
    BESIDE_TEXT,
    UNDECODABLE,
    FileError,
    InputFile,
    PassedOver,
    Place,
    ReadOptions,
    Record,
    Source,
    TokenRules,
    UndecodableError,
    describe_passed_over,
    join_errors,
    matches,
    opened,
    pass_over,
    suffix_of,
    within_budget,
    without_undecodable,
)
from llmscale.errors import DataError

#: Most files that are opened to find out whether records have fields.
_MOST_LOOKED_AT = 1000
#: Most files, and most bytes of them, that are read to find out which cannot be read.
_MOST_CHECKED = 10_000
_MOST_CHECKED_BYTES = 1 << 30
#: Files that `datasets` writes beside those of save_to_disk: the list of splits, and that of a split's files.
SPLITS_NAME = "dataset_dict.json"
STATE_NAME = "state.json"
STDIN = "-"
_CHUNK_BYTES = 1 << 20


class FileSource(Source):
    """Files in the order given; one of an unknown format is text. Places are (file, records read of it), and reading
    resumes at the beginning of that file."""

    def __init__(self, name: str, files: Sequence[InputFile], options: ReadOptions, *, is_part: bool = False) -> None:
        """`is_part`: whether these are some of a source's files, which may have no text."""
        self.name = name
        self.files = files
        self.passed_over: set[PassedOver] = set()
        if not options.is_plain:
            refuse_foreign_names(file.name for file in files)
        # Beside records a lone object is skipped too.
        has_plain = options.has_plain or (options.choice is not None and options.choice.are_records)
        has_plain = has_plain or any(is_plain_name(PurePath(file.name)) for file in files)
        self._is_part = is_part
        self._options = replace(options, passed_over=self.passed_over, has_plain=has_plain)
        self.total_bytes = sum(file.size_bytes for file in files)

    def records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        first, done = start or (0, 0)
        self.read_bytes = sum(file.size_bytes for file in self.files[:first])
        is_empty = not start and not self._is_part
        for number in range(first, len(self.files)):
            file = self.files[number]
            done_bytes = self.read_bytes
            try:
                for record in without_undecodable(self, self._read(number, done, rules), self._options):
                    is_empty = False
                    yield record
            except FileError as error:
                if not (isinstance(error, UndecodableError) and self._options.skip_undecodable):
                    raise join_errors([error, *self._errors_from(number + 1)]) from None
                self.skipped += 1
                pass_over(self.passed_over, UNDECODABLE, PurePath(file.relative))
            self.read_bytes = done_bytes + file.size_bytes
            done = 0
        if is_empty and self.passed_over:
            raise DataError(f"--input {self.name} has no text. {' '.join(describe_passed_over(self.passed_over))}")

    def _read(self, number: int, done: int, rules: TokenRules | None) -> Iterator[Record]:
        """Yield the records of a file after the first `done`."""
        file = self.files[number]
        begin_bytes = self.read_bytes
        with opened(file) as raw, self._opened_contents(file, raw) as (kind, contents):
            options = self._options
            if kind is TAR:
                with opened(file) as again, self._opened_contents(file, again) as (_, archive):
                    options = replace(options, choice=choose_members(archive, file.name, options))
            if is_beside_records(kind, options):
                pass_over(self.passed_over, BESIDE_RECORDS, PurePath(file.relative))
                return
            records = within_budget(kind.read(contents, file.name, options, rules), file.name, file.size_bytes)
            for count, record in enumerate(records, start=1):
                if count <= done:
                    continue
                self.read_bytes = begin_bytes + (raw.tell() if not raw.closed else 0)
                # Counted once per file, wherever reading began.
                self.num_cut += not kind.makes_many and count == 2
                record.place = (number, count)
                yield record

    def check(self) -> None:
        """Read texts, and the first record of other files: up to _MOST_CHECKED_BYTES, and none from a store."""
        if errors := list(self._errors_from(0)):
            raise join_errors(errors)

    def _errors_from(self, first: int) -> Iterator[FileError]:
        """Yield the errors of files, so that a user sees all of them at once."""
        left_bytes = _MOST_CHECKED_BYTES
        for file in self.files[first : first + _MOST_CHECKED]:
            left_bytes -= file.size_bytes
            if left_bytes < 0:
                return
            if not file.is_remote and (error := self._error_of(file)):
                yield error

    def _error_of(self, file: InputFile) -> FileError | None:
        try:
            with opened(file) as raw, self._opened_contents(file, raw) as (kind, contents):
                # Which members of an archive are read is chosen later.
                if kind is not TAR and not is_beside_records(kind, self._options):
                    for _ in kind.read(contents, file.name, self._options, None):
                        if kind is not TEXT:
                            break
        except FileError as error:
            if isinstance(error, UndecodableError) and self._options.skip_undecodable:
                return None
            return error
        except DataError:  # reported when it is read
            pass
        return None

    def has_fields(self) -> bool:
        """Open the files, as text may be JSON; return True when there are more than _MOST_LOOKED_AT."""
        if self._options.is_plain:
            return False
        return any(map(self._holds_fields, self.files[:_MOST_LOOKED_AT])) or len(self.files) > _MOST_LOOKED_AT

    def _holds_fields(self, file: InputFile) -> bool:
        with suppress(FileError), opened(file) as raw, self._opened_contents(file, raw) as (kind, _):
            return kind.has_fields
        return False

    def _opened_contents(self, file: InputFile, raw: BinaryIO) -> OpenedContents:
        return opened_contents(raw, file.name, file.size_bytes, self._options, FILE_FORMATS)

    def parts(self) -> list[Source]:
        """Return one source per file."""
        return [FileSource(self.name, [file], self._options, is_part=True) for file in self.files]

    def fingerprint(self) -> str:
        """Hash every file's path below the root, size and version."""
        options = self._options
        digest = hashlib.sha256(f"{options.text_field} {options.skip_undecodable}\n".encode())
        for file in self.files:
            digest.update(json.dumps([file.relative, file.size_bytes, file.version]).encode())
        return digest.hexdigest()


def open_files(
    spec: str, files: Sequence[InputFile], options: ReadOptions, glob: str | None, passed_over: set[PassedOver]
) -> FileSource:
    """Return the source of a folder's files: those that match `glob`, else its records, else its text.

    `passed_over` are other names in the folder; names that are not read are added. Raises DataError when none of the
    files is read.
    """
    if glob is not None:
        files = [file for file in files if matches(PurePath(file.relative), glob)]
    else:
        files, options = _choose(_of_split(files, options, spec, passed_over), options, passed_over)
    if not files:
        if glob:
            wanted = f"match --glob '{glob}'"
        else:
            wanted = "have a known suffix (.txt, .jsonl, .parquet, .csv, ...; .gz, .zst)"
        notes = " ".join(describe_passed_over(passed_over))
        raise DataError(f"--input {spec}: none of its files {wanted}. {notes}".rstrip())
    source = FileSource(spec, files, options)
    source.passed_over |= passed_over
    return source


def _choose(
    files: Sequence[InputFile], options: ReadOptions, passed_over: set[PassedOver]
) -> tuple[list[InputFile], ReadOptions]:
    """Return the files of a folder that are read, and options with that choice; add the others to `passed_over`."""
    known = []
    chosen = []
    for file in files:
        kind = format_of(PurePath(file.relative))
        if kind is not None and kind.in_folders:
            known.append(file)
        else:
            pass_over(passed_over, reason_of(PurePath(file.relative)), PurePath(file.relative))
    choice = choose(((PurePath(file.relative), opened(file), file.size_bytes) for file in known), options)
    for file in known:
        if suffix_of(PurePath(file.relative)) in choice.suffixes:
            chosen.append(file)
        else:
            reason = BESIDE_RECORDS if choice.are_records else BESIDE_TEXT
            pass_over(passed_over, reason, PurePath(file.relative))
    return chosen, replace(options, choice=choice)


def _of_split(
    files: Sequence[InputFile], options: ReadOptions, spec: str, passed_over: set[PassedOver]
) -> list[InputFile]:
    """Return the files without those of other splits in the folders of save_to_disk, and without `datasets`' caches."""
    names = [PurePath(file.relative) for file in files]
    saved = {name.parent for name in names if name.name == SPLITS_NAME}
    splits = {name.parent for name in names if name.name == STATE_NAME and name.parent.parent in saved}
    for folder in saved:
        names_of_splits = sorted(split.name for split in splits if split.parent == folder)
        if options.hf_split not in names_of_splits:
            raise DataError(
                f"--input {spec}: the dataset that save_to_disk wrote has no split '{options.hf_split}'. Its splits: "
                f"{', '.join(names_of_splits)}; name one with --hf-split."
            )
    wanted = []
    for file, name in zip(files, names, strict=True):
        if any(split in name.parents and split.name != options.hf_split for split in splits):
            pass_over(passed_over, f"files of other splits than {options.hf_split} (--hf-split names one)", name)
        elif name.match("cache-*.arrow") and name.parent / STATE_NAME in names:
            pass_over(passed_over, "files (caches of `datasets`)", name)
        else:
            wanted.append(file)
    return wanted


class ConcatSource(Source):
    """Several inputs, one after the other. Places are (input, ...)."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.name = ", ".join(source.name for source in sources)
        sizes = [source.total_bytes for source in sources]
        if None in sizes:
            self.total_bytes = None
        else:
            self.total_bytes = sum(size or 0 for size in sizes)

    @property
    def passed_over(self) -> set[PassedOver]:  # type: ignore[override]  # known at the end
        return set().union(*(source.passed_over for source in self._sources))

    def records(self, start: Place, rules: TokenRules | None) -> Iterator[Record]:
        first, inner = (start[0], start[1:]) if start else (0, ())
        before = sum(source.total_bytes or 0 for source in self._sources[:first])
        for number, source in enumerate(self._sources[first:], start=first):
            source.skipped = source.num_cut = 0
            skipped = self.skipped
            num_cut = self.num_cut
            for record in source.records(inner, rules):
                self.read_bytes = before + source.read_bytes
                self.skipped = skipped + source.skipped
                self.num_cut = num_cut + source.num_cut
                record.place = (number, *record.place)
                yield record
            self.skipped = skipped + source.skipped
            self.num_cut = num_cut + source.num_cut
            before = before + source.read_bytes
            inner = ()

    def check(self) -> None:
        for source in self._sources:
            source.check()

    def has_fields(self) -> bool:
        return any(source.has_fields() for source in self._sources)

    def parts(self) -> list[Source]:
        """Return the parts of every input, in order."""
        return [part for source in self._sources for part in source.parts()]

    def fingerprint(self) -> str:
        """Hash every input's fingerprint, in order."""
        return hashlib.sha256(" ".join(source.fingerprint() for source in self._sources).encode()).hexdigest()


class StandardInput(InputFile):
    """Standard input, copied to an unnamed file in TMPDIR so that it can be read again; its version is the sha256."""

    def __init__(self) -> None:
        """Read stdin to its end. Raises DataError: a terminal, empty, disk full."""
        if sys.stdin is None or sys.stdin.isatty():
            raise DataError("--input - reads standard input, which is a terminal. Pipe the text in.")
        digest = hashlib.sha256()
        self.size_bytes = 0
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
        self.name = "stdin"
        self.relative = STDIN
        self.version = digest.hexdigest()

    def open(self) -> BinaryIO:
        descriptor = os.dup(self._file.fileno())
        os.lseek(descriptor, 0, os.SEEK_SET)
        return open(descriptor, "rb", _CHUNK_BYTES)
