"""Read plain and compressed files; truncation is an error, and so is unpacking to far more than the file's size."""

from __future__ import annotations

import bz2
import codecs
import functools
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import BinaryIO, cast

from llmscale.errors import DataError

#: Compression suffixes and the format that each promises. The contents decide.
COMPRESSED_SUFFIXES = {
    ".gz": "gzip",
    ".tgz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".tzst": "zstd",
    ".bz2": "bzip2",
    ".tbz2": "bzip2",
    ".tbz": "bzip2",
    ".xz": "xz",
    ".txz": "xz",
    ".lzma": "xz",
    ".br": "brotli",
}
#: First bytes of compressed files and archives, with which no text begins.
_MAGIC = re.compile(
    rb"(?P<gzip>\x1f\x8b\x08)|(?P<zstd>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)"
    rb"|(?P<bzip2>BZh[1-9](?:1AY&SY|\x17rE8P\x90))|(?P<xz>\xfd7zXZ\0|]\0\0..(?:\xff{8}|.{5}\0{3}))"
    rb"|(?P<zip>PK(?:\x03\x04|\x05\x06))|(?P<lz4>\x04\x22\x4d\x18|\x02\x21\x4c\x18)|(?P<lzip>LZIP\x01)"
    rb"|(?P<rar>Rar!\x1a)|(?P<lzop>\x89LZO\0)|(?P<snappy>\xff\x06\0\0sNaPpY)|(?P<compress>\x1f[\x9d\xa0])"
    rb"|(?P<seven_zip>7z\xbc\xaf\x27\x1c)",
    re.DOTALL,
)
#: Largest ratio of unpacked to packed bytes. Text shrinks 3 to 10 times, repetitive logs 100 times; gzip allows 1,000
#: times and zstd far more, so that a megabyte could fill a disk.
MAX_RATIO = 256
#: Any file may unpack to this.
_ALWAYS_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
#: First bytes of uncompressed files of other formats than text.
_PLAIN_MAGIC = (b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff", b"\x93NUMPY")
#: Longest window of zstd: `zstd --long=31`, as dumps of Reddit are packed. Its memory is touched only as far as the
#: contents reach.
_ZSTD_WINDOW_BYTES = 1 << 31
#: zstd returns all that a piece unpacks to, at most 128 KiB for every 4 bytes.
_ZSTD_PIECE_BYTES = 1 << 10


class DamagedError(Exception):
    """A compressed file is damaged, ends early, or unpacks to more than its limit."""


def most_unpacked_bytes(size_bytes: int) -> int:
    """Return the limit of unpacked bytes for a compressed file of `size_bytes`."""
    return max(_ALWAYS_BYTES, MAX_RATIO * size_bytes)


@contextmanager
def unpacked(raw: BinaryIO, name: str, size_bytes: int) -> Iterator[BinaryIO]:
    """Yield the contents of an open file of `size_bytes`, uncompressed as they are read, whatever its suffix.

    Raises DataError, also within the block: unreadable, damaged, truncated, an unknown compression or two of them, or
    unpacking to more than MAX_RATIO times its size.
    """
    try:
        kind = _compression_of(raw, name)
        if not kind:
            yield raw
            return
        packed = _Stream(_unpack(raw, kind, name), most_unpacked_bytes(size_bytes))
        contents = cast(BinaryIO, io.BufferedReader(packed, _CHUNK_BYTES))
        if inner := _MAGIC.match(head_of(contents)):
            raise DataError(f"{name} is compressed twice, {inner.lastgroup} within {kind}. Unpack it once.")
        yield contents
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, DamagedError) as error:
        raise DataError(f"{name} is damaged or cut short: {error}.") from None
    except _Unfolds:
        raise unfolds(name, size_bytes) from None
    except OSError as error:
        if error.errno is None:  # bz2's error for damage
            raise DataError(f"{name} is damaged or cut short: {error}.") from None
        raise DataError(f"Cannot read {name}: {error.strerror or error}.") from None


