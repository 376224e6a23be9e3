"""Collect one split's windows of T + 1 tokens, shuffle them, and write MDS shards.

The shuffle is exact, in two passes with bounded memory: windows are written in the order of random keys, a function of
the seed and the window's number, so a window's place can be computed again. Windows that do not fit into memory go to
one temporary file as sorted runs. As keys are uniform, a slice of the key range is about equally long in every run;
slice after slice is read from all runs and sorted. It needs as much disk as the windows, and reads and writes them once
more. A run can be written at any time without changing the result.

Shards are byte for byte what Streaming's MDSWriter writes, without a Python step per window. All samples have one size,
so each shard's windows are known beforehand: shards are made in parallel, and an interrupted run's are kept.
"""

from __future__ import annotations

import collections
import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, TypedDict, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmscale.data.order.permutation import UInt64Array, fold64, key64
from llmscale.data.prepare.packing import Packing, PackingState, Tokens, Windows
from llmscale.data.shards.manifest import HASH_ALGORITHM, ShardInfo, SplitManifest, TokenDtype, shard_columns
from llmscale.data.shards.token_shards import are_targets, ids_of, to_rows
from llmscale.data.shards.verify_shards import INDEX_NAME
from llmscale.files.atomic_write import write_durably

#: Shards in memory during compression and writing.
_MOST_UNDER_WAY = 2
#: Bytes of windows in memory that make a run; sorting and writing it takes as much again.
BUFFER_BYTES = 128 << 20
#: Separates the keys from the sample order's at equal seeds.
_DOMAIN = 0x5713_0A7E_55AF_F1ED
#: Windows copied at once.
_PIECE_WINDOWS = 1 << 12
_KEY_BYTES = 8
#: Tokens that are collected before windows are cut.
_BUFFER_TOKENS = 1 << 18


class _File(TypedDict):
    """A file in Streaming's index.json."""

    basename: str
    bytes: int
    hashes: dict[str, str]


class Entry(TypedDict):
    """A shard in Streaming's index.json, which has the columns beside these keys."""

    samples: int
    raw_data: _File
    zip_data: _File | None


