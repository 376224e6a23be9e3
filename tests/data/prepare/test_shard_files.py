from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmscale.data.prepare.split_writer import ShardFiles, _compress
from llmscale.data.shards.streaming_import import streaming_module


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