def unfolds(name: str, size_bytes: int) -> DataError:
    """Return the error for a file of `size_bytes` that unpacks to more than its limit."""
    return DataError(
        f"{name} unpacks to more than {MAX_RATIO} times its size: it has {size_bytes:,} bytes, and the limit is "
        f"{most_unpacked_bytes(size_bytes):,}. Unpack it yourself if it is meant to."
    )


def head_of(file: BinaryIO) -> bytes:
    """Return the beginning of a newly opened file, as much as its buffer holds. Raises OSError."""
    return cast(io.BufferedReader, file).peek(1)


def _compression_of(raw: BinaryIO, name: str) -> str:
    """Return the compression of the contents, empty for none. Raises DamagedError for binary contents that are not what
    the suffix promises."""
    head = head_of(raw)
    promised = COMPRESSED_SUFFIXES.get(PurePath(name).suffix.lower(), "")
    if magic := _MAGIC.match(head):
        return str(magic.lastgroup)
    if promised == "brotli" and head:  # it has no first bytes of its own
        return promised
    if promised and head and not _is_plain(head):
        raise DamagedError(f"its contents are not {promised}")
    return ""


def _is_plain(head: bytes) -> bool:
    """Return whether a file begins with UTF-8 text or as an uncompressed file of a known format."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return head.startswith(_PLAIN_MAGIC)
    return True


def _unpack(raw: BinaryIO, kind: str, name: str) -> Iterator[bytes]:
    """Return the chunks of a packed file. Raises DataError for a kind that is not supported."""
    if kind == "zstd":
        return _unpack_zstd(raw)
    if kind == "gzip":
        return iter(functools.partial(gzip.GzipFile(fileobj=raw).read, _CHUNK_BYTES), b"")
    if kind in ("bzip2", "xz"):
        opener = bz2.BZ2File if kind == "bzip2" else lzma.LZMAFile
        return iter(functools.partial(opener(raw).read, _CHUNK_BYTES), b"")
    kind = kind.replace("seven_zip", "7z")
    raise DataError(f"{name} is packed with {kind}, which is not supported. Unpack it, or use gzip, zstd, bzip2 or xz.")


def open_zstd(raw: BinaryIO) -> BinaryIO:
    """Return the contents of a zstd file as a stream. Reading raises DamagedError."""
    return io.BufferedReader(_Stream(_unpack_zstd(raw)), _CHUNK_BYTES)


def _unpack_zstd(raw: BinaryIO) -> Iterator[bytes]:
    """Yield the contents of a file of one or more frames.

    `zstandard`'s own stream reader does not report a truncated file.
    """
    import zstandard

    frame = None
    while data := raw.read(_ZSTD_PIECE_BYTES):
        while data:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
            try:
                if contents := frame.decompress(data):
                    yield contents
            except zstandard.ZstdError as error:
                raise DamagedError(str(error)) from None
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise DamagedError("the last frame is incomplete")


class _Unfolds(Exception):
    """A compressed file unpacks to more than its limit."""


class _Stream(io.RawIOBase):
    """Chunks as a file; reading beyond the limit raises _Unfolds."""

    def __init__(self, chunks: Iterator[bytes], limit_bytes: int | None = None) -> None:
        self._chunks = chunks
        self._left_bytes = limit_bytes
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer, so that a first peek shows as much as a buffer holds."""
        size = 0
        while size < len(buffer) and (self._pending or self._take()):
            count = min(len(buffer) - size, len(self._pending))
            buffer[size : size + count] = self._pending[:count]
            self._pending = self._pending[count:]
            size += count
        return size

    def _take(self) -> bool:
        """Take the next chunk, if there is one."""
        self._pending = memoryview(next(self._chunks, b""))
        if self._left_bytes is not None:
            self._left_bytes -= len(self._pending)
            if self._left_bytes < 0:
                raise _Unfolds
        return len(self._pending) > 0
