"""JSON lines, compressed with zstd: one file, or as many as are needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmscale.data.clean.cleaned_set import shard_name
from llmscale.data.shards.compressed import most_unpacked_bytes

_LEVEL = 3


@dataclass(frozen=True)
class FileFacts:
    """For the manifest."""

    name: str
    records: int
    bytes: int
    sha256: str


class JsonlFile:
    """Written once, from the beginning to the end; the same records give the same bytes."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        import zstandard

        self._path = path
        self._file = path.open("xb")
        self._compressor = zstandard.ZstdCompressor(_LEVEL).compressobj()
        self._digest = hashlib.sha256()
        self.num_records = self.num_text_bytes = self._num_bytes = 0

    def write(self, record: Mapping[str, object]) -> None:
        """Raises OSError."""
        self.write_line(_line(record))

    def can_be_read_with(self, line: bytes) -> bool:
        """Whether it stays within what a file may unfold to; its bytes so far are fewer than in the end."""
        return self.num_text_bytes + len(line) <= most_unpacked_bytes(self._num_bytes)

    def write_line(self, line: bytes) -> None:
        """Raises OSError."""
        self.num_records += 1
        self.num_text_bytes += len(line)
        self._put(self._compressor.compress(line))

    def finish(self) -> FileFacts:
        """Raises OSError."""
        self._put(self._compressor.flush())
        self._file.close()
        return FileFacts(self._path.name, self.num_records, self._num_bytes, self._digest.hexdigest())

    def close(self) -> None:
        """Let go of it, whole or not."""
        self._file.close()

    def _put(self, contents: bytes) -> None:
        if contents:
            self._file.write(contents)
            self._digest.update(contents)
            self._num_bytes += len(contents)


class DocumentShards:
    """What is left, in files of about `shard_bytes` of uncompressed text; fewer where it repeats itself so much that
    `data prepare` would refuse the file."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._finished: list[FileFacts] = []
        self._current: JsonlFile | None = None

    def write(self, record: Mapping[str, object]) -> None:
        """Raises OSError."""
        line = _line(record)
        if self._current is not None and not self._current.can_be_read_with(line):
            self._finish_current()
        if self._current is None:
            self._current = JsonlFile(self._folder / shard_name(len(self._finished)))
        self._current.write_line(line)
        if self._current.num_text_bytes >= self._shard_bytes:
            self._finish_current()

    def finish(self) -> list[FileFacts]:
        """Of all files. Raises OSError."""
        self._finish_current()
        return self._finished

    def _finish_current(self) -> None:
        if self._current is not None:
            self._finished.append(self._current.finish())
            self._current = None

    def close(self) -> None:
        """Let go of the file that is open."""
        if self._current is not None:
            self._current.close()


def _line(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
