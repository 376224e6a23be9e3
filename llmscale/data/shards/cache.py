"""Open a prepared dataset in a local folder or in a store, and fetch its shards into a local cache.

Streaming's `StreamingDataset` would coordinate ranks by named shared memory and barriers, which leak when a process is
killed, are limited by /dev/shm, and hang other ranks after a failure. A file lock per shard needs no ranks and no
cleaning up, and any number of runs can share a cache.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from llmscale.data.shards.compressed import DamagedError, open_zstd
from llmscale.data.shards.manifest import (
    MANIFEST_NAME,
    ORIGIN_NAME,
    TOKENIZER_FILES,
    TOKENIZER_FOLDER,
    UNFINISHED_NAME,
    Manifest,
    ShardInfo,
    load_manifest,
    load_origin,
    parse_generation,
    parse_manifest,
)
from llmscale.data.shards.verify_shards import INDEX_NAME, ShardFile, hash_file, parse_index
from llmscale.data.storage.faults import Missing
from llmscale.data.storage.objects import Store
from llmscale.errors import DataError, TransientError, UnreachableError
from llmscale.files.atomic_write import write_durably
from llmscale.untrusted.documents import MAX_BYTES, Rules, parse_json
from llmscale.untrusted.paths import RefusedFile, check_regular, in_home, open_regular, read_regular, unreadable_as

_T = TypeVar("_T")
DEFAULT_CACHE = Path("~/.cache/llmscale/data")
_CHUNK_BYTES = 1 << 20
#: Another process may be downloading the shard over a slow connection.
_LOCK_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class SetLocation:
    """A dataset that was found."""

    name: str
    """Name as the user wrote it, for messages."""
    manifest: Manifest
    folder: Path
    """Local folder with manifest and indexes; shards are in it or are fetched into it."""
    remote: str | None
    """URL or folder from which shards are fetched; None for a local dataset."""


def open_set(data: str, cache: Path | None = None) -> SetLocation:
    """Find a dataset by `--data`: a local folder or a URL (s3://, gs://, az://, hf://).

    A remote dataset's files go to `cache/<fingerprint>`, so no two datasets share files. A local folder with a `cache`
    is treated as remote (a slow network disk). Raises DataError when the dataset is missing or unreachable.
    """
    data = data.removeprefix("file://")
    if "://" not in data and cache is None:
        return SetLocation(data, load_manifest(data), Path(data), remote=None)
    cache = in_home(cache or DEFAULT_CACHE)
    if "://" not in data:
        load_manifest(data)  # gives a better message than a failed download
    manifest, remote = _find_remote(data)
    folder = cache / manifest.fingerprint[:16]
    origin = Origin(remote)
    for split in manifest.splits:
        relative = f"{split}/{INDEX_NAME}"
        if not (folder / relative).is_file():

            def check(contents: bytes, where: str, split: str = split) -> bytes:
                parse_index(contents, split, manifest, where)
                return contents

            _write(folder / relative, _read_parsed(origin, relative, check))
    _write(folder / MANIFEST_NAME, manifest.to_json().encode())
    return SetLocation(data, manifest, folder, remote)


class Origin:
    """The files of a dataset that is not on this disk: below a URL, or in a folder on a slow one."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._store = Store(place, for_reading=True) if "://" in place else None

    def read(self, relative: str) -> bytes:
        """Return the contents of a small file; `relative` is a name that was checked. Raises DataError."""
        source = f"{self.place}/{relative}"
        if self._store is not None:
            return self._store.read_small(source)
        with unreadable_as(DataError, source):
            return read_regular(self._check(relative), MAX_BYTES, follow_links=False)

    def fetch(self, relative: str, path: Path) -> None:
        """Copy a file to `path`. Raises DataError and OSError."""
        if self._store is not None:
            self._store.download(f"{self.place}/{relative}", path)
            return
        try:
            shutil.copy(self._check(relative), path)
        except FileNotFoundError:
            raise Missing(f"Cannot fetch {self.place}/{relative}: there is no such file.") from None

    def _check(self, relative: str) -> Path:
        """Return the path of a file in a folder. Raises OSError for what is not a file."""
        path = Path(self.place, relative)
        check_regular(path, follow_links=True)
        return path


def _find_remote(data: str) -> tuple[Manifest, str]:
    """Return a dataset's manifest and location: the URL, or the folder below it that the manifest names. Raises
    DataError."""
    remote = data.rstrip("/")
    origin = Origin(remote)

    def parse(contents: bytes, where: str) -> str | Manifest:
        return parse_generation(contents, where) or parse_manifest(contents, where)

    try:
        parsed = _read_parsed(origin, MANIFEST_NAME, parse)
    except UnreachableError:
        raise
    except DataError as error:
        raise _explain_unfinished(origin, remote) or error from None
    if isinstance(parsed, Manifest):
        return parsed, remote
    remote = f"{remote}/{parsed}"
    return _read_parsed(Origin(remote), MANIFEST_NAME, parse_manifest), remote


def _read_parsed(origin: Origin, relative: str, parse: Callable[[bytes, str], _T]) -> _T:
    """Return `parse(contents, name)` of a small file, read a second time if damaged. Raises DataError."""
    name = f"{origin.place}/{relative}"
    contents = origin.read(relative)
    try:
        return parse(contents, name)
    except DataError:
        return parse(origin.read(relative), name)


def _explain_unfinished(origin: Origin, remote: str) -> DataError | None:
    """Return the error for a dataset that `prepare` has not finished, or None."""
    try:
        request = parse_json(origin.read(UNFINISHED_NAME), Rules(DataError), UNFINISHED_NAME)
    except DataError:
        return None
    flags = (f"{name} {value}" for name, value in request.items() if name in ("--input", "--tokenizer", "--seq-len"))
    return DataError(
        f"{remote} is not finished. Give the command that started it again, to continue: llmscale data prepare "
        f"{' '.join(flags)[:300]} --out {remote} (with its other flags)."
    )


def find_republished(location: SetLocation) -> SetLocation | None:
    """Return the new location of a dataset with a missing file, if an equal one has replaced it in another folder, else
    None. Raises DataError when a different one has replaced it."""
    if location.remote is None:
        return None
    try:
        manifest, remote = _find_remote(location.name)
    except DataError:
        return None
    if manifest.fingerprint == location.manifest.fingerprint:
        if remote != location.remote:
            return replace(location, remote=remote)
        return None
    raise DataError(
        f"{location.name} was replaced while it was read: its fingerprint is {manifest.fingerprint[:12]} now instead "
        f"of {location.manifest.fingerprint[:12]}. Start again with the new one, or restore the old one."
    )


def fetch_tokenizer(location: SetLocation) -> None:
    """Fetch a remote dataset's tokenizer files into its cache folder, for `load_set_tokenizer`."""
    for name in _tokenizer_files(location):
        if location.remote is not None and not (location.folder / name).is_file():
            _write(location.folder / name, Origin(location.remote).read(name))


def _tokenizer_files(location: SetLocation) -> Iterator[str]:
    """Yield the names of a dataset's tokenizer files. Fetch each before taking the next: origin.json lists further
    ones."""
    kind = location.manifest.tokenizer_files
    yield from TOKENIZER_FILES[kind]
    if kind.endswith(ORIGIN_NAME):
        yield from (f"{TOKENIZER_FOLDER}/{extra}" for extra in load_origin(location.folder / kind).files)


def copy_description(location: SetLocation, folder: Path, *, with_tokenizer: bool) -> None:
    """Write a dataset's manifest and, if wanted, its tokenizer to the new `folder`. Raises DataError, OSError."""
    folder.mkdir()
    if with_tokenizer:
        fetch_tokenizer(location)
        for name in _tokenizer_files(location):
            (folder / TOKENIZER_FOLDER).mkdir(exist_ok=True)
            (folder / name).write_bytes(read_regular(location.folder / name, MAX_BYTES, follow_links=False))
    (folder / MANIFEST_NAME).write_text(location.manifest.to_json())


def _write(path: Path, contents: bytes) -> None:
    """Write atomically, so that other ranks on this host see the full file or none. Raises DataError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, contents)
    except OSError as error:
        raise DataError(f"Cannot write the data cache {path}: {error.strerror}. Choose another --data-cache.") from None


class ShardFetcher:
    """Fetches the shards of one split. It may be forked."""

    def __init__(self, location: SetLocation, split: str, cache_limit_bytes: int | None) -> None:
        self._location = location
        self._origin = Origin(location.remote) if location.remote else None
        self._folder = location.folder / split
        self._locks = location.folder / ".locks" / split
        self._limit_bytes = cache_limit_bytes
        self._split = split

    def fetch(self, file: ShardFile) -> None:
        """Fetch and unpack a shard unless it exists. Raises DataError: unreachable, damaged, cache disk full."""
        shard = file.shard
        # A compressed local dataset is unpacked, with locks, in its own folder.
        with self._locked(shard):
            if not _has_size(self._folder / shard.name, shard.bytes):
                self._remove(file)
                self._bring(file)
        _mark_used(self._folder / shard.name)
        if self._limit_bytes is not None:
            self._evict(keep=shard.name)

    def discard(self, file: ShardFile) -> None:
        """Remove a damaged shard, so that it is fetched again. Raises DataError."""
        with self._locked(file.shard):
            self._remove(file)

    @contextmanager
    def _locked(self, shard: ShardInfo) -> Iterator[None]:
        """Hold a shard's lock. Raises TransientError, and DataError for an OSError of the block."""
        import filelock

        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self._locks / f"{shard.name}.lock", timeout=_LOCK_TIMEOUT_S):
                yield
        except filelock.Timeout:
            raise TransientError(
                f"Waited {_LOCK_TIMEOUT_S:.0f} s for another process to fetch shard {shard.name}."
            ) from None
        except OSError as error:
            raise self._explain(error, shard) from error

    def _bring(self, file: ShardFile) -> None:
        """Fetch and unpack a shard, also after an equal dataset has replaced this one. Raises DataError, OSError."""
        needed_bytes = file.shard.bytes + (file.bytes if file.is_compressed else 0)
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < needed_bytes:
            raise OSError(errno.ENOSPC, f"{free_bytes:,} bytes free, {needed_bytes:,} needed")
        try:
            self._bring_undamaged(file)
        except (Missing, _DamagedAtSource):
            moved = find_republished(self._location)
            if moved is None or moved.remote is None:
                raise
            self._location = moved
            self._origin = Origin(moved.remote)
            self._bring_undamaged(file)

    def _bring_undamaged(self, file: ShardFile) -> None:
        """Fetch and unpack a shard, twice if it arrives damaged. Raises DataError, OSError."""
        for is_last in (False, True):
            try:
                self._fetch_stored(file)
                if file.is_compressed:
                    self._unpack(file)
                return
            except DamagedError as error:
                self._remove(file)
                if is_last:
                    raise _DamagedAtSource(
                        f"{self._describe(file.shard)} is damaged at its source, twice: {error}. Prepare or copy it "
                        "again."
                    ) from None
            except Exception:
                self._remove(file)
                raise

    def _fetch_stored(self, file: ShardFile) -> None:
        """Fetch a file of a remote dataset and check it. Raises DamagedError, DataError, OSError."""
        if self._origin is not None:
            self._origin.fetch(f"{self._split}/{file.path.name}", file.path)
        # Size first, as a wrong file may be of any length.
        if not _has_size(file.path, file.bytes):
            raise DamagedError("wrong size")
        if hash_file(file.path, self._location.manifest.hash_algorithm) != file.hash:
            raise DamagedError("wrong checksum")

    def _unpack(self, file: ShardFile) -> None:
        """Unpack a shard to the size that it should have. Raises DamagedError, OSError."""
        target = self._folder / f"{file.shard.name}.tmp"
        left_bytes = file.shard.bytes
        with (
            open_regular(file.path, follow_links=False) as packed,
            open_zstd(packed) as contents,
            target.open("xb") as out,
        ):
            while chunk := contents.read(min(_CHUNK_BYTES, left_bytes + 1)):
                left_bytes -= len(chunk)
                if left_bytes < 0:
                    break
                out.write(chunk)
        if left_bytes:
            raise DamagedError(f"it does not unpack to {file.shard.bytes:,} bytes")
        os.replace(target, self._folder / file.shard.name)
        if self._origin is not None:
            file.path.unlink()

    def _remove(self, file: ShardFile) -> None:
        """Remove all files of a shard except a local dataset's compressed original."""
        name = file.shard.name
        for path in (self._folder / name, self._folder / f"{name}.tmp", file.path):
            if path != file.path or self._origin is not None or not file.is_compressed:
                path.unlink(missing_ok=True)
        for left in self._folder.glob(f".download-{name}*"):  # of a killed process
            shutil.rmtree(left, ignore_errors=True)

    def _evict(self, keep: str) -> None:
        """Remove the least recently used shards until the cache is within its limit.

        A process that still needs one fetches it again.
        """
        shards = []
        # A local dataset loses only unpacked files, never its compressed ones.
        for path in self._folder.glob("shard.*" if self._origin is not None else "shard.*.mds"):
            with suppress(FileNotFoundError):
                status = path.stat()
                shards.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, path))
        excess_bytes = sum(size for _, size, _ in shards) - (self._limit_bytes or 0)
        for _, size, path in sorted(shards):
            if excess_bytes <= 0:
                break
            if path.name != keep:
                path.unlink(missing_ok=True)
                excess_bytes -= size

    def _explain(self, error: OSError, shard: ShardInfo) -> DataError:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return UnreachableError(
                f"The disk of the data cache {self._folder} is full: {self._describe(shard)} needs {shard.bytes:,} "
                f"bytes ({reason}). Free space, choose another --data-cache, or set --cache-limit-gib."
            )
        return UnreachableError(
            f"Cannot write {self._describe(shard)} to {self._folder}: {reason}. Choose another --data-cache."
        )

    def _describe(self, shard: ShardInfo) -> str:
        return f"shard {shard.name} of {self._location.name} (split {self._split})"


class _DamagedAtSource(DataError):
    """A shard arrived damaged twice."""


def _mark_used(path: Path) -> None:
    """Set the access time, for eviction. The modification time stays, because it identifies the checked file."""
    with suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _has_size(path: Path, num_bytes: int) -> bool:
    try:
        return check_regular(path, follow_links=False).st_size == num_bytes
    except (FileNotFoundError, RefusedFile):
        return False
