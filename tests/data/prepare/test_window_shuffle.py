from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from llmscale.data.prepare import split_writer
from llmscale.data.prepare.split_writer import WindowShuffle, window_keys


def _shuffled(
    folder: Path, windows: np.ndarray, pieces: list[int], buffer_bytes: int, seed: int | None = 3
) -> np.ndarray:
    length, dtype = windows.shape[1], windows.dtype.name
    shuffle = WindowShuffle(folder / "scratch", window_length=length, dtype=dtype, seed=seed)
    with mock.patch.object(split_writer, "BUFFER_BYTES", buffer_bytes):
        for piece in np.split(windows, np.cumsum(pieces)[:-1]):
            shuffle.add(piece)
            if shuffle.waiting_bytes >= buffer_bytes:
                shuffle.write_run(shuffle.take_run())
        drained = list(shuffle.drain())
    return np.concatenate(drained) if drained else windows[:0]


@pytest.mark.parametrize("buffer_bytes", [200, 2000, 20_000, 1 << 30])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_windows_come_by_ascending_key_whatever_the_buffer(tmp_path: Path, buffer_bytes: int, dtype: type) -> None:
    windows = np.arange(700 * 9).reshape(700, 9).astype(dtype)
    expected = windows[np.argsort(window_keys(0, 700, 3), kind="stable")]
    shuffled = _shuffled(tmp_path, windows, [1, 99, 250, 5, 345], buffer_bytes)
    assert shuffled.dtype == dtype
    assert np.array_equal(shuffled, expected)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_windows(tmp_path: Path, count: int) -> None:
    windows = np.arange(count * 3, dtype=np.uint16).reshape(count, 3)
    for buffer_bytes in (1, 1000):
        shuffled = _shuffled(tmp_path, windows, [count] if count else [], buffer_bytes)
        assert np.array_equal(np.sort(shuffled, axis=0), windows)


def test_what_is_held_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of the merge is about half a buffer: the keys are uniform."""
    monkeypatch.setattr(split_writer, "BUFFER_BYTES", 64_000)
    shuffle = WindowShuffle(tmp_path / "scratch", window_length=1, dtype="uint32", seed=1)
    for start in range(0, 60_000, 500):
        shuffle.add(np.arange(start, start + 500, dtype=np.uint32).reshape(500, 1))
        if start % 5000 == 0:
            shuffle.write_run(shuffle.take_run())
    pieces = list(shuffle.drain())
    assert max(piece.nbytes for piece in pieces) < 64_000
    assert np.array_equal(np.sort(np.concatenate(pieces)[:, 0]), np.arange(60_000))


def test_it_is_a_uniform_shuffle() -> None:
    """No window prefers a place; seeds are independent."""
    orders = np.array([np.argsort(window_keys(0, 30, seed)) for seed in range(3000)])
    for place in (0, 14, 29):
        counts = np.bincount(orders[:, place], minlength=30)
        assert ((counts - 100) ** 2 / 100).sum() < 62  # chi-square, 29 degrees of freedom: p < 0.001
    assert abs(np.corrcoef(orders[:-1].reshape(-1), orders[1:].reshape(-1))[0, 1]) < 0.02


@pytest.mark.parametrize("seed", [None, 5])
def test_it_goes_on_where_a_process_was_killed(tmp_path: Path, seed: int | None) -> None:
    """With half a run in its file, in the middle of the merge, and in the order of the text too."""
    windows = np.arange(500 * 3, dtype=np.uint16).reshape(500, 3)

    def begin(run_begins: list[int] | None = None) -> WindowShuffle:
        return WindowShuffle(tmp_path / "scratch", window_length=3, dtype="uint16", seed=seed, run_begins=run_begins)

    killed = begin()
    for start in (0, 100, 250):
        killed.add(windows[start : start + 150] if start else windows[:100])
        killed.write_run(killed.take_run())
    begins = killed.run_begins[:-1]
    assert begins == [0, 100, 250]
    for first in (0, 1, 137, 499, 500):
        again = begin(list(begins))
        again.add(windows[250:])
        with mock.patch.object(split_writer, "BUFFER_BYTES", 1000):
            drained = np.concatenate([windows[:0], *again.drain(first)])
        order = np.arange(500) if seed is None else np.argsort(window_keys(0, 500, seed), kind="stable")
        assert np.array_equal(drained, windows[order][first:])


def test_a_buffer_that_is_written_is_used_again(tmp_path: Path) -> None:
    """What goes in beside the writing does not change what is written."""
    shuffle = WindowShuffle(tmp_path / "scratch", window_length=2, dtype="uint16", seed=None)
    windows = np.arange(800, dtype=np.uint16).reshape(400, 2)
    runs = []
    for start in range(0, 400, 100):
        shuffle.add(windows[start : start + 100])
        if runs:
            shuffle.write_run(runs[-1])
        runs.append(shuffle.take_run())
    shuffle.write_run(runs[-1])
    assert len({run.buffer.ctypes.data for run in runs}) == 2
    assert np.array_equal(np.concatenate(list(shuffle.drain())), windows)
