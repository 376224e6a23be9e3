"""Open a prepared set, in a local folder or in a store with a local cache, and copy its description."""

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
from llmscale.errors import DataError, UnreachableError
from llmscale.files.whole import write_durably
from llmscale.untrusted.documents import MAX_BYTES, Rules, parse_json
from llmscale.untrusted.paths import RefusedFile, check_regular, open_regular, read_regular

_T = TypeVar("_T")
DEFAULT_CACHE = Path("~/.cache/llmscale/data")


@dataclass(frozen=True)
class SetLocation:
    """A set that can be opened."""

    name: str
    """As the user wrote it, for messages."""
    manifest: Manifest
    folder: Path
    """Local folder with manifest and indexes; shards are there, or come there when they are needed."""
    remote: str | None
    """Where shards are fetched from; None for a local set."""


def open_set(data: str, cache: Path | None = None) -> SetLocation:
    """Find a set by `--data`: a local folder, or a URL of Streaming's (s3://, gs://, hf://, ...).

    A remote set's files go to `cache/<fingerprint>`: two sets can never share a file, and a set that was
    prepared anew under the same URL starts with an empty cache. A local folder with a `cache` is treated as
    remote (a slow network disk). Raises DataError when there is no set or it cannot be reached.
    """
    data = data.removeprefix("file://")
    if "://" not in data and cache is None:
        return SetLocation(data, load_manifest(data), Path(data), remote=None)
    cache = (cache or DEFAULT_CACHE).expanduser()
    if "://" not in data:
        load_manifest(data)  # explains a missing or half-written folder better than a failed download
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
    """Return a set and where its files are: at the URL, or in the folder below that its manifest names. Raises
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
    """Return what `parse` makes of a small remote file and its name. Where it finds damage the file is fetched again:
    it may have come so. Raises DataError."""
    try:
        return parse(_download(remote, relative, scratch), f"{remote}/{relative}")
    except UnreachableError:
        raise
    except DataError:
        return parse(_download(remote, relative, scratch), f"{remote}/{relative}")


def _explain_unfinished(remote: str, scratch: Path) -> DataError | None:
    """Return what to say of a set that `prepare` has begun and not ended; None where there is none."""
    try:
        request = parse_json(_download(remote, UNFINISHED_NAME, scratch), Rules(DataError), UNFINISHED_NAME)
    except DataError:
        return None
    flags = (f"{name} {value}" for name, value in request.items() if name in ("--input", "--tokenizer", "--seq-len"))
    return DataError(
        f"{remote} is not finished: `llmscale data prepare` has begun it and not ended. Give the command that began it "
        f"again, which continues: llmscale data prepare {' '.join(flags)[:300]} --out {remote} (with its other flags)."
    )


def find_moved(location: SetLocation) -> SetLocation | None:
    """Where a set lies of which a file is not there: an equal one has taken its place in another folder. None where it
    lies where it did, or nobody knows. Raises DataError when the set there is another one."""
    if location.remote is None:
        return None
    try:
        now, remote = _find_remote(location.name, location.folder)
    except DataError:
        return None
    if now.fingerprint == location.manifest.fingerprint:
        return replace(location, remote=remote) if remote != location.remote else None
    raise DataError(
        f"{location.name} was replaced while it was read: it is the set {now.fingerprint[:12]} now, and this is "
        f"{location.manifest.fingerprint[:12]}, which is no longer there. Begin again with the new one, or restore the "
        "old one."
    )


def fetch_tokenizer(location: SetLocation) -> None:
    """Bring a remote set's tokenizer files into its cache folder, where `load_set_tokenizer` finds them."""
    for name in _tokenizer_files(location):
        if location.remote is not None and not (location.folder / name).is_file():
            _write(location.folder / name, _download(location.remote, name, location.folder))


def _tokenizer_files(location: SetLocation) -> Iterator[str]:
    """Yield the names of a set's tokenizer files. The first ones must be there before those that they list."""
    kept = location.manifest.tokenizer_files
    yield from TOKENIZER_FILES[kept]
    if kept.endswith(ORIGIN_NAME):
        yield from (f"{TOKENIZER_FOLDER}/{extra}" for extra in load_origin(location.folder / kept).files)


def copy_description(location: SetLocation, folder: Path, *, with_tokenizer: bool) -> None:
    """Write a set's manifest to the new `folder`, and its tokenizer, which `load_set_tokenizer` finds there. Raises
    DataError, OSError."""
    folder.mkdir()
    if with_tokenizer:
        fetch_tokenizer(location)
        for name in _tokenizer_files(location):
            # Sets of older versions may lack a file that is not needed.
            if (location.folder / name).exists():
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
        raise faults.fault(error, what, url=remote) from error


def _make_folder(scratch: Path) -> tempfile.TemporaryDirectory[str]:
    with _written(scratch):
        scratch.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=".download-", dir=scratch, ignore_cleanup_errors=True)


def check_source(remote: str, relative: str) -> None:
    """Where the remote is a folder: that the part of it is a regular file and no link. Raises DataError, OSError."""
    if "://" not in remote:
        check_no_links(Path(remote), relative)
        check_regular(Path(remote) / relative, follow_links=False)


