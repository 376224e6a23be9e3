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
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from llmscale.data.shards.cache import SetLocation, ShardFetcher, ShardFile
from llmscale.data.shards.manifest import get_split
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
        self._shards = get_split(location.manifest, split, location.name).shards
        self._paths = [location.folder / split / shard.name for shard in self._shards]
        self._num_bytes = np.array([shard.bytes for shard in self._shards], np.int64)
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
        self._files = _OpenFiles(self._paths, max(1, most_open // num_sets))
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
        # Counted from the shard's end, where the windows are.
        num_bytes = self.manifest.window_bytes
        places = self._num_bytes[shard_ids] - (self._ends[shard_ids] - sample_ids) * num_bytes
        contents = windows.reshape(-1).view(np.uint8).data
        wanted: dict[int, list[tuple[int, memoryview]]] = {}
        begin = 0
        # Plain numbers and slices: for one window numpy's cost several times as much as the read.
        for shard_id, place in zip(shard_ids.tolist(), places.tolist(), strict=True):
            wanted.setdefault(shard_id, []).append((place, contents[begin : begin + num_bytes]))
            begin += num_bytes
        for shard_id in sorted(wanted):
            self._read_windows(shard_id, wanted[shard_id])
        if windows.size and windows.max() >= self.manifest.vocab_size:
            raise DataError(
                f"{self.location.name} holds token id {windows.max()}, beyond its vocabulary of "
                f"{self.manifest.vocab_size}. Prepare the set again with --overwrite."
            )
        return windows

    def _read_windows(self, shard_id: int, wanted: list[tuple[int, memoryview]]) -> None:
        """Fill each window, of a byte offset and a buffer, from one shard."""
        path = self._paths[shard_id]
        for _ in range(_ATTEMPTS):
            if shard_id not in self._verified:
                self._files.close(shard_id)
                self._verified[shard_id] = self.verify(shard_id)
            try:
                file = self._files.open(shard_id)
                for place, window in wanted:
                    if os.preadv(file, (window,), place) != len(window):
                        raise OSError(errno.EIO, "it ends before its last window")
                # Behind the reads: what was written before or among them shows.
                if _identify(os.fstat(file)) == self._verified[shard_id]:
                    return
                del self._verified[shard_id]
            except FileNotFoundError:
                del self._verified[shard_id]
            except OSError as error:
                self._check(shard_id)
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
            return self._check(shard_id)
        source = self._sources[shard_id]
        self._fetcher.fetch(shard, source)
        try:
            return self._check(shard_id)
        except DataError:
            self._fetcher.discard(shard, source)
            self._fetcher.fetch(shard, source)
            return self._check(shard_id)

    def _check(self, shard_id: int) -> _Identity:
        """Return which file was checked. Raises DataError."""
        shard, path = self._shards[shard_id], self._paths[shard_id]
        # Taken before the file is read: one that is written to meanwhile is another one afterwards.
        found = _identify(check_size(path, shard.bytes))
        check_hash(path, self.manifest.hash_algorithm, shard.hash)
        check_offsets(path, shard, self.manifest)
        return found


def _identify(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _OpenFiles:
    """The shards that were used last, kept open."""

    def __init__(self, paths: Sequence[Path], limit: int) -> None:
        self._paths, self._limit = paths, limit
        self._files: OrderedDict[int, BinaryIO] = OrderedDict()

    def open(self, shard_id: int) -> int:
        """Return a descriptor for positioned reads. Raises OSError."""
        file = self._files.get(shard_id)
        if file is None:
            file = self._files[shard_id] = open_regular(self._paths[shard_id], follow_links=False)
            if len(self._files) > self._limit:
                self._files.popitem(last=False)[1].close()
        else:
            self._files.move_to_end(shard_id)
        return file.fileno()

    def close(self, shard_id: int) -> None:
        """Close a file, because another one may have taken its place."""
        file = self._files.pop(shard_id, None)
        if file is not None:
            file.close()
