"""Bring a shard into a local folder: download, decompress, check, under a lock that dies with its process.

Streaming's `Stream` does the work for one shard. Its `StreamingDataset` would coordinate the ranks through
named shared memory and barriers, which leak when a process is killed, are limited by /dev/shm and hang the
other ranks when one fails; a file lock per shard needs no ranks, no cleaning up, and any number of runs can
share a cache.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Protocol

from llmscale.data.location import SetLocation
from llmscale.data.manifest import ShardInfo
from llmscale.data.streaming_import import streaming_module
from llmscale.errors import DataError

_RETRIES = 2
_TIMEOUT_S = 120.0
#: A peer may be downloading the shard that we want over a slow line.
_LOCK_TIMEOUT_S = 900.0


class FileInfo(Protocol):
    """Streaming's description of a file."""

    basename: str
    bytes: int


class ShardFile(Protocol):
    """What is used here of Streaming's shard reader."""

    raw_data: FileInfo
    zip_data: FileInfo | None


class ShardFetcher:
    """Fetches the shards of one split. Holds no connection before its first use, so it may be forked."""

    def __init__(self, location: SetLocation, split: str, cache_limit_bytes: int | None) -> None:
        self._location = location
        self._folder = location.folder / split
        self._locks = location.folder / ".locks" / split
        self._limit_bytes = cache_limit_bytes
        self._split = split
        self._stream_pid = 0
        self._stream: _Stream | None = None

    def fetch(self, shard: ShardInfo, file: ShardFile) -> None:
        """Make the uncompressed shard exist. Raises DataError: unreachable, damaged, cache disk full."""
        lock_module: ModuleType = _filelock()
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            with lock_module.FileLock(self._locks / f"{shard.name}.lock", timeout=_LOCK_TIMEOUT_S):
                if not _has_size(self._folder / shard.name, shard.bytes):
                    self._remove(file)
                    self._fetch_locked(shard, file)
        except lock_module.Timeout:
            raise DataError(
                f"Waited {_LOCK_TIMEOUT_S:.0f} s for another process to fetch shard {shard.name}."
            ) from None
        except OSError as error:
            raise self._explain(error, shard) from error
        if self._limit_bytes is not None:
            self._evict(keep=shard.name)

    def discard(self, shard: ShardInfo, file: ShardFile) -> None:
        """Remove a shard that turned out to be damaged, so that it is fetched again."""
        with _filelock().FileLock(self._locks / f"{shard.name}.lock", timeout=_LOCK_TIMEOUT_S):
            self._remove(file)

    def _fetch_locked(self, shard: ShardInfo, file: ShardFile) -> None:
        needed_bytes = shard.bytes + (file.zip_data.bytes if file.zip_data else 0)
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < needed_bytes:
            raise OSError(errno.ENOSPC, f"{free_bytes:,} bytes free, {needed_bytes:,} needed")
        for attempt in range(_RETRIES):
            try:
                self._open_stream().prepare_shard(file)
                break
            except Exception as error:  # each transport raises its client library's own kinds
                self._remove(file)
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
                    raise
                if attempt == _RETRIES - 1:
                    raise self._explain(error, shard) from error
        if not _has_size(self._folder / shard.name, shard.bytes):
            self._remove(file)
            raise DataError(f"Shard {shard.name} of {self._location.name} has another size than its index says.")

    def _open_stream(self) -> _Stream:
        if self._stream is None or self._stream_pid != os.getpid():
            self._stream = streaming_module("stream").Stream(
                remote=self._location.remote,
                local=str(self._location.folder),
                split=self._split,
                download_retry=_RETRIES,
                download_timeout=_TIMEOUT_S,
                validate_hash=self._location.manifest.hash_algorithm,
                keep_zip=False,
            )
            self._stream_pid = os.getpid()
        return self._stream

    def _remove(self, file: ShardFile) -> None:
        """What could be taken for a good shard; a local set's compressed original stays."""
        names = [file.raw_data.basename, f"{file.raw_data.basename}.tmp"]
        if file.zip_data and self._location.remote is not None:
            names += [file.zip_data.basename, f"{file.zip_data.basename}.tmp"]
        for name in names:
            with suppress(FileNotFoundError):
                os.remove(self._folder / name)

    def _evict(self, keep: str) -> None:
        """Drop the shards that were fetched or opened longest ago until the cache is within its limit.

        A process that still reads one fetches it again.
        """
        shards = []
        for path in self._folder.glob("shard.*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                shards.append((status.st_mtime_ns, status.st_size, path))
        excess_bytes = sum(size for _, size, _ in shards) - (self._limit_bytes or 0)
        for _, size, path in sorted(shards):
            if excess_bytes <= 0:
                break
            if path.name != keep:
                with suppress(FileNotFoundError):
                    path.unlink()
                excess_bytes -= size

    def _explain(self, error: Exception, shard: ShardInfo) -> DataError:
        if isinstance(error, DataError):
            return error
        where = f"shard {shard.name} of {self._location.name} (split {self._split})"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DataError(
                f"The disk of the data cache {self._folder} is full: {where} needs {shard.bytes:,} bytes "
                f"({error.strerror}). Free space, choose another --data-cache, or set --cache-limit-gib."
            )
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS):
            return DataError(f"Cannot write {where} to {self._folder}: {error.strerror}. Choose another --data-cache.")
        if "Checksum failure" in str(error):
            return DataError(
                f"The checksum of {where} is wrong at its source, {_RETRIES} times. Prepare or copy it again."
            )
        return DataError(f"Cannot fetch {where}: {type(error).__name__}: {error}.")


class _Stream(Protocol):
    def prepare_shard(self, shard: ShardFile) -> int: ...


def _filelock() -> ModuleType:
    import filelock

    return filelock


def _has_size(path: Path, num_bytes: int) -> bool:
    try:
        return path.stat().st_size == num_bytes
    except FileNotFoundError:
        return False
