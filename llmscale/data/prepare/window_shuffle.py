"""Shuffle the windows of a split while it is written: exact, with bounded memory, in two passes.

Window w gets a random key, and windows are written in the order of their keys: a uniform shuffle, which depends on the
seed alone and says where a window went without a list (sort the keys again). What does not fit into memory goes to one
temporary file as sorted runs; since keys are uniform, a slice of the range of keys is then about equally long in every
run, and slice after slice is read from all runs and sorted. So it takes as much disk as the windows, and reads and
writes them once more. Where runs begin changes nothing, so one can be written whenever the work so far should be kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.data.order.hash64 import UInt64Array, fold64, key64
from llmscale.data.shards.set_rules import TokenDtype

#: Bytes of windows in memory that make a run; while it is sorted and written, as much again twice.
BUFFER_BYTES = 128 << 20
#: Keeps the keys apart from the sample order's, should both have one seed.
_DOMAIN = 0x5713_0A7E_55AF_F1ED

#: Windows that are copied at once.
_PIECE_WINDOWS = 1 << 12

Windows = NDArray[np.unsignedinteger]


def window_keys(first: int, count: int, seed: int) -> UInt64Array:
    """Keys of windows first .. first + count - 1; ascending keys are the order in which they are written."""
    return fold64(key64(seed, _DOMAIN), np.arange(first, first + count, dtype=np.uint64))


@dataclass(frozen=True)
class Run:
    """Windows that are written together."""

    begin: int
    """The first one."""
    windows: list[Windows]


class WindowShuffle:
    """Windows go in in the order of the text and come out shuffled, once all are in; without a seed as they went in."""

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
        #: A window as it is written, behind its key.
        self._record = np.dtype([("key", np.uint64), ("window", dtype, (window_length,))])
        self._waiting: list[Windows] = []
        self.waiting_bytes = 0
        #: The first window of each run, and of what is in memory.
        self.run_begins = run_begins or [0]
        self.num_windows = self.run_begins[-1]

    def add(self, windows: Windows) -> None:
        """Take windows [n, T + 1], which are copied."""
        self._waiting.append(windows.copy())
        self.waiting_bytes += windows.nbytes
        self.num_windows += len(windows)

    def take_run(self) -> Run:
        """What is in memory; from now on it counts as written."""
        run = Run(self.run_begins[-1], self._waiting)
        self._waiting, self.waiting_bytes = [], 0
        if run.windows:
            self.run_begins.append(self.num_windows)
        return run

    def write_run(self, run: Run) -> None:
        """Sort what `take_run` gave and make it durable. Raises OSError. May run beside `add`."""
        if not run.windows:
            return
        with open(self._scratch, "r+b" if run.begin else "wb") as file:
            # Behind it may stand half of a run that was interrupted.
            file.seek(run.begin * self._record.itemsize)
            file.truncate()
            for keys, windows in self._sorted(run):
                piece = np.empty(len(keys), self._record)
                piece["key"], piece["window"] = keys, windows
                piece.tofile(file)
            file.flush()
            os.fsync(file.fileno())

    def drain(self, first: int = 0) -> Iterator[Windows]:
        """All windows in their new order, from place `first` on, in pieces [n, T + 1]. Raises OSError."""
        if len(self.run_begins) > 1:
            self.write_run(self.take_run())
            yield from self._merge_runs(first)
            return
        for _, windows in self._sorted(self.take_run()):
            yield windows[first:]
            first = max(0, first - len(windows))

    def _sorted(self, run: Run) -> Iterator[tuple[UInt64Array, Windows]]:
        """Keys and windows by ascending key, in pieces; those of `run` are let go of."""
        if not run.windows:
            return
        windows = np.concatenate(run.windows)
        run.windows.clear()
        keys = self._keys(run.begin, len(windows))
        order = np.argsort(keys, kind="stable")
        for start in range(0, len(order), _PIECE_WINDOWS):
            chosen = order[start : start + _PIECE_WINDOWS]
            yield keys[chosen], windows[chosen]

    def _keys(self, first: int, count: int) -> UInt64Array:
        if self._seed is None:
            return np.arange(first, first + count, dtype=np.uint64)
        return window_keys(first, count, self._seed)

    def _merge_runs(self, first: int) -> Iterator[Windows]:
        """Slices of the range of keys, of about half of BUFFER_BYTES, each gathered from all runs and sorted; those
        before place `first` are not read."""
        num_slices = -(-2 * self.num_windows * self._record.itemsize // BUFFER_BYTES)
        highest = self.num_windows if self._seed is None else 1 << 64
        limits = np.array([number * highest // num_slices for number in range(1, num_slices)], np.uint64)
        runs = [self._slice_run(begin, end, limits) for begin, end in pairwise(self.run_begins)]
        with open(self._scratch, "rb") as file:
            for number in range(num_slices):
                counts = [int(begins[number + 1] - begins[number]) for begins in runs]
                if first >= sum(counts):
                    first -= sum(counts)
                    continue
                parts = []
                for begins, count in zip(runs, counts, strict=True):
                    file.seek(int(begins[number]) * self._record.itemsize)
                    parts.append(np.fromfile(file, self._record, count))
                gathered = np.concatenate(parts)
                order = np.argsort(gathered["key"], kind="stable")[first:]
                first = 0
                # In pieces: the copies stay small.
                for start in range(0, len(order), _PIECE_WINDOWS):
                    yield gathered["window"][order[start : start + _PIECE_WINDOWS]]

    def _slice_run(self, begin: int, end: int, limits: UInt64Array) -> NDArray[np.int64]:
        """Where each slice of a run begins in the file, and where the last ends, in windows, [slices + 1]."""
        slices = np.searchsorted(limits, self._keys(begin, end - begin), side="right")
        return begin + np.concatenate([[0], np.cumsum(np.bincount(slices, minlength=len(limits) + 1))])