class ShardFiles:
    """The shards of one split, written in order."""

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
        has_mask: bool = False,
    ) -> None:
        """`journal` is a file beside the dataset that lists finished shards. With `has_mask`, windows have marks of
        their targets. `keep` gets each of them, also those of an
        interrupted run: a remote dataset's are uploaded and removed."""
        self._folder = folder
        self._journal = journal
        self._compression = compression
        self._keep = keep
        self._config: dict[str, object] = {
            "version": 2,
            "format": "mds",
            "compression": compression or None,
            "hashes": [HASH_ALGORITHM],
            "size_limit": shard_bytes,
            **shard_columns(dtype, seq_len, has_mask=has_mask),
        }
        self._config_data = json.dumps(self._config, sort_keys=True).encode()
        self._dtype = dtype
        self._has_mask = has_mask
        window_bytes = (seq_len + 1) * (np.dtype(dtype).itemsize + has_mask)
        # A shard begins with its number of samples, their offsets and one more, and the configuration.
        self.windows_per_shard = (shard_bytes - 8 - len(self._config_data)) // (window_bytes + 4)

    def write(self, windows_from: Callable[[int], Iterable[Windows]], done: Callable[[int], None]) -> list[Entry]:
        """Write all missing shards, then the index, and return its entries. `windows_from(k)` yields all windows from
        the k-th on in pieces [n, T + 1]; `done` gets the bytes of each shard. Raises OSError."""
        self._folder.mkdir(exist_ok=True)
        for leftover in self._folder.glob(".*.partial"):
            leftover.unlink()
        entries = self._load_whole()
        for entry in entries:
            self._keep(self._stored(entry))
            done(entry["raw_data"]["bytes"])
        first = len(entries) * self.windows_per_shard
        with ThreadPoolExecutor(_MOST_UNDER_WAY) as pool, open(self._journal, "ab", buffering=0) as journal:
            under_way: collections.deque[Future[Entry]] = collections.deque()

            def finish_first() -> None:
                entry = under_way.popleft().result()
                journal.write(json.dumps(entry).encode() + b"\n")
                os.fsync(journal.fileno())
                entries.append(entry)
                self._keep(self._stored(entry))
                done(entry["raw_data"]["bytes"])

            for number, windows in enumerate(self._grouped(windows_from(first)), start=len(entries)):
                under_way.append(pool.submit(self._write_shard, number, windows))
                if len(under_way) == _MOST_UNDER_WAY:
                    finish_first()
            while under_way:
                finish_first()
        write_durably(self._folder / INDEX_NAME, json.dumps({"version": 2, "shards": entries}, sort_keys=True))
        return entries

    def _load_whole(self) -> list[Entry]:
        """Return the entries of shards that an interrupted run has written, and cut a torn line off the journal."""
        if self._journal.exists():
            contents = self._journal.read_bytes()
        else:
            contents = b""
        complete = contents[: contents.rfind(b"\n") + 1]
        self._journal.write_bytes(complete)
        return [json.loads(line) for line in complete.splitlines()]

    def _grouped(self, pieces: Iterable[Windows]) -> Iterator[list[Windows]]:
        """Yield the windows of each shard."""
        waiting: list[Windows] = []
        missing = self.windows_per_shard
        for piece in pieces:
            while len(piece):
                part = piece[:missing]
                piece = piece[missing:]
                waiting.append(part)
                missing -= len(part)
                if not missing:
                    yield waiting
                    waiting = []
                    missing = self.windows_per_shard
        if waiting:
            yield waiting

    def _stored(self, entry: Entry) -> Path:
        return self._folder / (entry["zip_data"] or entry["raw_data"])["basename"]

    def _write_shard(self, number: int, parts: list[Windows]) -> Entry:
        if self._has_mask:
            parts = [to_rows(part, self._dtype) for part in parts]
        num_samples = sum(map(len, parts))
        window_bytes = parts[0].shape[1] * parts[0].itemsize
        first = 4 + 4 * (num_samples + 1) + len(self._config_data)
        offsets = (first + window_bytes * np.arange(num_samples + 1, dtype=np.int64)).astype("<u4")
        head = np.uint32(num_samples).tobytes() + offsets.tobytes() + self._config_data
        contents: list[bytes | memoryview] = [head, *(np.ascontiguousarray(part).data.cast("B") for part in parts)]
        name = f"shard.{number:05}.mds"
        raw = _describe_contents(contents, name)
        zip_info = None
        if self._compression:
            contents = [_compress(b"".join(contents))]
            zip_info = _describe_contents(contents, f"{name}.{self._compression}")
        entry = cast(Entry, {"samples": num_samples, "raw_data": raw, "zip_data": zip_info, **self._config})
        write_durably(self._stored(entry), *contents)
        return entry


def _compress(contents: bytes) -> bytes:
    """Return a zstd frame as Streaming's writer makes it: level 3, by a worker thread, whatever their number."""
    import zstandard

    return zstandard.ZstdCompressor(level=3, threads=1).compress(contents)


def _describe_contents(contents: Sequence[bytes | memoryview], name: str) -> _File:
    digest = xxhash.xxh3_64()
    for part in contents:
        digest.update(part)
    return {"basename": name, "bytes": sum(map(len, contents)), "hashes": {HASH_ALGORITHM: digest.hexdigest()}}


def window_keys(first: int, count: int, seed: int) -> UInt64Array:
    """Return the keys of windows first .. first + count - 1, which are written in ascending order of keys."""
    return fold64(key64(seed, _DOMAIN), np.arange(first, first + count, dtype=np.uint64))


@dataclass(frozen=True)
class Run:
    """Windows that are sorted and written together."""

    begin: int
    """Number of the first window."""
    buffer: Windows
    """[at least num_windows, T + 1]."""
    num_windows: int


