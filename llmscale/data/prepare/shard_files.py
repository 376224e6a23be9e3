"""Windows to MDS shards, byte for byte as Streaming's MDSWriter writes them, without a step of Python per window.

All samples of a split have one size, so which windows a shard holds is known before any is written: shards are made in
parallel, and those that an interrupted run has finished are kept.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmscale.data.shards.manifest import HASH_ALGORITHM, TokenDtype
from llmscale.data.shards.streaming_import import streaming_module
from llmscale.data.shards.verify_shards import INDEX_NAME
from llmscale.files.atomic_write import write_durably

Windows = NDArray[np.unsignedinteger]
#: An entry of Streaming's index.json.
Entry = dict[str, object]
_JOURNAL_NAME = "shards.jsonl"
#: Shards in memory while they are compressed and written.
_MOST_UNDER_WAY = 2


class ShardFiles:
    """The shards of one split, written in order into `folder`."""

    def __init__(
        self,
        folder: Path,
        journal: Path,
        *,
        seq_len: int,
        dtype: TokenDtype,
        shard_bytes: int,
        compression: str,
        keep: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """`journal` is a file beside the set that says which shards are whole. `keep` is given each that is, also
        those of an interrupted run: a remote set's are uploaded and removed."""
        self._folder = folder
        self._journal = journal
        self._compression = compression
        self._keep = keep
        self._config: Entry = {
            "version": 2,
            "format": "mds",
            "compression": compression or None,
            "hashes": [HASH_ALGORITHM],
            "size_limit": shard_bytes,
            "column_names": ["tokens"],
            "column_encodings": [f"ndarray:{dtype}:{seq_len + 1}"],
            "column_sizes": [(seq_len + 1) * np.dtype(dtype).itemsize],
        }
        self._config_data = json.dumps(self._config, sort_keys=True).encode()
        window_bytes = (seq_len + 1) * np.dtype(dtype).itemsize
        # A shard has its number of samples, their offsets and one more, and the configuration in front.
        self.windows_per_shard = (shard_bytes - 8 - len(self._config_data)) // (window_bytes + 4)

    def write(self, windows_from: Callable[[int], Iterable[Windows]], done: Callable[[int], None]) -> list[Entry]:
        """All shards that are not there yet, then the index. `windows_from(k)` gives all windows from the k-th on in
        pieces [n, T + 1]; `done` is told the bytes of each shard. Returns the index's entries. Raises OSError."""
        self._folder.mkdir(exist_ok=True)
        for leftover in self._folder.glob(".*.partial"):
            leftover.unlink()
        entries = self._load_whole()
        for entry in entries:
            self._keep(self._folder / _stored_name(entry))
            done(_raw_bytes(entry))
        first = len(entries) * self.windows_per_shard
        with ThreadPoolExecutor(_MOST_UNDER_WAY) as pool, open(self._journal, "ab", buffering=0) as journal:
            under_way: collections.deque[Future[Entry]] = collections.deque()

            def finish_first() -> None:
                entry = under_way.popleft().result()
                journal.write(json.dumps(entry).encode() + b"\n")
                os.fsync(journal.fileno())
                entries.append(entry)
                self._keep(self._folder / _stored_name(entry))
                done(_raw_bytes(entry))

            for number, windows in enumerate(self._grouped(windows_from(first)), start=len(entries)):
                under_way.append(pool.submit(self._write_shard, number, windows))
                if len(under_way) == _MOST_UNDER_WAY:
                    finish_first()
            while under_way:
                finish_first()
        write_durably(self._folder / INDEX_NAME, json.dumps({"version": 2, "shards": entries}, sort_keys=True))
        return entries

    def _load_whole(self) -> list[Entry]:
        """Entries of the shards that an interrupted run has written."""
        entries: list[Entry] = []
        with suppress(FileNotFoundError):
            for line in self._journal.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break  # torn
                entries.append(json.loads(line))
        # Without what was torn.
        with open(self._journal, "wb", buffering=0) as journal:
            journal.writelines(json.dumps(entry).encode() + b"\n" for entry in entries)
        return entries

    def _grouped(self, pieces: Iterable[Windows]) -> Iterator[list[Windows]]:
        """The windows of one shard after the other."""
        waiting: list[Windows] = []
        missing = self.windows_per_shard
        for piece in pieces:
            while len(piece):
                part, piece = piece[:missing], piece[missing:]
                waiting.append(part)
                missing -= len(part)
                if not missing:
                    yield waiting
                    waiting, missing = [], self.windows_per_shard
        if waiting:
            yield waiting

    def _write_shard(self, number: int, parts: list[Windows]) -> Entry:
        num_samples = sum(map(len, parts))
        window_bytes = parts[0].shape[1] * parts[0].itemsize
        first = 4 + 4 * (num_samples + 1) + len(self._config_data)
        offsets = (first + window_bytes * np.arange(num_samples + 1, dtype=np.int64)).astype("<u4")
        head = np.uint32(num_samples).tobytes() + offsets.tobytes() + self._config_data
        contents: list[bytes | memoryview] = [head, *(np.ascontiguousarray(part).data.cast("B") for part in parts)]
        name = f"shard.{number:05}.mds"
        raw, zip_info = _describe(contents, name), None
        if self._compression:
            contents = [streaming_module("compression").compress(self._compression, b"".join(contents))]
            zip_info = _describe(contents, f"{name}.{self._compression}")
        entry: Entry = {"samples": num_samples, "raw_data": raw, "zip_data": zip_info, **self._config}
        write_durably(self._folder / _stored_name(entry), *contents)
        return entry


def _describe(contents: Sequence[bytes | memoryview], name: str) -> Entry:
    digest = xxhash.xxh3_64()
    for part in contents:
        digest.update(part)
    return {"basename": name, "bytes": sum(map(len, contents)), "hashes": {HASH_ALGORITHM: digest.hexdigest()}}


def _raw_bytes(entry: Entry) -> int:
    raw = entry["raw_data"]
    assert isinstance(raw, dict)
    return int(raw["bytes"])


def _stored_name(entry: Entry) -> str:
    stored = entry["zip_data"] or entry["raw_data"]
    assert isinstance(stored, dict)
    return str(stored["basename"])
