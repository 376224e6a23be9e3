"""Open a prepared dataset in a local folder or in a store, and fetch its shards into a local cache.

Streaming's transport brings one file at a time. Its `StreamingDataset` would coordinate ranks by named shared memory
and barriers, which leak when a process is killed, are limited by /dev/shm, and hang other ranks after a failure. A file
lock per shard needs no ranks and no cleaning up, and any number of runs can share a cache.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeVar

from llmscale.data.shards.compressed import DamagedError, open_zstd
from llmscale.data.shards.manifest import (
    MANIFEST_NAME,
    ORIGIN_NAME,
    TOKENIZER_FILES,
    TOKENIZER_FOLDER,
    UNFINISHED_NAME,
    Manifest,
    ShardInfo,
    check_no_links,
    load_manifest,
    load_origin,
    parse_generation,
    parse_manifest,
)
from llmscale.data.shards.verify_shards import INDEX_NAME, hash_file, parse_index
from llmscale.data.storage import faults
from llmscale.data.storage.transport import Downloader, download, open_downloader
from llmscale.errors import DataError, TransientError, UnreachableError
from llmscale.files.atomic_write import write_durably
from llmscale.untrusted.documents import MAX_BYTES, Rules, parse_json
from llmscale.untrusted.paths import RefusedFile, check_regular, in_home, open_regular, read_regular

_T = TypeVar("_T")
DEFAULT_CACHE = Path("~/.cache/llmscale/data")


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
    """Find a dataset by `--data`: a local folder or a URL that Streaming knows (s3://, gs://, hf://, ...).

    A remote dataset's files go to `cache/<fingerprint>`, so no two datasets share files. A local folder with a `cache`
    is treated as remote (a slow network disk). Raises DataError when the dataset is missing or unreachable.
    """
    data = data.removeprefix("file://")
    if "://" not in data and cache is None:
        return SetLocation(data, load_manifest(data), Path(data), remote=None)
    cache = in_home(cache or DEFAULT_CACHE)
    if "://" not in data:
        load_manifest(data)  # gives a better message than a failed download
    manifest, remote = _find_remote(data, cache)
    folder = cache / manifest.fingerprint[:16]
    for split in manifest.splits:
        relative = f"{split}/{INDEX_NAME}"
        if not (folder / relative).is_file():

            def check(contents: bytes, where: str, split: str = split) -> bytes:
                parse_index(contents, split, manifest, where)
                return contents

            _write(folder / relative, _fetch_parsed(remote, relative, cache, check))
    _write(folder / MANIFEST_NAME, manifest.to_json().encode())
    return SetLocation(data, manifest, folder, remote)


def _find_remote(data: str, scratch: Path) -> tuple[Manifest, str]:
    """Return a dataset's manifest and location: the URL, or the folder below it that the manifest names. Raises
    DataError."""
    remote = data.rstrip("/")

    def parse(contents: bytes, where: str) -> str | Manifest:
        return parse_generation(contents, where) or parse_manifest(contents, where)

    try:
        found = _fetch_parsed(remote, MANIFEST_NAME, scratch, parse)
    except UnreachableError:
        raise
    except DataError as error:
        raise _explain_unfinished(remote, scratch) or error from None
    if isinstance(found, Manifest):
        return found, remote
    return _fetch_parsed(f"{remote}/{found}", MANIFEST_NAME, scratch, parse_manifest), f"{remote}/{found}"


def _fetch_parsed(remote: str, relative: str, scratch: Path, parse: Callable[[bytes, str], _T]) -> _T:
    """Return `parse(contents, name)` of a small remote file, fetched a second time if damaged. Raises DataError."""
    try:
        return parse(_download(remote, relative, scratch), f"{remote}/{relative}")
    except UnreachableError:
        raise
    except DataError:
        return parse(_download(remote, relative, scratch), f"{remote}/{relative}")


def _explain_unfinished(remote: str, scratch: Path) -> DataError | None:
    """Return the error for a dataset that `prepare` has not finished, or None."""
    try:
        request = parse_json(_download(remote, UNFINISHED_NAME, scratch), Rules(DataError), UNFINISHED_NAME)
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
        now, remote = _find_remote(location.name, location.folder)
    except DataError:
        return None
    if now.fingerprint == location.manifest.fingerprint:
        return replace(location, remote=remote) if remote != location.remote else None
    raise DataError(
        f"{location.name} was replaced while it was read: its fingerprint is {now.fingerprint[:12]} now instead of "
        f"{location.manifest.fingerprint[:12]}. Start again with the new one, or restore the old one."
    )


def fetch_tokenizer(location: SetLocation) -> None:
    """Fetch a remote dataset's tokenizer files into its cache folder, for `load_set_tokenizer`."""
    for name in _tokenizer_files(location):
        if location.remote is not None and not (location.folder / name).is_file():
            _write(location.folder / name, _download(location.remote, name, location.folder))


def _tokenizer_files(location: SetLocation) -> Iterator[str]:
    """Yield the names of a dataset's tokenizer files. Fetch each before taking the next: origin.json lists further
    ones."""
    kept = location.manifest.tokenizer_files
    yield from TOKENIZER_FILES[kept]
    if kept.endswith(ORIGIN_NAME):
        yield from (f"{TOKENIZER_FOLDER}/{extra}" for extra in load_origin(location.folder / kept).files)


def copy_description(location: SetLocation, folder: Path, *, with_tokenizer: bool) -> None:
    """Write a dataset's manifest and, if wanted, its tokenizer to the new `folder`. Raises DataError, OSError."""
    folder.mkdir()
    if with_tokenizer:
        fetch_tokenizer(location)
        for name in _tokenizer_files(location):
            (folder / TOKENIZER_FOLDER).mkdir(exist_ok=True)
            (folder / name).write_bytes(read_regular(location.folder / name, MAX_BYTES, follow_links=False))
    (folder / MANIFEST_NAME).write_text(location.manifest.to_json())


def _download(remote: str, relative: str, scratch: Path) -> bytes:
    """Return the contents of a small remote file; `relative` is a name that was checked. Raises DataError."""
    source = f"{remote}/{relative}"
    what = f"Cannot fetch {source}"
    try:
        check_source(remote, relative)
        with _make_folder(scratch) as folder:
            target = Path(folder) / "file"
            download(lambda: open_downloader(remote), source, target, what)
            return read_regular(target, MAX_BYTES)
    except OSError as error:
        raise faults.explain(error, what, url=remote) from error


def _make_folder(scratch: Path) -> tempfile.TemporaryDirectory[str]:
    with _written(scratch):
        scratch.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=".download-", dir=scratch, ignore_cleanup_errors=True)


