"""Bring a shard into a local folder: download, decompress, check, under a lock that dies with its process.

Streaming's transport brings one file at a time. Its `StreamingDataset` would coordinate the ranks through
named shared memory and barriers, which leak when a process is killed, are limited by /dev/shm and hang the
other ranks when one fails; a file lock per shard needs no ranks, no cleaning up, and any number of runs can
share a cache.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Protocol

from llmscale.data.shards.compressed import DamagedError, open_zstd
from llmscale.data.shards.dataset_source import SetLocation, check_source, find_moved
from llmscale.data.shards.manifest import ShardInfo, check_no_links
from llmscale.data.shards.verify_shards import hash_file
from llmscale.data.storage import faults
from llmscale.data.storage.transport import Downloader, download, open_downloader
from llmscale.errors import DataError, UnreachableError
from llmscale.untrusted.paths import RefusedFile, check_regular, open_regular

_CHUNK_BYTES = 1 << 20
_CHECKSUM = "wrong checksum"
#: A peer may be downloading the shard that we want over a slow line.
_LOCK_TIMEOUT_S = 900.0


class FileInfo(Protocol):
    """Streaming's description of a file."""

    basename: str
    bytes: int
    hashes: dict[str, str]


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
        self._downloader: tuple[int, Downloader] | None = None
        """And the process whose it is."""

    def fetch(self, shard: ShardInfo, file: ShardFile) -> None:
        """Make the uncompressed shard exist. Raises DataError: unreachable, damaged, cache disk full."""
        lock_module: ModuleType = _filelock()
        # A compressed local set is unpacked where it lies, and its locks are made there.
        check_no_links(self._location.folder, f".locks/{self._split}/{shard.name}.lock", f"{self._split}/{shard.name}")
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            with lock_module.FileLock(self._locks / f"{shard.name}.lock", timeout=_LOCK_TIMEOUT_S):
                if not _has_size(self._folder / shard.name, shard.bytes):
                    self._remove(file)
                    self._fetch_locked(shard, file)
        except lock_module.Timeout:
            raise UnreachableError(
                f"Waited {_LOCK_TIMEOUT_S:.0f} s for another process to fetch shard {shard.name}."
            ) from None
        except OSError as error:
            raise self._explain(error, shard) from error
        _mark_used(self._folder / shard.name)
        if self._limit_bytes is not None:
            self._evict(keep=shard.name)

    def discard(self, shard: ShardInfo, file: ShardFile) -> None:
        """Remove a shard that turned out to be damaged, so that it is fetched again. Raises DataError."""
        try:
            with _filelock().FileLock(self._locks / f"{shard.name}.lock", timeout=_LOCK_TIMEOUT_S):
                self._remove(file)
        except OSError as error:
            raise self._explain(error, shard) from error

    def _fetch_locked(self, shard: ShardInfo, file: ShardFile) -> None:
        needed_bytes = shard.bytes + (file.zip_data.bytes if file.zip_data else 0)
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < needed_bytes:
            raise OSError(errno.ENOSPC, f"{free_bytes:,} bytes free, {needed_bytes:,} needed")
        try:
            self._bring_from_where_it_lies(shard, file)
        except Exception as error:  # each client raises its own kinds
            raise self._explain(error, shard) from error
        if not _has_size(self._folder / shard.name, shard.bytes):
            self._remove(file)
            raise DataError(f"Shard {shard.name} of {self._location.name} has another size than its index says.")

    def _bring_from_where_it_lies(self, shard: ShardInfo, file: ShardFile) -> None:
        """Also when an equal set has taken this one's place. Raises whatever the transport raises, DataError."""
        try:
            self._bring(shard, file)
        except Exception as error:
            is_known = isinstance(error, DataError) or _is_full(error) or _is_forbidden(error) or faults.may_pass(error)
            moved = None if is_known else find_moved(self._location)
            if moved is None:
                raise
            self._location, self._downloader = moved, None
            self._bring(shard, file)

    def _bring(self, shard: ShardInfo, file: ShardFile) -> None:
        """Download and unpack it, a second time when it came here damaged. Raises whatever the transport raises."""
        for is_last in (False, True):
            try:
                self._download(file.zip_data or file.raw_data, shard)
                if file.zip_data:
                    self._unpack(file.zip_data, shard)
                return
            except DamagedError:
                self._remove(file)
                if is_last:
                    raise
            except Exception:
                self._remove(file)
                raise

    def _download(self, stored: FileInfo, shard: ShardInfo) -> None:
        """Bring one file here, unless it is here, and check it. Raises whatever the transport raises, DamagedError."""
        path = self._folder / stored.basename
        remote = self._location.remote
        if remote is not None:
            check_source(remote, f"{self._split}/{stored.basename}")
            download(
                lambda: self._open_downloader(remote),
                f"{remote}/{self._split}/{stored.basename}",
                path,
                f"Cannot fetch {self._describe(shard)}",
                explain=lambda error: error,
            )
        algorithm = self._location.manifest.hash_algorithm
        # The size first: what a source sends instead may be of any length.
        if not _has_size(path, stored.bytes) or hash_file(path, algorithm) != stored.hashes[algorithm]:
            raise DamagedError(_CHECKSUM)

    def _unpack(self, stored: FileInfo, shard: ShardInfo) -> None:
        """Uncompress a shard to the size that it should have, and not a byte more, whatever its file unfolds to."""
        path = self._folder / stored.basename
        target = self._folder / f"{shard.name}.tmp"
        left_bytes = shard.bytes
        with open_regular(path, follow_links=False) as packed, open_zstd(packed) as contents, target.open("xb") as out:
            while chunk := contents.read(min(_CHUNK_BYTES, left_bytes + 1)):
                left_bytes -= len(chunk)
                if left_bytes < 0:
                    raise DamagedError(f"it unpacks to more than its {shard.bytes:,} bytes")
                out.write(chunk)
        os.replace(target, self._folder / shard.name)
        if self._location.remote is not None:
            path.unlink()

    def _open_downloader(self, remote: str) -> Downloader:
        if self._downloader is None or self._downloader[0] != os.getpid():
            self._downloader = os.getpid(), open_downloader(remote)
        return self._downloader[1]

    def _remove(self, file: ShardFile) -> None:
        """What could be taken for a good shard; a local set's compressed original stays."""
        names = [file.raw_data.basename, f"{file.raw_data.basename}.tmp"]
        if file.zip_data and self._location.remote is not None:
            names += [file.zip_data.basename, f"{file.zip_data.basename}.tmp"]
        for name in names:
            with suppress(FileNotFoundError):
                os.remove(self._folder / name)
        for left in self._folder.glob(f".download-{file.raw_data.basename}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)

    def _evict(self, keep: str) -> None:
        """Drop the shards that were fetched or opened longest ago until the cache is within its limit.

        A process that still reads one fetches it again.
        """
        shards = []
        # What is unpacked from a local set's compressed files goes, never those.
        for path in self._folder.glob("shard.*" if self._location.remote is not None else "shard.*.mds"):
            with suppress(FileNotFoundError):
                status = path.stat()
                shards.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, path))
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
        where = self._describe(shard)
        if _is_full(error):
            return UnreachableError(
                f"The disk of the data cache {self._folder} is full: {where} needs {shard.bytes:,} bytes "
                f"({_reason(error)}). Free space, choose another --data-cache, or set --cache-limit-gib."
            )
        if _is_forbidden(error):
            return UnreachableError(
                f"Cannot write {where} to {self._folder}: {_reason(error)}. Choose another --data-cache."
            )
        if str(error) == _CHECKSUM:
            return DataError(f"The checksum of {where} is wrong at its source, twice. Prepare or copy it again.")
        return faults.fault(error, f"Cannot fetch {where}", url=self._location.name)

    def _describe(self, shard: ShardInfo) -> str:
        return f"shard {shard.name} of {self._location.name} (split {self._split})"


def _filelock() -> ModuleType:
    import filelock

    return filelock


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_forbidden(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _mark_used(path: Path) -> None:
    """For the cache, which drops what was used longest ago. The time of modification stays: it says that a file is
    still the one that was checked."""
    with suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _has_size(path: Path, num_bytes: int) -> bool:
    try:
        return check_regular(path, follow_links=False).st_size == num_bytes
    except (FileNotFoundError, RefusedFile):
        return False
