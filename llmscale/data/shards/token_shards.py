"""Read samples by id from the shard files, with one positioned read per window.

Streaming's reader opens the file for every sample and decodes it in Python. Windows of one size need neither: they are
consecutive at a shard's end, as `check_offsets` verifies. Shards are read, not mapped: a truncated file or a failing
disk is an error that names the shard instead of a SIGBUS, and resident memory does not grow with the dataset.

Processes share nothing: no shared memory, barrier, thread or epoch state. So two datasets in a process, two runs on a
host and a tiny /dev/shm need no care, and a killed process leaves nothing. Sizes are checked when a dataset is opened.
Each shard's hash is checked before a process first reads it (10 ms for 64 MiB in the page cache), and again when the
file has changed since. A file that is removed or replaced stays readable while it is open.
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

from llmscale.data.shards.cache import SetLocation, ShardFetcher
from llmscale.data.shards.manifest import get_split
from llmscale.data.shards.verify_shards import (
    check_files,
    check_hash,
    check_offsets,
    check_size,
    shard_files,
)
from llmscale.errors import DataError
from llmscale.untrusted.paths import open_regular

#: Another process can evict a shard between its fetch and its use, but hardly this often in a row.
_ATTEMPTS = 3
#: Files that a process keeps open for reading.
_MOST_OPEN = 128
_MOST_OPEN_OF_A_LIMITED_CACHE = 2


#: Device, inode, size and time of modification in ns, which identify a file and its contents.
_Identity = tuple[int, int, int, int]
TARGET = np.uint32(1 << 30)
BEGIN = np.uint32(1 << 31)
_IDS = np.uint32((1 << 30) - 1)


class WindowReader(Protocol):
    """Windows by sample id, of one dataset or a mixture."""

    def __len__(self) -> int: ...

    def read(self, sample_ids: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Return the windows of samples [b], uint16 or uint32 [b, T + 1]. Raises DataError."""

    @property
    def has_mask(self) -> bool:
        """True if tokens may not be targets."""

    def read_marked(self, sample_ids: NDArray[np.int64]) -> Marked:
        """Return the windows of samples [b] with marks of their targets, [b, T + 1]. Raises DataError."""


