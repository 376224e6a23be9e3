"""Shards are Streaming's, byte by byte; windows are shuffled exactly, with bounded memory."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from llmscale.data.prepare import split_writer
from llmscale.data.prepare.sources.tokens import streaming_module
from llmscale.data.prepare.split_writer import ShardFiles, WindowShuffle, _compress, window_keys


@pytest.mark.parametrize("compression", ["", "zstd"])
@pytest.mark.parametrize(("dtype", "num_windows"), [("uint16", 95), ("uint32", 60), ("uint32", 1), ("uint16", 0)])
def test_shards_and_index_are_those_of_streamings_own_writer(
    tmp_path: Path, compression: str, dtype: str, num_windows: int
) -> None:
    windows = np.random.default_rng(0).integers(0, 60_000, (num_windows, 17)).astype(dtype)
    theirs = streaming_module("format.mds").MDSWriter(
        columns={"tokens": f"ndarray:{dtype}:17"},
        out=str(tmp_path / "theirs"),
        compression=compression or None,
        hashes=["xxh3_64"],
        size_limit=1200,
    )
    for window in windows:
        theirs.write({"tokens": window})
    theirs.finish()
    ours = ShardFiles(
        tmp_path / "ours",
        tmp_path / "journal",
        seq_len=16,
        dtype=dtype,  # type: ignore[arg-type]
        shard_bytes=1200,
        compression=compression,
    )
    sizes: list[int] = []
    ours.write(lambda first: (windows[k : k + 7] for k in range(first, len(windows), 7)), sizes.append)
    assert _files(tmp_path / "theirs") == _files(tmp_path / "ours")
    assert len(sizes) == sum("mds" in name for name in _files(tmp_path / "ours"))


def test_a_compressed_shard_of_some_megabytes_is_streamings_too(tmp_path: Path) -> None:
    """Streaming's library compresses longer contents in threads, which makes other frames."""
    contents = np.random.default_rng(0).integers(0, 5000, 3 << 20).astype(np.uint16).tobytes()
    assert _compress(contents) == streaming_module("compression").compress("zstd", contents)


def test_whole_shards_are_kept_and_what_was_torn_is_not(tmp_path: Path) -> None:
    windows = np.arange(95 * 17, dtype=np.uint32).reshape(95, 17)

    def write(folder: str, most: int) -> list[int]:
        files = ShardFiles(
            tmp_path / folder,
            tmp_path / f"{folder}.journal",
            seq_len=16,
            dtype="uint32",
            shard_bytes=1200,
            compression="",
        )
        asked: list[int] = []

        def windows_from(first: int) -> list[np.ndarray]:
            asked.append(first)
            return [windows[first:most]]

        files.write(windows_from, lambda num_bytes: None)
        return [*asked, files.windows_per_shard]

    write("whole", 95)
    [_, per_shard] = write("killed", 40)
    journal = tmp_path / "killed.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    # The last one was not full: a killed run has no such shard.
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    (tmp_path / "killed" / ".shard.00001.mds.abcd.partial").write_bytes(b"half")
    assert write("killed", 95) == [(len(lines) - 1) * per_shard, per_shard]
    assert _files(tmp_path / "whole") == _files(tmp_path / "killed")


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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


def test_runs_are_written_beside_new_windows(tmp_path: Path) -> None:
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
    assert np.array_equal(np.concatenate(list(shuffle.drain())), windows)
