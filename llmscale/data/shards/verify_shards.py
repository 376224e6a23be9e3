"""Check that every shard file exists with the size and the hash that the manifest states."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmscale.data.shards.manifest import HASH, Manifest, ShardInfo, get_split
from llmscale.errors import DataError
from llmscale.untrusted.documents import Rules, load_json, parse_json
from llmscale.untrusted.paths import RefusedFile, check_regular, open_regular, unreadable_as

INDEX_NAME = "index.json"
_CHUNK_BYTES = 1 << 20
_REMEDY = "Restore it from a copy, or prepare the dataset again with --overwrite."
#: Limit of one shard's entry in an index; Streaming writes 700 bytes.
_ENTRY_BYTES = 4096


def shard_files(folder: Path, split: str, manifest: Manifest) -> list[ShardFile]:
    """Return the files of a split's shards as its index.json describes them; see parse_index.

    Raises DataError when the index is missing, damaged or describes other shards or another column.
    """
    path = folder / split / INDEX_NAME
    try:
        index = load_json(path, _rules(split, manifest))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path} is missing. {_REMEDY}") from None
    return _check_index(index, folder, split, manifest, str(path))


def parse_index(contents: bytes, split: str, manifest: Manifest, where: str) -> None:
    """Check that an index.json describes the shards of the manifest.

    Only the size and hash of compressed shards are taken from the index itself. All else is known from the manifest:
    names, column encodings (one of which, `pkl`, runs code), formats and algorithms. An index that differs is refused.
    Raises DataError.
    """
    _check_index(parse_json(contents, _rules(split, manifest), where), Path(), split, manifest, where)


def _rules(split: str, manifest: Manifest) -> Rules:
    num_shards = len(get_split(manifest, split, "the dataset").shards)
    return Rules(DataError, _REMEDY, max_bytes=_ENTRY_BYTES * (num_shards + 16))


def _check_index(index: dict[str, object], folder: Path, split: str, manifest: Manifest, where: str) -> list[ShardFile]:
    shards = get_split(manifest, split, where).shards
    listed = index.get("shards")
    files = []
    if not isinstance(listed, list):
        raise DataError(f"{where} is damaged: it lists no shards. {_REMEDY}")
    if len(listed) != len(shards):
        raise DataError(
            f"{where} does not describe the shards of the manifest beside it: {len(listed)} instead of {len(shards)}. "
            f"{_REMEDY}"
        )
    for number, (entry, shard) in enumerate(zip(listed, shards, strict=True)):
        if not isinstance(entry, dict):
            raise DataError(f"{where}, shard {number} is damaged: no object. {_REMEDY}")
        expected = _expected_entry(shard, manifest)
        if manifest.compression:
            expected["zip_data"] = _parse_zip_data(entry.get("zip_data"), shard, manifest, where)
        for key in expected:
            # Streaming also stores the writer's limit on a shard's size.
            if key not in entry or entry[key] != expected[key]:
                raise DataError(
                    f"{where} does not describe the shards of the manifest beside it: {key} of shard {number} is "
                    f"{str(entry.get(key))[:80]!r} instead of {str(expected[key])[:80]!r}. {_REMEDY}"
                )
        stored = expected["zip_data"] or expected["raw_data"]
        path = folder / split / stored["basename"]
        files.append(ShardFile(shard, path, stored["bytes"], stored["hashes"][manifest.hash_algorithm]))
    return files


def _expected_entry(shard: ShardInfo, manifest: Manifest) -> dict[str, Any]:
    """Return a shard's index entry as the manifest implies it; for a compressed one without `zip_data`."""
    return {
        **manifest.columns,
        "compression": manifest.compression or None,
        "format": "mds",
        "hashes": [manifest.hash_algorithm],
        "raw_data": {
            "basename": shard.name,
            "bytes": shard.bytes,
            "hashes": {manifest.hash_algorithm: shard.hash},
        },
        "samples": shard.num_samples,
        "version": 2,
        "zip_data": None,
    }