class TokenShards:
    """Windows of one split, by sample id.

    Opening checks that every shard of a local dataset exists with its exact size. Raises DataError.
    """

    def __init__(
        self, location: SetLocation, split: str, *, cache_limit_bytes: int | None = None, num_sets: int = 1
    ) -> None:
        """`num_sets` datasets share the limits of open files and of the cache."""
        self.location = location
        self.manifest = location.manifest
        self.split = split
        self._shards = get_split(location.manifest, split, location.name).shards
        self._paths = [location.folder / split / shard.name for shard in self._shards]
        self._num_bytes = np.array([shard.bytes for shard in self._shards], np.int64)
        self.samples_per_shard = np.array([shard.num_samples for shard in self._shards], np.int64)
        self._ends = np.cumsum(self.samples_per_shard)
        find_files = check_files if location.remote is None else shard_files
        self._stored = find_files(location.folder, split, location.manifest)
        self._fetcher: ShardFetcher | None = None
        if location.remote is not None or location.manifest.compression:
            if cache_limit_bytes is None:
                limit_bytes = None
            else:
                limit_bytes = cache_limit_bytes // num_sets
            self._fetcher = ShardFetcher(location, split, limit_bytes)
        # An open file takes disk space even after the cache has evicted it.
        if cache_limit_bytes is None:
            most_open = _MOST_OPEN
        else:
            most_open = _MOST_OPEN_OF_A_LIMITED_CACHE
        self._files = _OpenFiles(self._paths, max(1, most_open // num_sets))
        self._verified: dict[int, _Identity] = {}
        """Identity of the checked file, by shard."""

    def __len__(self) -> int:
        if len(self._ends):
            return int(self._ends[-1])
        return 0

    @property
    def has_mask(self) -> bool:
        """True if tokens may not be targets."""
        return self.manifest.chat is not None

    def read(self, sample_ids: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Return the windows of samples [b], uint16 or uint32 [b, T + 1]. Raises DataError naming a bad shard."""
        return self._read(sample_ids)[1]

    def read_marked(self, sample_ids: NDArray[np.int64]) -> Marked:
        """Return the windows of samples [b] with marks of their targets, [b, T + 1]. Raises DataError naming a bad
        shard."""
        mask, windows = self._read(sample_ids)
        return mark(windows, mask)

    def _read(self, sample_ids: NDArray[np.int64]) -> tuple[NDArray[np.bool_] | None, NDArray[np.unsignedinteger]]:
        """Return the masks, None without a column of them, and the windows of samples."""
        if len(sample_ids) and not 0 <= sample_ids.min() <= sample_ids.max() < len(self):
            raise DataError(f"Sample ids must be in 0..{len(self) - 1}, not {sample_ids.min()}..{sample_ids.max()}.")
        rows = np.empty((len(sample_ids), self.manifest.window_bytes), np.uint8)
        shard_ids = np.searchsorted(self._ends, sample_ids, side="right")
        # Counted from the end of the shard, where the windows are.
        num_bytes = self.manifest.window_bytes
        places = self._num_bytes[shard_ids] - (self._ends[shard_ids] - sample_ids) * num_bytes
        contents = rows.reshape(-1).data
        wanted: dict[int, list[tuple[int, memoryview]]] = {}
        begin = 0
        # Python numbers and slices: for one window, NumPy's cost several times as much as the read.
        for shard_id, place in zip(shard_ids.tolist(), places.tolist(), strict=True):
            wanted.setdefault(shard_id, []).append((place, contents[begin : begin + num_bytes]))
            begin += num_bytes
        for shard_id in sorted(wanted):
            self._read_windows(shard_id, wanted[shard_id])
        length = self.manifest.seq_len + 1
        mask = None
        if self.has_mask:
            mask = rows[:, :length] > 0
            rows = np.ascontiguousarray(rows[:, length:])
        windows: NDArray[np.unsignedinteger] = rows.view(self.manifest.dtype)
        if windows.size and windows.max() >= self.manifest.vocab_size:
            raise DataError(
                f"{self.location.name} holds token id {windows.max()}, beyond its vocabulary of "
                f"{self.manifest.vocab_size}. Prepare the dataset again with --overwrite."
            )
        return mask, windows

    def _read_windows(self, shard_id: int, wanted: list[tuple[int, memoryview]]) -> None:
        """Fill windows, given as byte offset and buffer, from one shard."""
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
                # Checked after the reads, so that writes before or among them show.
                if _identify(os.fstat(file)) == self._verified[shard_id]:
                    return
                del self._verified[shard_id]
            except FileNotFoundError:
                del self._verified[shard_id]
            except OSError as error:
                self._check(shard_id)
                raise DataError(f"Shard {path} cannot be read: {error.strerror}.") from error
        raise DataError(
            f"Shard {path} was removed or changed {_ATTEMPTS} times while it was needed. If it is in a cache, "
            "--cache-limit-gib is too small for the runs that share it."
        )

    def verify(self, shard_id: int) -> _Identity:
        """Fetch the shard if needed, check all of it, and return the checked file's identity. A damaged one is fetched
        again. Raises DataError."""
        if self._fetcher is None:
            return self._check(shard_id)
        stored = self._stored[shard_id]
        self._fetcher.fetch(stored)
        try:
            return self._check(shard_id)
        except DataError:
            self._fetcher.discard(stored)
            self._fetcher.fetch(stored)
            return self._check(shard_id)

    def _check(self, shard_id: int) -> _Identity:
        """Check a shard's file and return its identity. Raises DataError."""
        shard = self._shards[shard_id]
        path = self._paths[shard_id]
        # Taken before the file is read: a write meanwhile changes the identity.
        identity = _identify(check_size(path, shard.bytes))
        check_hash(path, self.manifest.hash_algorithm, shard.hash)
        check_offsets(path, shard, self.manifest)
        return identity


def _identify(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _OpenFiles:
    """Files of the most recently used shards, kept open."""

    def __init__(self, paths: Sequence[Path], limit: int) -> None:
        self._paths = paths
        self._limit = limit
        self._files: OrderedDict[int, BinaryIO] = OrderedDict()

    def open(self, shard_id: int) -> int:
        """Return a file descriptor for positioned reads. Raises OSError."""
        file = self._files.get(shard_id)
        if file is None:
            file = self._files[shard_id] = open_regular(self._paths[shard_id])
            if len(self._files) > self._limit:
                self._files.popitem(last=False)[1].close()
        else:
            self._files.move_to_end(shard_id)
        return file.fileno()

    def close(self, shard_id: int) -> None:
        """Close a file that may have been replaced."""
        file = self._files.pop(shard_id, None)
        if file is not None:
            file.close()


#: Tokens with marks.
Marked = NDArray[np.uint32]


def ids_of(marked: Marked) -> Marked:
    """Return the ids of marked tokens."""
    return marked & _IDS


def are_targets(marked: Marked) -> NDArray[np.bool_]:
    """Return which marked tokens are targets."""
    return (marked & TARGET) > 0


def mark(ids: NDArray[np.unsignedinteger], mask: NDArray[np.bool_] | None) -> Marked:
    """Return tokens with the marks of those in the mask, or of all."""
    marked = ids.astype(np.uint32)
    if mask is None:
        return marked | TARGET
    return marked | np.where(mask, TARGET, np.uint32(0))


def to_rows(marked: Marked, dtype: str) -> NDArray[np.uint8]:
    """Return the stored bytes of windows [n, T + 1], [n, bytes]."""
    mask = are_targets(marked).astype(np.uint8)
    ids = ids_of(marked).astype(dtype)
    return np.concatenate([mask, ids.view(np.uint8)], axis=1)
