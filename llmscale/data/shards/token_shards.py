"""Samples by id: Streaming's shard readers, without its dataset classes.

Nothing here is shared between processes: no shared memory, no barrier, no worker thread, no state of an
epoch. Two sets in a process, two runs on a host and a tiny /dev/shm are therefore no special cases, and a
killed process leaves nothing behind. What Streaming does not check of local data is checked here: sizes when
the set is opened, and each shard's hash before this process first reads from it (64 MiB take about 10 ms from
the page cache).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmscale.data.shards.dataset_source import SetLocation
from llmscale.data.shards.manifest import ShardInfo, get_split
from llmscale.data.shards.shard_cache import FileInfo, ShardFetcher
from llmscale.data.shards.streaming_import import streaming_module
from llmscale.data.shards.verify_shards import check_files, check_hash, check_offsets, check_size, load_index
from llmscale.errors import DataError

#: A shard can be evicted by another process between its fetch and its use; it does not happen this often in a
#: row.
_ATTEMPTS = 3


class ShardReader(Protocol):
    """What is used of Streaming's MDSReader."""

    raw_data: FileInfo
    zip_data: FileInfo | None

    def get_item(self, idx: int) -> dict[str, NDArray[np.unsignedinteger]]: ...


class WindowReader(Protocol):
    """Windows by sample id, of one set or of several."""

    def __len__(self) -> int: ...

    def read(self, sample_ids: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Windows of samples [b], uint16 or uint32 [b, T + 1]. Raises DataError."""


class TokenShards:
    """The windows of one split, by sample id.

    Opening checks that every shard of a local set is there with its exact size. Raises DataError.
    """

    def __init__(self, location: SetLocation, split: str, *, cache_limit_bytes: int | None = None) -> None:
        self.location = location
        self.manifest = location.manifest
        self.split = split
        self._folder = location.folder / split
        self._shards = get_split(location.manifest, split, location.name).shards
        self.samples_per_shard = np.array([shard.num_samples for shard in self._shards], np.int64)
        self._ends = np.cumsum(self.samples_per_shard)
        entries = load_index(location.folder, split, location.manifest)
        from_json = streaming_module("format").reader_from_json
        self._readers: list[ShardReader] = [from_json(str(location.folder), split, entry) for entry in entries]
        is_fetched = location.remote is not None or bool(location.manifest.compression)
        self._fetcher = ShardFetcher(location, split, cache_limit_bytes) if is_fetched else None
        if location.remote is None:
            check_files(location.folder, split, location.manifest)
        self._verified: set[int] = set()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, sample_ids: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Windows of samples [b], uint16 or uint32 [b, T + 1]. Raises DataError naming a bad shard."""
        if len(sample_ids) and not 0 <= sample_ids.min() <= sample_ids.max() < len(self):
            raise DataError(f"Sample ids must be in 0..{len(self) - 1}, not {sample_ids.min()}..{sample_ids.max()}.")
        windows = np.empty((len(sample_ids), self.manifest.seq_len + 1), self.manifest.dtype)
        shard_ids = np.searchsorted(self._ends, sample_ids, side="right")
        for row, (sample_id, shard_id) in enumerate(zip(sample_ids.tolist(), shard_ids.tolist(), strict=True)):
            begin = int(self._ends[shard_id] - self.samples_per_shard[shard_id])
            windows[row] = self._read_window(shard_id, sample_id - begin)
        if windows.size and windows.max() >= self.manifest.vocab_size:
            raise DataError(
                f"{self.location.name} holds token id {windows.max()}, beyond its vocabulary of "
                f"{self.manifest.vocab_size}. Prepare the set again with --overwrite."
            )
        return windows

    def _read_window(self, shard_id: int, index: int) -> NDArray[np.unsignedinteger]:
        shard, reader = self._shards[shard_id], self._readers[shard_id]
        for _ in range(_ATTEMPTS):
            if shard_id not in self._verified:
                self._verify(shard, reader)
                self._verified.add(shard_id)
            try:
                return reader.get_item(index)["tokens"]
            except FileNotFoundError:
                self._verified.discard(shard_id)
            except (OSError, ValueError, IndexError, KeyError) as error:
                self._check(shard)
                raise DataError(f"Shard {self._folder / shard.name} cannot be read: {error}.") from error
        raise DataError(
            f"Shard {self._folder / shard.name} was removed from the cache {_ATTEMPTS} times while it was needed: "
            "--cache-limit-gib is too small for the runs that share the cache."
        )

    def _verify(self, shard: ShardInfo, reader: ShardReader) -> None:
        """Fetch the shard if need be and check all of it; what a crash left there is fetched again."""
        if self._fetcher is None:
            self._check(shard)
            return
        self._fetcher.fetch(shard, reader)
        with suppress(OSError):
            os.utime(self._path(shard))  # the cache drops what was opened longest ago
        try:
            self._check(shard)
        except DataError:
            self._fetcher.discard(shard, reader)
            self._fetcher.fetch(shard, reader)
            self._check(shard)

    def _check(self, shard: ShardInfo) -> None:
        check_size(self._path(shard), shard.bytes)
        check_hash(self._path(shard), self.manifest.hash_algorithm, shard.hash)
        check_offsets(self._path(shard), shard, self.manifest)

    def _path(self, shard: ShardInfo) -> Path:
        return self._folder / shard.name