class WindowShuffle:
    """Takes windows in the order of the text and returns them shuffled, or in the same order without a seed."""

    def __init__(
        self,
        scratch: Path,
        *,
        window_length: int,
        dtype: TokenDtype,
        seed: int | None,
        run_begins: list[int] | None = None,
    ) -> None:
        """`scratch` is a file that is written only if memory does not suffice or `write_run` is called. `run_begins`
        describes its contents after an interruption."""
        self._scratch = scratch
        self._seed = seed
        self._window_length = window_length
        self._dtype = np.dtype(dtype)
        self._window_bytes = window_length * self._dtype.itemsize
        self._buffer = self._new_buffer(0)
        self._num_waiting = 0
        #: First window of each run, and of the windows in memory.
        self.run_begins = run_begins or [0]
        self.num_windows = self.run_begins[-1]

    @property
    def waiting_bytes(self) -> int:
        """Bytes of windows in memory."""
        return self._num_waiting * self._window_bytes

    def add(self, windows: Windows) -> None:
        """Add windows [n, T + 1], which are copied."""
        end = self._num_waiting + len(windows)
        if end > len(self._buffer):
            grown = self._new_buffer(2 * end)
            grown[: self._num_waiting] = self._buffer[: self._num_waiting]
            self._buffer = grown
        self._buffer[self._num_waiting : end] = windows
        self._num_waiting = end
        self.num_windows += len(windows)

    def take_run(self) -> Run:
        """Return the windows in memory, which count as written from now on."""
        run = Run(self.run_begins[-1], self._buffer, self._num_waiting)
        if run.num_windows:
            self.run_begins.append(self.num_windows)
            self._buffer = self._new_buffer(0)
            self._num_waiting = 0
        return run

    def write_run(self, run: Run) -> None:
        """Sort a run and write it durably; may run concurrently with `add`. Raises OSError."""
        if not run.num_windows:
            return
        keys, order = self._sort(run)
        with open(self._scratch, "r+b" if run.begin else "wb") as file:
            # An interrupted write may have left half a run.
            file.seek(self._place(run.begin))
            file.truncate()
            file.write(keys.data)
            for windows in self._in_order(run.buffer, order):
                file.write(windows.data)
            file.flush()
            os.fsync(file.fileno())

    def drain(self, first: int = 0) -> Iterator[Windows]:
        """Yield all windows in their new order, from place `first` on, in pieces [n, T + 1]. Raises OSError."""
        if len(self.run_begins) > 1:
            self.write_run(self.take_run())
            yield from self._merge_runs(first)
            return
        run = self.take_run()
        yield from self._in_order(run.buffer, self._sort(run)[1][first:])

    def _new_buffer(self, num_windows: int) -> Windows:
        """Return a buffer for at least `num_windows`; untouched parts take no memory."""
        usual = BUFFER_BYTES * 9 // 8 // self._window_bytes + 1
        return np.empty((max(usual, num_windows), self._window_length), self._dtype)

    def _place(self, begin: int) -> int:
        """Return the file offset of the run that begins with a window: its keys, then its windows."""
        return begin * (_KEY_BYTES + self._window_bytes)

    def _sort(self, run: Run) -> tuple[UInt64Array, NDArray[np.int64]]:
        """Return the sorted keys and the buffer rows in that order, [n] each."""
        keys = self._keys(run.begin, run.num_windows)
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def _in_order(self, buffer: Windows, order: NDArray[np.int64]) -> Iterator[Windows]:
        """Yield copies of the rows in pieces [n, T + 1]."""
        for start in range(0, len(order), _PIECE_WINDOWS):
            yield buffer[order[start : start + _PIECE_WINDOWS]]

    def _keys(self, first: int, count: int) -> UInt64Array:
        if self._seed is None:
            return np.arange(first, first + count, dtype=np.uint64)
        return window_keys(first, count, self._seed)

    def _merge_runs(self, first: int) -> Iterator[Windows]:
        """Yield the windows slice by slice of the key range: each slice, about half of BUFFER_BYTES, is read from all
        runs and sorted. Slices before place `first` are not read."""
        num_slices = -(-2 * self._place(self.num_windows) // BUFFER_BYTES)
        highest = self.num_windows if self._seed is None else 1 << 64
        limits = np.array([number * highest // num_slices for number in range(1, num_slices)], np.uint64)
        runs = list(pairwise(self.run_begins))
        places = np.stack([self._slice_run(begin, end, limits) for begin, end in runs])
        counts = np.diff(places)
        self._buffer = self._buffer[:0].copy()
        gathered = np.empty((int(counts.sum(axis=0).max()), self._window_length), self._dtype)
        keys = np.empty(len(gathered), np.uint64)
        with open(self._scratch, "rb") as file:
            for number in range(num_slices):
                total = int(counts[:, number].sum())
                if first >= total:
                    first -= total
                    continue
                done = 0
                for (begin, end), (place, stop) in zip(runs, places[:, number : number + 2].tolist(), strict=True):
                    rows = slice(done, done + stop - place)
                    keys_place = self._place(begin)
                    windows_place = keys_place + (end - begin) * _KEY_BYTES
                    _read_into(file, keys_place + place * _KEY_BYTES, keys[rows])
                    _read_into(file, windows_place + place * self._window_bytes, gathered[rows])
                    done += stop - place
                yield from self._in_order(gathered, np.argsort(keys[:total], kind="stable")[first:])
                first = 0

    def _slice_run(self, begin: int, end: int, limits: UInt64Array) -> NDArray[np.int64]:
        """Return the offset of each slice among a run's windows, and the end of the last, [slices + 1]."""
        slices = np.searchsorted(limits, self._keys(begin, end - begin), side="right")
        return np.concatenate([[0], np.cumsum(np.bincount(slices, minlength=len(limits) + 1))])


def _read_into(file: BinaryIO, place: int, into: NDArray[np.generic]) -> None:
    """Read bytes at an offset into an array. Raises OSError, also for a truncated file."""
    if not into.nbytes:
        return
    file.seek(place)
    if file.readinto(into.data.cast("B")) != into.nbytes:  # type: ignore[attr-defined]
        raise OSError(errno.EIO, "windows are missing in the temporary file", file.name)


@dataclass
class SplitState:
    """Content of a split besides the windows on disk, to resume from."""

    packing: PackingState
    """Tokens that are in no window."""
    counts: NDArray[np.int64]
    """Occurrences of each token, [vocab_size]."""
    num_documents: int
    num_text_bytes: int
    run_begins: list[int]
    """First window of each run on disk; see WindowShuffle."""
    num_targets: int = 0
    """Targets among the tokens, if they have marks."""
    target_counts: NDArray[np.int64] | None = None
    """Occurrences of each token as a target of the windows, [vocab_size]; None if they are not counted."""


class SplitWriter:
    """Writes one split, document after document, each followed by end-of-text.

    A packing cuts documents into windows. Sample k is the k-th window by the keys of `shuffle_seed`, or window k if
    that is None.
    """

    def __init__(
        self,
        files: ShardFiles,
        scratch: Path,
        build_packing: Callable[[PackingState], Packing],
        *,
        seq_len: int,
        vocab_size: int,
        dtype: TokenDtype,
        shuffle_seed: int | None,
        state: SplitState | None,
        counts_targets: bool,
        has_marks: bool = False,
    ) -> None:
        """`scratch` is a file for windows that do not fit into memory. `state` is from an interrupted run.

        With `counts_targets` frequencies and bytes of targets are known; it takes as long as counting all tokens. With
        `has_marks`, `dtype` is uint32 and tokens have the marks of targets (token_shards.py).
        """
        self._files = files
        self._has_marks = has_marks
        self._counts_targets = counts_targets
        self._seq_len = seq_len
        self._dtype = np.dtype(dtype)
        state = state or SplitState(PackingState(np.zeros(0, dtype)), np.zeros(vocab_size, np.int64), 0, 0, [0])
        self._packing = build_packing(state.packing)
        self._waiting: list[Tokens] = []
        self._num_waiting = 0
        self._counts = state.counts
        self.num_targets = state.num_targets
        if state.target_counts is None:
            self._target_counts = np.zeros(vocab_size, np.int64)
        else:
            self._target_counts = state.target_counts
        self.num_documents = state.num_documents
        self._num_text_bytes = state.num_text_bytes
        self._shuffle = WindowShuffle(
            scratch, window_length=seq_len + 1, dtype=dtype, seed=shuffle_seed, run_begins=state.run_begins
        )

    @property
    def waiting_bytes(self) -> int:
        """Bytes of windows in memory."""
        return self._shuffle.waiting_bytes

    @property
    def num_windows(self) -> int:
        """Windows of the split, after `end_text`."""
        return self._shuffle.num_windows

    @property
    def num_window_bytes(self) -> int:
        """Bytes of these windows."""
        return self.num_windows * (self._seq_len + 1) * self._dtype.itemsize

    @property
    def num_tokens(self) -> int:
        """Tokens of the documents, after `end_text`."""
        return int(self._counts.sum())

    def add_documents(self, tokens: Tokens, num_documents: int, num_text_bytes: int) -> None:
        """Append documents' tokens in the split's dtype, each document with its end-of-text token."""
        self._waiting.append(tokens)
        self._num_waiting += len(tokens)
        self.num_documents += num_documents
        self._num_text_bytes += num_text_bytes
        if self._num_waiting >= max(_BUFFER_TOKENS, self._seq_len + 1):
            self._cut_windows()

    def end_text(self) -> None:
        """Cut the last windows."""
        self._cut_windows()
        self._add_windows(self._packing.finish())

    def take_run(self) -> tuple[Run, SplitState]:
        """Return the windows in memory, for `write_run`, and the split's state once they are written."""
        self._cut_windows()
        run = self._shuffle.take_run()
        begins = list(self._shuffle.run_begins)
        state = SplitState(
            self._packing.state(),
            self._counts.copy(),
            self.num_documents,
            self._num_text_bytes,
            begins,
            self.num_targets,
            self._target_counts.copy() if self._counts_targets else None,
        )
        return run, state

    def write_run(self, run: Run) -> None:
        """Write a run; may run concurrently with `add_documents`. Raises OSError."""
        self._shuffle.write_run(run)

    def finish(self, done: Callable[[int], None], token_bytes: NDArray[np.int64]) -> SplitManifest:
        """Write the shards and the index, and pass the bytes of each shard to `done`.

        `token_bytes` are the bytes of each token's text, [vocab_size]. Tokens after the last window are the tail.
        Raises OSError.
        """
        entries = self._files.write(self._shuffle.drain, done)
        present = np.flatnonzero(self._counts)
        return SplitManifest(
            num_documents=self.num_documents,
            num_text_bytes=self._num_text_bytes,
            num_tokens=self.num_tokens,
            num_samples=self.num_windows,
            tail_tokens=self._packing.num_tail,
            max_token_id=int(present[-1]) if present.size else 0,
            unigram_entropy_nats=unigram_entropy_nats(self._target_counts if self._has_marks else self._counts),
            shards=tuple(map(_describe, entries)),
            cropped_tokens=self._packing.num_cropped,
            num_target_bytes=self._num_target_bytes(token_bytes),
        )

    def _num_target_bytes(self, token_bytes: NDArray[np.int64]) -> int | None:
        """Return the bytes of the windows' targets: their part of the text, as the tokens' own lengths divide it."""
        if self._has_marks or not self._counts_targets:
            return None
        of_targets = int(self._target_counts @ token_bytes)
        of_all = int(self._counts @ token_bytes)
        if of_all:
            return round(self._num_text_bytes * of_targets / of_all)
        return 0

    def _add_windows(self, windows: Windows) -> None:
        """Add windows [n, T + 1], and count their targets: in text all tokens but the first of each."""
        if self._counts_targets:
            targets = windows[:, 1:]
            if self._has_marks:
                targets = ids_of(targets[are_targets(targets)])
            else:
                targets = targets.ravel()
            self._target_counts += np.bincount(targets, minlength=len(self._target_counts))
        self._shuffle.add(windows)

    def _cut_windows(self) -> None:
        """Count the waiting tokens and pack them."""
        tokens = np.concatenate([np.zeros(0, self._dtype), *self._waiting])
        self._waiting = []
        self._num_waiting = 0
        ids = tokens
        if self._has_marks:
            ids = ids_of(tokens)
            self.num_targets += int(are_targets(tokens).sum())
        self._counts += np.bincount(ids, minlength=len(self._counts))
        self._add_windows(self._packing.cut(tokens))


def _describe(entry: Entry) -> ShardInfo:
    raw = entry["raw_data"]
    return ShardInfo(raw["basename"], raw["bytes"], raw["hashes"][HASH_ALGORITHM], entry["samples"])


def unigram_entropy_nats(counts: NDArray[np.int64]) -> float:
    """Return - sum p ln p over token frequencies p: the cross-entropy, in nats, of a model that knows only these."""
    frequencies = counts[counts > 0] / max(int(counts.sum()), 1)
    return float(-(frequencies * np.log(frequencies)).sum())
