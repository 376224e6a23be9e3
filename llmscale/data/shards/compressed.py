"""Read plain, gzip and zstd files: truncation is an error, and so is a file that unfolds to no end."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import BinaryIO, cast

from llmscale.errors import DataError

#: Suffixes that are taken off before the kind of a file is looked at.
COMPRESSED_SUFFIXES = (".gz", ".zst", ".tgz")
#: What a file may unfold to, times its own size. Text shrinks to a third to a tenth, repetitive logs to a hundredth;
#: the formats allow a thousandth (gzip) and far less (zstd), for a disk full of zeros from a megabyte.
MAX_RATIO = 256
#: Below this nobody asks.
_ALWAYS_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
#: zstd answers a piece with all that it unfolds to, at most 128 KiB for every 4 bytes.
_ZSTD_PIECE_BYTES = 1 << 10


class DamagedError(Exception):
    """A compressed file is damaged, ends early, or unfolds to more than it may."""


def most_unpacked_bytes(size_bytes: int) -> int:
    """What a compressed file of so many bytes may unfold to."""
    return max(_ALWAYS_BYTES, MAX_RATIO * size_bytes)


@contextmanager
def unpacked(raw: BinaryIO, name: str, size_bytes: int) -> Iterator[BinaryIO]:
    """The contents of an open file of `size_bytes`, uncompressed by the suffix of `name`, as they are read: nothing is
    unpacked ahead.

    Raises DataError, also for what is read within the block: unreadable, damaged, cut short, unfolding to more than
    MAX_RATIO times its size.
    """
    suffix = PurePath(name).suffix
    try:
        if suffix not in COMPRESSED_SUFFIXES:
            yield raw
            return
        contents = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if suffix in (".gz", ".tgz") else open_zstd(raw)
        yield io.BufferedReader(_Limited(contents, most_unpacked_bytes(size_bytes)), _CHUNK_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error, DamagedError) as error:
        raise DataError(f"{name} is damaged or cut short: {error}.") from None
    except _Unfolds:
        raise DataError(
            f"{name} unpacks to more than {MAX_RATIO} times its size, which no text does. Unpack it yourself if it is "
            "meant to."
        ) from None
    except OSError as error:
        raise DataError(f"Cannot read {name}: {error.strerror or error}.") from None


def open_zstd(raw: BinaryIO) -> BinaryIO:
    """The contents of a zstd file, as they are read. Reading raises DamagedError."""
    return io.BufferedReader(_ZstdFile(raw), _CHUNK_BYTES)


class _Unfolds(Exception):
    """A compressed file holds more than its limit."""


class _Limited(io.RawIOBase):
    """What another file holds, up to a number of bytes; reading beyond them raises _Unfolds."""

    def __init__(self, file: BinaryIO, limit_bytes: int) -> None:
        self._file = file
        self._left_bytes = limit_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        contents = self._file.read(len(buffer))
        self._left_bytes -= len(contents)
        if self._left_bytes < 0:
            raise _Unfolds
        buffer[: len(contents)] = contents
        return len(contents)


class _ZstdFile(io.RawIOBase):
    """The frames of a zstd file, one after the other.

    `zstandard`'s own stream reader takes the end of a truncated file for the end of the data.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._pending = memoryview(b"")
        self._chunks = self._decompress()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._pending:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._pending = memoryview(chunk)
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    def _pieces(self) -> Iterator[bytes]:
        while chunk := self._raw.read(_CHUNK_BYTES):
            for start in range(0, len(chunk), _ZSTD_PIECE_BYTES):
                yield chunk[start : start + _ZSTD_PIECE_BYTES]

    def _decompress(self) -> Iterator[bytes]:
        import zstandard

        frame = None
        for data in self._pieces():
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise DamagedError(str(error)) from None
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
        if frame is not None:
            raise DamagedError("the last frame is incomplete")
