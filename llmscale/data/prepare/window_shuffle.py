"""Shuffle the windows of a split while it is written: exact, with bounded memory, in two passes.

Window w gets a random key, and windows are written in the order of their keys: a uniform shuffle, which depends on the
seed alone and says where a window went without a list (sort the keys again). What does not fit into memory goes to one
temporary file as sorted runs; since keys are uniform, a slice of the range of keys is then about equally long in every
run, and slice after slice is read from all runs and sorted. So it takes as much disk as the windows, and reads and
writes them once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmscale.data.order.hash64 import UInt64Array, fold64, key64

#: Bytes of windows held in memory before a run is written; sorting holds twice as much for a moment.
BUFFER_BYTES = 256 << 20
#: Keeps the keys apart from the sample order's, should both have one seed.
_DOMAIN = 0x5713_0A7E_55AF_F1ED

#: Windows that are copied at once.
_PIECE_WINDOWS = 1 << 12

Windows = NDArray[np.unsignedinteger]
_Keyed = NDArray[np.void]


def window_keys(first: int, count: int, seed: int) -> UInt64Array:
    """Keys of windows first .. first + count - 1; ascending keys are the order in which they are written."""
    return fold64(key64(seed, _DOMAIN), np.arange(first, first + count, dtype=np.uint64))


class WindowShuffle:
    """Windows go in in the order of the text and come out shuffled, once all are in."""

    def __init__(self, scratch: Path, *, seed: int) -> None:
        """`scratch` is a file that is written only when memory does not suffice, and removed at the end."""
        self._scratch = scratch
        self._seed = seed
        self._waiting: list[Windows] = []
        self._waiting_bytes = 0
        self._num_windows = 0
        #: The first window of each run, and of what is in memory.
        self._run_begins = [0]

    def add(self, windows: Windows) -> None:
        """Take windows [n, T + 1], which are copied. Raises OSError when the disk is full."""
        self._waiting.append(windows.copy())
        self._waiting_bytes += windows.nbytes
        self._num_windows += len(windows)
        if self._waiting_bytes >= BUFFER_BYTES:
            self._write_run()

    def drain(self) -> Iterator[Windows]:
        """All windows in their new order, in pieces [n, T + 1]. Raises OSError."""
        if len(self._run_begins) == 1:
            yield from (piece["window"] for piece in self._take_waiting())
            return
        self._write_run()
        yield from (piece["window"] for piece in self._merge_runs())
        self._scratch.unlink()

    def _take_waiting(self) -> Iterator[_Keyed]:
        """What is in memory, by ascending key, in pieces."""
        if not self._waiting:
            return
        windows = np.concatenate(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        self._record = np.dtype([("key", np.uint64), ("window", windows.dtype, windows.shape[1:])])
        keys = window_keys(self._run_begins[-1], len(windows), self._seed)
        order = np.argsort(keys, kind="stable")
        for start in range(0, len(order), _PIECE_WINDOWS):
            chosen = order[start : start + _PIECE_WINDOWS]
            piece = np.empty(len(chosen), self._record)
            piece["key"], piece["window"] = keys[chosen], windows[chosen]
            yield piece

    def _write_run(self) -> None:
        with open(self._scratch, "ab") as file:
            for piece in self._take_waiting():
                piece.tofile(file)
        self._run_begins.append(self._num_windows)

    def _merge_runs(self) -> Iterator[_Keyed]:
        """Slices of the range of keys, of about half of BUFFER_BYTES, each gathered from all runs and sorted."""
        num_slices = -(-2 * self._num_windows * self._record.itemsize // BUFFER_BYTES)
        limits = np.array([number * (1 << 64) // num_slices for number in range(1, num_slices)], np.uint64)
        runs = [self._slice_run(begin, end, limits) for begin, end in pairwise(self._run_begins)]
        with open(self._scratch, "rb") as file:
            for number in range(num_slices):
                parts = []
                for begins in runs:
                    file.seek(int(begins[number]) * self._record.itemsize)
                    parts.append(np.fromfile(file, self._record, int(begins[number + 1] - begins[number])))
                gathered = np.concatenate(parts)
                yield gathered[np.argsort(gathered["key"], kind="stable")]

    def _slice_run(self, begin: int, end: int, limits: UInt64Array) -> NDArray[np.int64]:
        """Where each slice of a run begins in the file, and where the last ends, in windows, [slices + 1]."""
        slices = np.searchsorted(limits, window_keys(begin, end - begin, self._seed), side="right")
        return begin + np.concatenate([[0], np.cumsum(np.bincount(slices, minlength=len(limits) + 1))])
