"""Samples by id, straight from the shard files: one positioned read into place for each window.

Streaming's own reader opens the file for every sample and decodes it in Python. Windows of one size need neither: they
lie one after the other at a shard's end, as `check_offsets` has seen. Shards are read and not mapped: a file that is
cut short or a disk that fails is then an error that names the shard, where a mapping ends the process by SIGBUS; and
resident memory stays what it is however large the set.

Nothing here is shared between processes: no shared memory, no barrier, no worker thread, no state of an
epoch. Two sets in a process, two runs on a host and a tiny /dev/shm are therefore no special cases, and a
killed process leaves nothing behind. What Streaming does not check of local data is checked here: sizes when
the set is opened, and each shard's hash before this process first reads from it (64 MiB take about 10 ms from
the page cache), and again where the file that was read turns out to be no longer the one that was checked. One that
is removed or replaced by another file is read on while it is open: its bytes stay what they were.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from llmscale.data.shards.dataset_source import SetLocation
from llmscale.data.shards.manifest import ShardInfo, get_split
from llmscale.data.shards.shard_cache import ShardFetcher, ShardFile
from llmscale.data.shards.streaming_import import streaming_module
from llmscale.data.shards.verify_shards import check_files, check_hash, check_offsets, check_size, load_index
from llmscale.errors import DataError
from llmscale.untrusted.paths import open_regular

#: A shard can be evicted by another process between its fetch and its use; it does not happen this often in a
#: row.
_ATTEMPTS = 3
#: Files that a process keeps open for reading; of a set of more shards some are opened again.
_MOST_OPEN, _MOST_OPEN_OF_A_LIMITED_CACHE = 128, 2


#: Device, inode, size and time of modification in ns: another file, or another contents, has another one.
_Identity = tuple[int, int, int, int]


class WindowReader(Protocol):
    """Windows by sample id, of one set or of several."""

    def __len__(self) -> int: ...

    def read(self, sample_ids: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Windows of samples [b], uint16 or uint32 [b, T + 1]. Raises DataError."""


class TokenShards:
    """The windows of one split, by sample id.

    Opening checks that every shard of a local set is there with its exact size. Raises DataError.
    """

    def __init__(
        self, location: SetLocation, split: str, *, cache_limit_bytes: int | None = None, num_sets: int = 1
    ) -> None:
        """`num_sets` share the files that a process may have open, and the limit of the cache."""
        self.location = location
        self.manifest = location.manifest
        self.split = split
        self._folder = location.folder / split
        self._shards = get_split(location.manifest, split, location.name).shards
        self.samples_per_shard = np.array([shard.num_samples for shard in self._shards], np.int64)
        self._ends = np.cumsum(self.samples_per_shard)
        entries = load_index(location.folder, split, location.manifest)
        self._fetcher: ShardFetcher | None = None
        if location.remote is not None or location.manifest.compression:
            from_json = streaming_module("format").reader_from_json
            self._sources: list[ShardFile] = [from_json(str(location.folder), split, entry) for entry in entries]
            limit_bytes = None if cache_limit_bytes is None else cache_limit_bytes // num_sets
            self._fetcher = ShardFetcher(location, split, limit_bytes)
        # What is open takes its place on the disk, even when the cache has dropped it.
        most_open = _MOST_OPEN if cache_limit_bytes is None else _MOST_OPEN_OF_A_LIMITED_CACHE
        self._files = _OpenFiles(max(1, most_open // num_sets))
        if location.remote is None:
            check_files(location.folder, split, location.manifest)
        self._verified: dict[int, _Identity] = {}
        """By shard, the file that was checked."""

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, sample_ids: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Windows of samples [b], uint16 or uint32 [b, T + 1]. Raises DataError naming a bad shard."""
        if len(sample_ids) and not 0 <= sample_ids.min() <= sample_ids.max() < len(self):
            raise DataError(f"Sample ids must be in 0..{len(self) - 1}, not {sample_ids.min()}..{sample_ids.max()}.")
        windows = np.empty((len(sample_ids), self.manifest.seq_len + 1), self.manifest.dtype)
        shard_ids = np.searchsorted(self._ends, sample_ids, side="right")
        for shard_id in np.unique(shard_ids).tolist():
            rows = np.flatnonzero(shard_ids == shard_id)
            # Counted from the shard's end, where the windows are.
            behind = self._ends[shard_id] - sample_ids[rows]
            self._read_windows(shard_id, behind.tolist(), [windows[row] for row in rows.tolist()])
        if windows.size and windows.max() >= self.manifest.vocab_size:
            raise DataError(
                f"{self.location.name} holds token id {windows.max()}, beyond its vocabulary of "
                f"{self.manifest.vocab_size}. Prepare the set again with --overwrite."
            )
        return windows

    def _read_windows(self, shard_id: int, behind: list[int], windows: list[NDArray[np.unsignedinteger]]) -> None:
        """Fill `windows` with those that begin so many windows before the shard's end."""
        shard, path, num_bytes = self._shards[shard_id], self._path(self._shards[shard_id]), self.manifest.window_bytes
        for _ in range(_ATTEMPTS):
            if shard_id not in self._verified:
                self._files.close(path)
                self._verified[shard_id] = self.verify(shard_id)
            try:
                file = self._files.open(path)
                for back, window in zip(behind, windows, strict=True):
                    if os.preadv(file, [window.data], shard.bytes - back * num_bytes) != num_bytes:
                        raise OSError(errno.EIO, "it ends before its last window")
                # Behind the reads: what was written before or among them shows.
                if _identify(os.fstat(file)) == self._verified[shard_id]:
                    return
                del self._verified[shard_id]
            except FileNotFoundError:
                del self._verified[shard_id]
            except OSError as error:
                self._check(shard)
                raise DataError(f"Shard {path} cannot be read: {error.strerror}.") from error
        raise DataError(
            f"Shard {path} was removed or changed {_ATTEMPTS} times while it was needed. Of a cache, --cache-limit-gib "
            "is too small for the runs that share it."
        )

    def verify(self, shard_id: int) -> _Identity:
        """Fetch the shard if need be and check all of it; what a crash left is fetched again. Returns which file was
        checked. Raises DataError."""
        shard = self._shards[shard_id]
        if self._fetcher is None:
            return self._check(shard)
        source = self._sources[shard_id]
        self._fetcher.fetch(shard, source)
        try:
            return self._check(shard)
        except DataError:
            self._fetcher.discard(shard, source)
            self._fetcher.fetch(shard, source)
            return self._check(shard)

    def _check(self, shard: ShardInfo) -> _Identity:
        # Of before: one that is written to meanwhile is another one when it is read.
        found = _identify(check_size(self._path(shard), shard.bytes))
        check_hash(self._path(shard), self.manifest.hash_algorithm, shard.hash)
        check_offsets(self._path(shard), shard, self.manifest)
        return found

    def _path(self, shard: ShardInfo) -> Path:
        return self._folder / shard.name


def _identify(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _OpenFiles:
    """Those that were used last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._files: OrderedDict[Path, BinaryIO] = OrderedDict()

    def open(self, path: Path) -> int:
        """A descriptor for positioned reads. Raises OSError."""
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = open_regular(path, follow_links=False)
            if len(self._files) > self._limit:
                self._files.popitem(last=False)[1].close()
        else:
            self._files.move_to_end(path)
        return file.fileno()

    def close(self, path: Path) -> None:
        """Forget a file: another one may have taken its place."""
        file = self._files.pop(path, None)
        if file is not None:
            file.close()