def check_source(remote: str, relative: str) -> None:
    """Check that a file of a local folder used as remote is a regular file, not a link. Raises DataError, OSError."""
    if "://" not in remote:
        check_no_links(Path(remote), relative)
        check_regular(Path(remote) / relative, follow_links=False)


def _write(path: Path, contents: bytes) -> None:
    """Write atomically, so that other ranks on this host see the full file or none."""
    with _written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, contents)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Turn an OSError while writing the cache into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"Cannot write the data cache {path}: {error.strerror}. Choose another --data-cache.") from None


_CHUNK_BYTES = 1 << 20
_CHECKSUM = "wrong checksum"
#: Another process may be downloading the shard over a slow connection.
_LOCK_TIMEOUT_S = 900.0


class FileInfo(Protocol):
    """Streaming's description of a file."""

    basename: str
    bytes: int
    hashes: dict[str, str]


class ShardFile(Protocol):
    """The attributes of Streaming's shard reader that are used here."""

    raw_data: FileInfo
    zip_data: FileInfo | None


class ShardFetcher:
    """Fetches the shards of one split. It opens no connection before its first use, so it may be forked."""

    def __init__(self, location: SetLocation, split: str, cache_limit_bytes: int | None) -> None:
        self._location = location
        self._folder = location.folder / split
        self._locks = location.folder / ".locks" / split
        self._limit_bytes = cache_limit_bytes
        self._split = split
        self._downloader: tuple[int, Downloader] | None = None
        """Process id and downloader."""

    def fetch(self, shard: ShardInfo, file: ShardFile) -> None:
        """Fetch and unpack a shard unless it exists. Raises DataError: unreachable, damaged, cache disk full."""
        lock_module: ModuleType = _filelock()
        # A compressed local dataset is unpacked, with locks, in its own folder.
        check_no_links(self._location.folder, f".locks/{self._split}/{shard.name}.lock", f"{self._split}/{shard.name}")
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            with lock_module.FileLock(self._locks / f"{shard.name}.lock", timeout=_LOCK_TIMEOUT_S):
                if not _has_size(self._folder / shard.name, shard.bytes):
                    self._remove(file)
                    self._fetch_locked(shard, file)
        except lock_module.Timeout:
            raise TransientError(
                f"Waited {_LOCK_TIMEOUT_S:.0f} s for another process to fetch shard {shard.name}."
            ) from None
        except OSError as error:
            raise self._explain(error, shard) from error
        _mark_used(self._folder / shard.name)
        if self._limit_bytes is not None:
            self._evict(keep=shard.name)

    def discard(self, shard: ShardInfo, file: ShardFile) -> None:
        """Remove a damaged shard, so that it is fetched again. Raises DataError."""
        try:
            with _filelock().FileLock(self._locks / f"{shard.name}.lock", timeout=_LOCK_TIMEOUT_S):
                self._remove(file)
        except OSError as error:
            raise self._explain(error, shard) from error

    def _fetch_locked(self, shard: ShardInfo, file: ShardFile) -> None:
        needed_bytes = shard.bytes + (file.zip_data.bytes if file.zip_data else 0)
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < needed_bytes:
            raise OSError(errno.ENOSPC, f"{free_bytes:,} bytes free, {needed_bytes:,} needed")
        try:
            self._bring_from_where_it_lies(shard, file)
        except Exception as error:  # each client raises its own classes
            raise self._explain(error, shard) from error
        if not _has_size(self._folder / shard.name, shard.bytes):
            self._remove(file)
            raise DataError(f"Shard {shard.name} of {self._location.name} has another size than its index states.")

    def _bring_from_where_it_lies(self, shard: ShardInfo, file: ShardFile) -> None:
        """Bring a shard, also after an equal dataset has replaced this one. Raises whatever the transport raises,
        DataError."""
        try:
            self._bring(shard, file)
        except Exception as error:
            is_known = (
                isinstance(error, DataError) or _is_full(error) or _is_forbidden(error) or faults.is_transient(error)
            )
            moved = None if is_known else find_republished(self._location)
            if moved is None:
                raise
            self._location, self._downloader = moved, None
            self._bring(shard, file)

    def _bring(self, shard: ShardInfo, file: ShardFile) -> None:
        """Download and unpack a shard, twice if it arrives damaged. Raises whatever the transport raises."""
        for is_last in (False, True):
            try:
                self._download(file.zip_data or file.raw_data, shard)
                if file.zip_data:
                    self._unpack(file.zip_data, shard)
                return
            except DamagedError:
                self._remove(file)
                if is_last:
                    raise
            except Exception:
                self._remove(file)
                raise

    def _download(self, stored: FileInfo, shard: ShardInfo) -> None:
        """Download one file of a remote dataset and check it. Raises whatever the transport raises, DamagedError."""
        path = self._folder / stored.basename
        remote = self._location.remote
        if remote is not None:
            check_source(remote, f"{self._split}/{stored.basename}")
            download(
                lambda: self._open_downloader(remote),
                f"{remote}/{self._split}/{stored.basename}",
                path,
                f"Cannot fetch {self._describe(shard)}",
                to_error=lambda error: error,
            )
        algorithm = self._location.manifest.hash_algorithm
        # Size first, as a wrong file may be of any length.
        if not _has_size(path, stored.bytes) or hash_file(path, algorithm) != stored.hashes[algorithm]:
            raise DamagedError(_CHECKSUM)

    def _unpack(self, stored: FileInfo, shard: ShardInfo) -> None:
        """Unpack a shard, to at most the size that it should have."""
        path = self._folder / stored.basename
        target = self._folder / f"{shard.name}.tmp"
        left_bytes = shard.bytes
        with open_regular(path, follow_links=False) as packed, open_zstd(packed) as contents, target.open("xb") as out:
            while chunk := contents.read(min(_CHUNK_BYTES, left_bytes + 1)):
                left_bytes -= len(chunk)
                if left_bytes < 0:
                    raise DamagedError(f"it unpacks to more than its {shard.bytes:,} bytes")
                out.write(chunk)
        os.replace(target, self._folder / shard.name)
        if self._location.remote is not None:
            path.unlink()

    def _open_downloader(self, remote: str) -> Downloader:
        if self._downloader is None or self._downloader[0] != os.getpid():
            self._downloader = os.getpid(), open_downloader(remote)
        return self._downloader[1]

    def _remove(self, file: ShardFile) -> None:
        """Remove all files of a shard except a local dataset's compressed original."""
        names = [file.raw_data.basename, f"{file.raw_data.basename}.tmp"]
        if file.zip_data and self._location.remote is not None:
            names += [file.zip_data.basename, f"{file.zip_data.basename}.tmp"]
        for name in names:
            with suppress(FileNotFoundError):
                os.remove(self._folder / name)
        for left in self._folder.glob(f".download-{file.raw_data.basename}*"):  # of a killed process
            shutil.rmtree(left, ignore_errors=True)

    def _evict(self, keep: str) -> None:
        """Remove the least recently used shards until the cache is within its limit.

        A process that still needs one fetches it again.
        """
        shards = []
        # A local dataset loses only unpacked files, never its compressed ones.
        for path in self._folder.glob("shard.*" if self._location.remote is not None else "shard.*.mds"):
            with suppress(FileNotFoundError):
                status = path.stat()
                shards.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, path))
        excess_bytes = sum(size for _, size, _ in shards) - (self._limit_bytes or 0)
        for _, size, path in sorted(shards):
            if excess_bytes <= 0:
                break
            if path.name != keep:
                with suppress(FileNotFoundError):
                    path.unlink()
                excess_bytes -= size

    def _explain(self, error: Exception, shard: ShardInfo) -> DataError:
        if isinstance(error, DataError):
            return error
        where = self._describe(shard)
        if _is_full(error):
            return UnreachableError(
                f"The disk of the data cache {self._folder} is full: {where} needs {shard.bytes:,} bytes "
                f"({_reason(error)}). Free space, choose another --data-cache, or set --cache-limit-gib."
            )
        if _is_forbidden(error):
            return UnreachableError(
                f"Cannot write {where} to {self._folder}: {_reason(error)}. Choose another --data-cache."
            )
        if str(error) == _CHECKSUM:
            return DataError(f"The checksum of {where} is wrong at its source, twice. Prepare or copy it again.")
        return faults.explain(error, f"Cannot fetch {where}", url=self._location.name)

    def _describe(self, shard: ShardInfo) -> str:
        return f"shard {shard.name} of {self._location.name} (split {self._split})"


def _filelock() -> ModuleType:
    import filelock

    return filelock


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_forbidden(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _mark_used(path: Path) -> None:
    """Set the access time, for eviction. The modification time stays, because it identifies the checked file."""
    with suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _has_size(path: Path, num_bytes: int) -> bool:
    try:
        return check_regular(path, follow_links=False).st_size == num_bytes
    except (FileNotFoundError, RefusedFile):
        return False
