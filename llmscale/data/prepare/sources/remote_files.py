"""Read files of an object store as input: listed once in name order, read in parts as needed."""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import PurePath, PurePosixPath
from typing import BinaryIO

from llmscale.data.prepare.sources.clean_folder import MANIFEST_NAME as CLEAN_MANIFEST_NAME
from llmscale.data.prepare.sources.clean_folder import parse_clean_manifest, without_removed
from llmscale.data.prepare.sources.file_source import FileSource, open_files
from llmscale.data.prepare.sources.formats import format_of
from llmscale.data.prepare.sources.source import HIDDEN, InputFile, PassedOver, ReadOptions, Source, matches, opened
from llmscale.data.prepare.sources.tokens import INDEX_NAME, MdsFolder, MdsSource
from llmscale.data.shards.manifest import MANIFEST_NAME
from llmscale.data.storage.faults import Missing
from llmscale.data.storage.objects import Store, StoredObject
from llmscale.data.storage.schemes import folder_of, has_pattern, path_of
from llmscale.errors import DataError
from llmscale.untrusted.documents import MAX_BYTES, Rules, parse_json

#: Bytes per request; while one part is read, the next one is being fetched.
_PART_BYTES = 8 << 20
_BUFFER_BYTES = 1 << 20


class RemoteFile(InputFile):
    """An object of a store."""

    def __init__(self, store: Store, stored: StoredObject, root: str) -> None:
        """`root` is the folder in the store that the user named."""
        self._store = store
        self._stored = stored
        self.name = stored.url
        self.relative = stored.path.removeprefix(root).lstrip("/")
        self.size_bytes, self.version = stored.size_bytes, stored.version

    def open(self) -> BinaryIO:
        return io.BufferedReader(_Parts(self._store, self._stored), _BUFFER_BYTES)


class _Parts(io.RawIOBase):
    """An object, read in parts with one part read ahead. Reading raises DataError once it has changed."""

    def __init__(self, store: Store, stored: StoredObject) -> None:
        self._store, self._stored = store, stored
        self._size_bytes = stored.size_bytes
        self._stop = threading.Event()
        self._place = 0
        self._begin, self._part = 0, b""
        self._requests: queue.SimpleQueue[tuple[int, Future[bytes]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ahead: tuple[int, Future[bytes]] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size_bytes}[whence])
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._place >= self._size_bytes:
            return 0
        if not self._begin <= self._place < self._begin + len(self._part):
            self._begin, self._part = self._place, self._fetch(self._place)
        first = self._place - self._begin
        data = memoryview(self._part)[first : first + len(buffer)]
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def _fetch(self, begin: int) -> bytes:
        ahead, self._ahead = self._ahead, None
        is_next = begin == self._begin + len(self._part) or begin == 0
        part = ahead[1].result() if ahead is not None and ahead[0] == begin else self._read_part(begin)
        end = begin + len(part)
        if is_next and end < self._size_bytes:
            self._ahead = end, self._read_ahead(end)
        return part

    def _read_ahead(self, begin: int) -> Future[bytes]:
        if self._thread is None:
            # A daemon thread: a process would wait at its end for a pool's thread, during pauses between attempts.
            self._thread = threading.Thread(target=self._serve_requests, name="fetch", daemon=True)
            self._thread.start()
        part: Future[bytes] = Future()
        self._requests.put((begin, part))
        return part

    def _serve_requests(self) -> None:
        while (wanted := self._requests.get()) is not None:
            begin, part = wanted
            try:
                part.set_result(self._read_part(begin))
            except BaseException as error:
                part.set_exception(error)
            del wanted, part  # free it before the next part

    def _read_part(self, begin: int) -> bytes:
        end = min(begin + _PART_BYTES, self._size_bytes)
        return self._store.read(self._stored.url, begin, end, version=self._stored.version, stop=self._stop)

    def close(self) -> None:
        self._stop.set()
        self._requests.put(None)
        self._part = b""
        super().close()


class RemoteMdsFolder(MdsFolder):
    """A folder in a store, as listed."""

    def __init__(self, store: Store, url: str, objects: Sequence[StoredObject]) -> None:
        self.name = url
        self._files = {PurePosixPath(stored.path).name: RemoteFile(store, stored, path_of(url)) for stored in objects}

    def read_index(self) -> dict[str, object]:
        index = self._files[INDEX_NAME]
        if index.size_bytes > MAX_BYTES:
            raise DataError(f"{index.name} has {index.size_bytes:,} bytes; the limit is {MAX_BYTES:,}.")
        with opened(index) as file:
            return parse_json(file.read(), Rules(DataError), index.name)

    def find(self, name: str) -> InputFile | None:
        return self._files.get(name)


