"""Archives of text: every file in a `.tar` as if it lay in a folder, read in its order and never unpacked."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, BinaryIO, NoReturn, cast

from llmscale.data.prepare.sources.formats import FORMATS, Format, format_of, opened_contents
from llmscale.data.prepare.sources.source import Place, ReadOptions, Record, Rejected, TokenRules, UndecodableError
from llmscale.errors import DataError

_BUFFER_BYTES = 1 << 20
#: Of a name or a list of attributes before a file, which tarfile reads whole.
_MOST_HEADER_BYTES = 1 << 20
_HEADER_TYPES = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


class _Member(tarfile.TarInfo):
    """Refuses headers that would fill the memory, and those that tarfile takes for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise
            raise tarfile.ReadError(str(error)) from None

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADER_TYPES and self.size > _MOST_HEADER_BYTES:
            raise tarfile.HeaderError(f"a header of {self.size:,} bytes")
        return cast(tarfile.TarInfo, super()._proc_member(archive))  # type: ignore[misc]

    def _refuse_sparse(self, *_: object) -> NoReturn:
        raise tarfile.ReadError("a sparse file, which is not read: pack it without --sparse")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


class _Ending:
    """A file that cannot be read beyond its end again and again, as tarfile does to skip any stated size."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_ends = 0

    def read(self, size: int) -> bytes:
        """Raises ReadError."""
        self._num_ends += not (contents := self._file.read(size))
        if self._num_ends > 2:
            raise tarfile.ReadError("unexpected end of data")
        return contents


class _Forward(io.RawIOBase):
    """A member of an archive that cannot go back."""

    def __init__(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        contents = archive.extractfile(member)
        assert contents is not None
        self._contents = contents

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        contents = self._contents.read(len(buffer))
        buffer[: len(contents)] = contents
        return len(contents)


def _is_hidden(path: PurePosixPath) -> bool:
    return any(part.startswith(".") and part not in (".", "..") for part in path.parts)


def read_tar(
    file: BinaryIO, name: str, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """Places are (member, ...). Members that are no files (links, devices), hidden or of no known kind are passed over
    and counted. Raises DataError."""
    first, inner = (start[0], start[1:]) if start else (0, ())
    try:
        with tarfile.open(fileobj=cast(IO[bytes], _Ending(file)), mode="r|", tarinfo=_Member) as archive:
            for number, member in enumerate(archive):
                # A long archive would otherwise keep a note of each.
                archive.members = []  # type: ignore[attr-defined]
                if number < first:
                    continue
                path = PurePosixPath(member.name)
                kind = format_of(path)
                if not member.isreg() or kind is None or _is_hidden(path):
                    if not member.isdir():
                        options.passed_over[(path.suffix or path.name)[:80]] += 1
                    continue
                contents = cast(BinaryIO, io.BufferedReader(_Forward(archive, member), _BUFFER_BYTES))
                where = f"{name}:{member.name}"
                for record in _read(contents, where, member.size, options, rules, inner):
                    record.place = (number, *record.place)
                    yield record
                inner = ()
    except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:  # the last two of headers
        raise DataError(f"{name} is damaged, cut short or no tar: {error}.") from None


def _read(
    file: BinaryIO, where: str, size_bytes: int, options: ReadOptions, rules: TokenRules | None, start: Place
) -> Iterator[Record]:
    """A member; one that is not UTF-8 is one rejected record."""
    try:
        with opened_contents(file, where, size_bytes, options) as (kind, contents):
            yield from kind.read(contents, where, options, rules, start)
    except UndecodableError as error:
        yield Rejected(where, str(error).removeprefix(f"{where} ").rstrip("."), b"", (1,))


TAR = Format(read_tar, frozenset({".tar"}), in_folders=False, magic=(257, b"ustar"))
#: Of everything that `--input` may name.
FILE_FORMATS = (*FORMATS, TAR)