def _parse_zip_data(entry: object, shard: ShardInfo, manifest: Manifest, where: str) -> dict[str, object]:
    """Return size and hash of a shard's compressed file, whose name follows from the shard's."""
    name = f"{shard.name}.{manifest.compression}"
    match entry:
        case {"basename": str(basename), "bytes": int(num_bytes), "hashes": {manifest.hash_algorithm: str(digest)}}:
            # zstd adds less than this to incompressible data.
            if basename == name and 0 < num_bytes <= shard.bytes + shard.bytes // 128 + 1024 and HASH.fullmatch(digest):
                return {"basename": name, "bytes": num_bytes, "hashes": {manifest.hash_algorithm: digest}}
    raise DataError(f"{where} is damaged: {str(entry)[:200]!r} does not describe the file {name}. {_REMEDY}")


@dataclass(frozen=True)
class ShardFile:
    """The file of a shard as stored: itself or compressed."""

    shard: ShardInfo
    path: Path
    bytes: int
    hash: str

    @property
    def is_compressed(self) -> bool:
        return self.path.name != self.shard.name


def check_files(folder: Path, split: str, manifest: Manifest) -> list[ShardFile]:
    """Return the files of a split's shards. Checks with one stat per shard that it is a regular file of the right size.

    Raises DataError naming the first that is not.
    """
    files = shard_files(folder, split, manifest)
    for file in files:
        check_size(file.path, file.bytes)
    return files


def check_size(path: Path, expected_bytes: int) -> os.stat_result:
    """Return the status of a shard's file. Raises DataError if it is missing, not a file, or of another size."""
    try:
        status = check_regular(path, follow_links=True)
        if status.st_size != expected_bytes:
            open_regular(path).close()  # names a Git LFS pointer
    except FileNotFoundError:
        raise DataError(f"Shard {path} is missing. {_REMEDY}") from None
    except RefusedFile as error:
        raise DataError(f"Shard {path} {error.strerror}. {_REMEDY}") from None
    except OSError as error:
        raise DataError(f"Shard {path} cannot be read: {error.strerror}. {_REMEDY}") from None
    if status.st_size != expected_bytes:
        change = "truncated" if status.st_size < expected_bytes else "too long"
        raise DataError(f"Shard {path} is {change}: {status.st_size:,} bytes instead of {expected_bytes:,}. {_REMEDY}")
    return status


def check_hash(path: Path, algorithm: str, expected_hash: str) -> None:
    """Read and hash a file. Raises DataError when it is unreadable or altered."""
    with unreadable_as(DataError, f"Shard {path}", _REMEDY):
        actual = hash_file(path, algorithm)
    if actual != expected_hash:
        raise DataError(
            f"Shard {path} was altered: its {algorithm} is {actual}, the manifest says {expected_hash}. {_REMEDY}"
        )


def hash_file(path: Path, algorithm: str, progress: Callable[[int], object] = lambda num_bytes: None) -> str:
    """Return the hexadecimal hash of a regular file by sha256 or an algorithm of xxhash. `progress` gets the bytes of
    each chunk. Raises OSError."""
    import xxhash

    digest = getattr(hashlib if algorithm == "sha256" else xxhash, algorithm)()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    text: str = digest.hexdigest()
    return text


def check_offsets(path: Path, shard: ShardInfo, manifest: Manifest) -> None:
    """Check that a shard's offsets state consecutive windows of the right number and length.

    Streaming trusts these offsets and would read up to 4 GiB for a sample. Raises DataError.
    """
    with unreadable_as(DataError, f"Shard {path}", _REMEDY), open_regular(path) as file:
        head = np.frombuffer(file.read(4 * (shard.num_samples + 2)), "<u4").astype(np.int64)
    offsets = head[1:]
    first = shard.bytes - shard.num_samples * manifest.window_bytes
    expected = first + manifest.window_bytes * np.arange(shard.num_samples + 1)
    if len(head) != shard.num_samples + 2 or head[0] != shard.num_samples or not np.array_equal(offsets, expected):
        raise DataError(f"Shard {path} does not hold {shard.num_samples:,} windows of {manifest.seq_len + 1} tokens.")


def find_damage(folder: Path, split: str, manifest: Manifest) -> Iterator[tuple[ShardFile, str]]:
    """Read every file of a split and yield it with its fault, or an empty string."""
    for file in shard_files(folder, split, manifest):
        try:
            check_size(file.path, file.bytes)
            check_hash(file.path, manifest.hash_algorithm, file.hash)
        except DataError as error:
            yield file, str(error)
        else:
            yield file, ""
