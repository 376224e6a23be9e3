"""Is every shard there, as long as it should be and unaltered? Checked against the manifest, file by file."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmscale.data.manifest import Manifest, ShardInfo, get_split
from llmscale.errors import DataError

INDEX_NAME = "index.json"
_CHUNK_BYTES = 1 << 20
_REMEDY = "Restore it from a copy, or prepare the set again with --overwrite."

#: One shard's entry in Streaming's index.json.
IndexEntry = dict[str, object]


def load_index(folder: Path, split: str, manifest: Manifest) -> list[IndexEntry]:
    """The entries of a split's index.json, each checked against the manifest.

    Raises DataError when the index is missing, damaged or describes other shards or another column.
    """
    path = folder / split / INDEX_NAME
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["shards"]
        described = [_describe(entry, manifest.hash_algorithm) for entry in entries]
    except FileNotFoundError:
        raise DataError(f"{path} is missing. {_REMEDY}") from None
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}. {_REMEDY}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}). {_REMEDY}") from None
    expected = [(shard, manifest.column_encoding) for shard in get_split(manifest, split, str(folder)).shards]
    if described != expected:
        raise DataError(f"{path} does not describe the shards of the manifest beside it. {_REMEDY}")
    return list(entries)


def _describe(entry: dict, algorithm: str) -> tuple[ShardInfo, str]:
    raw = entry["raw_data"]
    shard = ShardInfo(raw["basename"], raw["bytes"], raw["hashes"][algorithm], entry["samples"])
    if entry["column_names"] != ["tokens"] or entry["format"] != "mds" or entry["version"] != 2:
        raise ValueError("not one column 'tokens' in MDS version 2")
    return shard, entry["column_encodings"][0]


@dataclass(frozen=True)
class StoredFile:
    """A file that must be there: the shard itself, or its compressed form."""

    shard: ShardInfo
    path: Path
    bytes: int
    hash: str


def stored_files(folder: Path, split: str, manifest: Manifest) -> list[StoredFile]:
    """The files that hold a split's shards, as they were written."""
    files = []
    shards = get_split(manifest, split, str(folder)).shards
    for shard, entry in zip(shards, load_index(folder, split, manifest), strict=True):
        info = entry["zip_data"] or entry["raw_data"]
        if not isinstance(info, dict):
            raise DataError(f"{folder / split / INDEX_NAME} is damaged: {info!r} describes no file. {_REMEDY}")
        path = folder / split / info["basename"]
        files.append(StoredFile(shard, path, info["bytes"], info["hashes"][manifest.hash_algorithm]))
    return files


def check_files(folder: Path, split: str, manifest: Manifest) -> None:
    """One stat per shard: a regular file of exactly the right size. Raises DataError naming the first."""
    for file in stored_files(folder, split, manifest):
        check_size(file.path, file.bytes)


def check_size(path: Path, expected_bytes: int) -> None:
    """Raises DataError when the shard is missing, no file, or of another size."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise DataError(f"Shard {path} is missing. {_REMEDY}") from None
    except OSError as error:
        raise DataError(f"Shard {path} cannot be read: {error.strerror}. {_REMEDY}") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"Shard {path} is not a file. {_REMEDY}")
    if status.st_size != expected_bytes:
        change = "truncated" if status.st_size < expected_bytes else "too long"
        raise DataError(f"Shard {path} is {change}: {status.st_size:,} bytes instead of {expected_bytes:,}. {_REMEDY}")


def check_hash(path: Path, algorithm: str, expected_hash: str) -> None:
    """Read the whole file. Raises DataError when it is unreadable or not what was written."""
    try:
        actual = hash_file(path, algorithm)
    except OSError as error:
        raise DataError(f"Shard {path} cannot be read: {error.strerror}. {_REMEDY}") from None
    if actual != expected_hash:
        raise DataError(
            f"Shard {path} was altered: its {algorithm} is {actual}, the manifest says {expected_hash}. {_REMEDY}"
        )


def hash_file(path: Path, algorithm: str) -> str:
    """Hexadecimal hash of a file by one of xxhash's algorithms, read in chunks. Raises OSError."""
    import xxhash

    digest = getattr(xxhash, algorithm)()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    text: str = digest.hexdigest()
    return text


def find_damage(folder: Path, split: str, manifest: Manifest) -> Iterator[tuple[StoredFile, str]]:
    """Every file of a split with what is wrong with it, or an empty string; reads all of them."""
    for file in stored_files(folder, split, manifest):
        try:
            check_size(file.path, file.bytes)
            check_hash(file.path, manifest.hash_algorithm, file.hash)
        except DataError as error:
            yield file, str(error)
        else:
            yield file, ""
