"""Open a prepared set, in a local folder or in a store with a local cache, and copy its description."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from llmscale.data.shards.manifest import (
    MANIFEST_NAME,
    ORIGIN_NAME,
    TOKENIZER_FILES,
    TOKENIZER_FOLDER,
    UNFINISHED_NAME,
    Manifest,
    check_no_links,
    load_manifest,
    load_origin,
    parse_generation,
    parse_manifest,
)
from llmscale.data.shards.verify_shards import INDEX_NAME, parse_index
from llmscale.data.storage import faults
from llmscale.data.storage.transport import download, open_downloader
from llmscale.errors import DataError, UnreachableError
from llmscale.files.atomic_write import write_durably
from llmscale.untrusted.documents import MAX_BYTES, Rules, parse_json
from llmscale.untrusted.paths import check_regular, read_regular

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
