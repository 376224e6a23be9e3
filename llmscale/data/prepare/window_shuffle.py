"""Shuffle the windows of a split while it is written: exact, with bounded memory, in two passes.

Window w gets a random key, and windows are written in the order of their keys: a uniform shuffle, which depends on the
seed alone and says where a window went without a list (sort the keys again). What does not fit into memory goes to one
temporary file as sorted runs; since keys are uniform, a slice of the range of keys is then about equally long in every
run, and slice after slice is read from all runs and sorted. So it takes as much disk as the windows, and reads and
writes them once more. Where runs begin changes nothing, so one can be written whenever the work so far should be kept.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmscale.data.order.permutation import UInt64Array, fold64, key64
from llmscale.data.shards.manifest import TokenDtype

#: Bytes of windows in memory that make a run; while it is sorted and written, as much again.
BUFFER_BYTES = 128 << 20
#: Keeps the keys apart from the sample order's, should both have one seed.
_DOMAIN = 0x5713_0A7E_55AF_F1ED

#: Windows that are copied at once.
_PIECE_WINDOWS = 1 << 12
_KEY_BYTES = 8

Windows = NDArray[np.unsignedinteger]


def window_keys(first: int, count: int, seed: int) -> UInt64Array:
    """Keys of windows first .. first + count - 1; ascending keys are the order in which they are written."""
    return fold64(key64(seed, _DOMAIN), np.arange(first, first + count, dtype=np.uint64))


@dataclass(frozen=True)
class Run:
    """Windows that are written together."""

    begin: int
    """The first one."""
    buffer: Windows
    """[at least num_windows, T + 1]."""
    num_windows: int


class WindowShuffle:
    """Windows go in in the order of the text and come out shuffled, once all are in; without a seed as they went in.

    Two buffers of BUFFER_BYTES take turns: memory that is touched for the first time costs more than the copy into it.
    """

    def __init__(
        self,
        scratch: Path,
        *,
        window_length: int,
        dtype: TokenDtype,
        seed: int | None,
        run_begins: list[int] | None = None,
    ) -> None:
        """`scratch` is a file that is written only when memory does not suffice, or when `write_run` is called.
        `run_begins` says what an interrupted run has left in it."""
        self._scratch = scratch
        self._seed = seed
        self._window_length, self._dtype = window_length, np.dtype(dtype)
        self._window_bytes = window_length * self._dtype.itemsize
        self._buffer = self._new_buffer(0)
        self._num_waiting = 0
        self._spare: Windows | None = None
        #: The first window of each run, and of what is in memory.
        self.run_begins = run_begins or [0]
        self.num_windows = self.run_begins[-1]

    @property
    def waiting_bytes(self) -> int:
        """Of windows in memory."""
        return self._num_waiting * self._window_bytes

    def add(self, windows: Windows) -> None:
        """Take windows [n, T + 1], which are copied."""
        end = self._num_waiting + len(windows)
        if end > len(self._buffer):
            grown = self._new_buffer(2 * end)
            grown[: self._num_waiting] = self._buffer[: self._num_waiting]
            self._buffer = grown
        self._buffer[self._num_waiting : end] = windows
        self._num_waiting = end
        self.num_windows += len(windows)

    def take_run(self) -> Run:
        """What is in memory; from now on it counts as written."""
        run = Run(self.run_begins[-1], self._buffer, self._num_waiting)
        if run.num_windows:
            self.run_begins.append(self.num_windows)
            spare, self._spare = self._spare, None
            self._buffer = self._new_buffer(0) if spare is None else spare
            self._num_waiting = 0
        return run

    def write_run(self, run: Run) -> None:
        """Sort what `take_run` gave and make it durable. Raises OSError. May run beside `add`."""
        if not run.num_windows:
            return
        keys, order = self._sort(run)
        with open(self._scratch, "r+b" if run.begin else "wb") as file:
            # Behind it may stand half of a run that was interrupted.
            file.seek(self._place(run.begin))
            file.truncate()
            file.write(keys.data)
            for windows in self._in_order(run.buffer, order):
                file.write(windows.data)
            file.flush()
            os.fsync(file.fileno())
        self._spare = run.buffer

    def drain(self, first: int = 0) -> Iterator[Windows]:
        """All windows in their new order, from place `first` on, in pieces [n, T + 1]. Raises OSError."""
        if len(self.run_begins) > 1:
            self.write_run(self.take_run())
            yield from self._merge_runs(first)
            return
        run = self.take_run()
        yield from self._in_order(run.buffer, self._sort(run)[1][first:])

    def _new_buffer(self, num_windows: int) -> Windows:
        """For at least so many; what is not written to takes no memory."""
        usual = BUFFER_BYTES * 9 // 8 // self._window_bytes + 1
        return np.empty((max(usual, num_windows), self._window_length), self._dtype)

    def _place(self, begin: int) -> int:
        """Where the run that begins with a window stands in the file: its keys, then its windows."""
        return begin * (_KEY_BYTES + self._window_bytes)

    def _sort(self, run: Run) -> tuple[UInt64Array, NDArray[np.int64]]:
        """Keys in ascending order, and the windows that have them, as rows of the buffer, [n] each."""
        keys = self._keys(run.begin, run.num_windows)
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def _in_order(self, buffer: Windows, order: NDArray[np.int64]) -> Iterator[Windows]:
        """Copies of the rows, in pieces [n, T + 1]."""
        for start in range(0, len(order), _PIECE_WINDOWS):
            yield buffer[order[start : start + _PIECE_WINDOWS]]

    def _keys(self, first: int, count: int) -> UInt64Array:
        if self._seed is None:
            return np.arange(first, first + count, dtype=np.uint64)
        return window_keys(first, count, self._seed)

    def _merge_runs(self, first: int) -> Iterator[Windows]:
        """Slices of the range of keys, of about half of BUFFER_BYTES, each gathered from all runs and sorted; those
        before place `first` are not read."""
        num_slices = -(-2 * self._place(self.num_windows) // BUFFER_BYTES)
        highest = self.num_windows if self._seed is None else 1 << 64
        limits = np.array([number * highest // num_slices for number in range(1, num_slices)], np.uint64)
        runs = list(pairwise(self.run_begins))
        places = np.stack([self._slice_run(begin, end, limits) for begin, end in runs])
        counts = np.diff(places)
        self._buffer, self._spare = self._buffer[:0].copy(), None
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
                    _read(file, keys_place + place * _KEY_BYTES, keys[rows])
                    _read(file, windows_place + place * self._window_bytes, gathered[rows])
                    done += stop - place
                yield from self._in_order(gathered, np.argsort(keys[:total], kind="stable")[first:])
                first = 0

    def _slice_run(self, begin: int, end: int, limits: UInt64Array) -> NDArray[np.int64]:
        """Where each slice begins among the windows of a run, and where the last one ends, [slices + 1]."""
        slices = np.searchsorted(limits, self._keys(begin, end - begin), side="right")
        return np.concatenate([[0], np.cumsum(np.bincount(slices, minlength=len(limits) + 1))])


def _read(file: BinaryIO, place: int, into: NDArray[np.generic]) -> None:
    """Raises OSError, also for a file that was cut."""
    if not into.nbytes:
        return
    file.seek(place)
    if file.readinto(into.data.cast("B")) != into.nbytes:  # type: ignore[attr-defined]
        raise OSError(errno.EIO, "Windows that were written are missing", file.name)