def open_remote(spec: str, options: ReadOptions, glob: str | None, out: str | None = None) -> Source:
    """Open an object, those that match a pattern and are not below `out`, MDS shards, or all files of known formats
    below a name. Raises DataError."""
    store = Store(spec, for_reading=True)
    objects = store.list_objects(spec)
    if out is not None and has_pattern(spec):
        objects = [stored for stored in objects if not stored.url.startswith(f"{out.rstrip('/')}/")]
    if not objects:
        raise DataError(f"--input {spec}: nothing has that name. Patterns: * within a name, ** across /.")
    root = folder_of(spec)
    beside = [stored for stored in objects if PurePosixPath(stored.path).parent == PurePosixPath(root)]
    if not has_pattern(spec) and _is_foreign_mds(beside, store, spec):
        return MdsSource(spec, RemoteMdsFolder(store, spec.rstrip("/"), beside), options)
    if [stored.path for stored in objects] == [path_of(spec)]:
        if glob is not None:
            raise DataError(f"--glob '{glob}' selects objects below a name, but {spec} is one object. Drop it.")
        _refuse_shards(objects, objects, spec)
        return FileSource(spec, [RemoteFile(store, objects[0], root.rpartition("/")[0])], options)
    visible = _without_removed([stored for stored in objects if not _hidden_part(_below(stored, root))], store, root)
    chosen = [stored for stored in visible if has_pattern(spec) or _is_wanted(_below(stored, root), glob)]
    _refuse_shards(chosen if chosen or glob else objects, objects, spec)
    files = [RemoteFile(store, stored, root) for stored in visible]
    if has_pattern(spec):
        return FileSource(spec, files, options)
    hidden = [path for stored in objects if glob is None and (path := _hidden_part(_below(stored, root)))]
    passed_over = {PassedOver(HIDDEN, str(path)) for path in hidden}
    return open_files(spec, files, options, glob, passed_over)


def _is_wanted(path: PurePosixPath, glob: str | None) -> bool:
    return matches(path, glob) if glob is not None else format_of(path) is not None


def _is_foreign_mds(beside: Sequence[StoredObject], store: Store, spec: str) -> bool:
    """Return whether a folder holds MDS shards and an index that `llmscale data prepare` did not write."""
    names = {PurePosixPath(stored.path).name for stored in beside}
    if INDEX_NAME not in names or MANIFEST_NAME in names or not any(map(_is_shard, beside)):
        return False
    above = spec.rstrip("/").rpartition("/")[0]
    return not path_of(above) or not store.list_objects(f"{above}/{MANIFEST_NAME}")


def _without_removed(objects: Sequence[StoredObject], store: Store, root: str) -> list[StoredObject]:
    """Return the objects without those that `data clean` removed."""

    def is_cleaned(folder: PurePath) -> bool:
        url = f"{scheme}://{folder}/{CLEAN_MANIFEST_NAME}"
        try:
            return parse_clean_manifest(store.read_small(url), url) is not None
        except Missing:
            return False

    scheme = objects[0].url.partition("://")[0] if objects else ""
    by_path = {PurePosixPath(stored.path): stored for stored in objects}
    return [by_path[path] for path in without_removed(by_path, PurePosixPath(root), is_cleaned)]


def _below(stored: StoredObject, root: str) -> PurePosixPath:
    return PurePosixPath(stored.path.removeprefix(root).lstrip("/"))


def _hidden_part(path: PurePosixPath) -> PurePosixPath | None:
    """Return the path of the first hidden name, or None."""
    return next((part for part in reversed((path, *path.parents)) if part.name.startswith(".")), None)


def _refuse_shards(chosen: Sequence[StoredObject], objects: Sequence[StoredObject], spec: str) -> None:
    """Refuse MDS shards and the JSON files beside them, which would be read as text. Raises DataError."""
    folders = {PurePosixPath(stored.path).parent for stored in objects if _is_shard(stored)}
    folders |= {folder.parent for folder in folders}
    for stored in chosen:
        path = PurePosixPath(stored.path)
        if _is_shard(stored) or (path.suffix == ".json" and path.parent in folders):
            raise DataError(
                f"--input {spec}: {stored.url} is an MDS shard or belongs to one, not text. For a prepared dataset "
                "give its original text, for another program's shards the folder of their index.json, or select files "
                "with --glob."
            )


def _is_shard(stored: StoredObject) -> bool:
    return ".mds" in PurePosixPath(stored.path).suffixes
