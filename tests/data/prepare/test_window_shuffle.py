from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from llmscale.data.prepare import window_shuffle
from llmscale.data.prepare.window_shuffle import WindowShuffle, window_keys


def _shuffled(folder: Path, windows: np.ndarray, pieces: list[int], buffer_bytes: int, seed: int = 3) -> np.ndarray:
    shuffle = WindowShuffle(folder / "scratch", seed=seed)
    with mock.patch.object(window_shuffle, "BUFFER_BYTES", buffer_bytes):
        for piece in np.split(windows, np.cumsum(pieces)[:-1]):
            shuffle.add(piece)
        found = list(shuffle.drain())
    assert not list(folder.iterdir())
    return np.concatenate(found) if found else windows[:0]


@pytest.mark.parametrize("buffer_bytes", [200, 2000, 20_000, 1 << 30])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_windows_come_by_ascending_key_whatever_the_buffer(tmp_path: Path, buffer_bytes: int, dtype: type) -> None:
    windows = np.arange(700 * 9).reshape(700, 9).astype(dtype)
    expected = windows[np.argsort(window_keys(0, 700, 3), kind="stable")]
    found = _shuffled(tmp_path, windows, [1, 99, 250, 5, 345], buffer_bytes)
    assert found.dtype == dtype
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_windows(tmp_path: Path, count: int) -> None:
    windows = np.arange(count * 3, dtype=np.uint16).reshape(count, 3)
    for buffer_bytes in (1, 1000):
        found = _shuffled(tmp_path, windows, [count] if count else [], buffer_bytes)
        assert np.array_equal(np.sort(found, axis=0), windows)


def test_what_is_held_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of the merge is about half a buffer: the keys are uniform."""
    monkeypatch.setattr(window_shuffle, "BUFFER_BYTES", 64_000)
    shuffle = WindowShuffle(tmp_path / "scratch", seed=1)
    for start in range(0, 60_000, 500):
        shuffle.add(np.arange(start, start + 500, dtype=np.uint32).reshape(500, 1))
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