def _write(path: Path, contents: bytes) -> None:
    """In one move, so that other ranks on this host see the whole file or none."""
    with _written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, contents)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """What is done to the cache. Raises DataError for an OSError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"Cannot write the data cache {path}: {error.strerror}. Choose another --data-cache.") from None


_CHUNK_BYTES = 1 << 20
_CHECKSUM = "wrong checksum"
#: A peer may be downloading the shard that we want over a slow line.
_LOCK_TIMEOUT_S = 900.0


class FileInfo(Protocol):
    """Streaming's description of a file."""

    basename: str
    bytes: int
    hashes: dict[str, str]


class ShardFile(Protocol):
    """What is used here of Streaming's shard reader."""

    raw_data: FileInfo
    zip_data: FileInfo | None


class ShardFetcher:
    """Fetches the shards of one split. Holds no connection before its first use, so it may be forked."""

    def __init__(self, location: SetLocation, split: str, cache_limit_bytes: int | None) -> None:
        self._location = location
        self._folder = location.folder / split
        self._locks = location.folder / ".locks" / split
        self._limit_bytes = cache_limit_bytes
        self._split = split
        self._downloader: tuple[int, Downloader] | None = None
        """And the process whose it is."""

    def fetch(self, shard: ShardInfo, file: ShardFile) -> None:
        """Make the uncompressed shard exist. Raises DataError: unreachable, damaged, cache disk full."""
        lock_module: ModuleType = _filelock()
        # A compressed local set is unpacked where it lies, and its locks are made there.
        check_no_links(self._location.folder, f".locks/{self._split}/{shard.name}.lock", f"{self._split}/{shard.name}")
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            with lock_module.FileLock(self._locks / f"{shard.name}.lock", timeout=_LOCK_TIMEOUT_S):
                if not _has_size(self._folder / shard.name, shard.bytes):
                    self._remove(file)
                    self._fetch_locked(shard, file)
        except lock_module.Timeout:
            raise UnreachableError(
                f"Waited {_LOCK_TIMEOUT_S:.0f} s for another process to fetch shard {shard.name}."
            ) from None
        except OSError as error:
            raise self._explain(error, shard) from error
        _mark_used(self._folder / shard.name)
        if self._limit_bytes is not None:
            self._evict(keep=shard.name)

    def discard(self, shard: ShardInfo, file: ShardFile) -> None:
        """Remove a shard that turned out to be damaged, so that it is fetched again. Raises DataError."""
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
        except Exception as error:  # each client raises its own kinds
            raise self._explain(error, shard) from error
        if not _has_size(self._folder / shard.name, shard.bytes):
            self._remove(file)
            raise DataError(f"Shard {shard.name} of {self._location.name} has another size than its index says.")

    def _bring_from_where_it_lies(self, shard: ShardInfo, file: ShardFile) -> None:
        """Also when an equal set has taken this one's place. Raises whatever the transport raises, DataError."""
        try:
            self._bring(shard, file)
        except Exception as error:
            is_known = isinstance(error, DataError) or _is_full(error) or _is_forbidden(error) or faults.may_pass(error)
            moved = None if is_known else find_moved(self._location)
            if moved is None:
                raise
            self._location, self._downloader = moved, None
            self._bring(shard, file)

    def _bring(self, shard: ShardInfo, file: ShardFile) -> None:
        """Download and unpack it, a second time when it came here damaged. Raises whatever the transport raises."""
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
        """Bring one file here, unless it is here, and check it. Raises whatever the transport raises, DamagedError."""
        path = self._folder / stored.basename
        remote = self._location.remote
        if remote is not None:
            check_source(remote, f"{self._split}/{stored.basename}")
            download(
                lambda: self._open_downloader(remote),
                f"{remote}/{self._split}/{stored.basename}",
                path,
                f"Cannot fetch {self._describe(shard)}",
                explain=lambda error: error,
            )
        algorithm = self._location.manifest.hash_algorithm
        # The size first: what a source sends instead may be of any length.
        if not _has_size(path, stored.bytes) or hash_file(path, algorithm) != stored.hashes[algorithm]:
            raise DamagedError(_CHECKSUM)

    def _unpack(self, stored: FileInfo, shard: ShardInfo) -> None:
        """Uncompress a shard to the size that it should have, and not a byte more, whatever its file unfolds to."""
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
        """What could be taken for a good shard; a local set's compressed original stays."""
        names = [file.raw_data.basename, f"{file.raw_data.basename}.tmp"]
        if file.zip_data and self._location.remote is not None:
            names += [file.zip_data.basename, f"{file.zip_data.basename}.tmp"]
        for name in names:
            with suppress(FileNotFoundError):
                os.remove(self._folder / name)
        for left in self._folder.glob(f".download-{file.raw_data.basename}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)

    def _evict(self, keep: str) -> None:
        """Drop the shards that were fetched or opened longest ago until the cache is within its limit.

        A process that still reads one fetches it again.
        """
        shards = []
        # What is unpacked from a local set's compressed files goes, never those.
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
        return faults.fault(error, f"Cannot fetch {where}", url=self._location.name)

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
    """For the cache, which drops what was used longest ago. The time of modification stays: it says that a file is
    still the one that was checked."""
    with suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _has_size(path: Path, num_bytes: int) -> bool:
    try:
        return check_regular(path, follow_links=False).st_size == num_bytes
    except (FileNotFoundError, RefusedFile):
        return False
