"""Open plain, gzip and zstd files for reading, with truncation as an error."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from llmscale.errors import DataError

#: Suffixes that are taken off before the kind of a file is looked at.
COMPRESSED_SUFFIXES = (".gz", ".zst")
_CHUNK_BYTES = 1 << 20


@contextmanager
def open_input(path: Path) -> Iterator[BinaryIO]:
    """The file's contents, uncompressed by its suffix. Raises DataError: unreadable, damaged, cut short."""
    try:
        with path.open("rb") as raw:
            if path.suffix == ".gz":
                yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
            elif path.suffix == ".zst":
                yield io.BufferedReader(_ZstdFile(raw), _CHUNK_BYTES)
            else:
                yield raw
    except (EOFError, gzip.BadGzipFile, zlib.error, _ZstdError) as error:
        raise DataError(f"{path} is damaged or cut short: {error}.") from None
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from None


class _ZstdError(Exception):
    """A zstd file is damaged or ends early."""


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

    def _decompress(self) -> Iterator[bytes]:
        import zstandard

        frame = None
        while data := self._raw.read(_CHUNK_BYTES):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise _ZstdError(str(error)) from None
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
        if frame is not None:
            raise _ZstdError("the last frame is incomplete")
