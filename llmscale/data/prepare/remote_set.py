"""A set in an object store: prepared in a local folder, uploaded shard by shard, the manifest last.

`unfinished.json` stands there from the beginning, and says what is prepared; a set has its manifest and nothing else is
one. Shards go up while others are written, and leave this disk as soon as they are there: a few are here at a time.
"""

from __future__ import annotations

import collections
import copy
import hashlib
import json
import os
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from llmscale.data.prepare.destination import Destination, check_same, describe_differences
from llmscale.data.prepare.work_folder import WorkFolder
from llmscale.data.shards.manifest import MANIFEST_NAME, Manifest, PrepareRequest, parse_manifest
from llmscale.data.shards.streaming_import import streaming_module
from llmscale.data.shards.verify_shards import INDEX_NAME
from llmscale.data.storage import faults
from llmscale.data.storage.objects import Store
from llmscale.data.storage.schemes import check_out_url, scheme_of, streaming_url
from llmscale.errors import DataError
from llmscale.untrusted.documents import MAX_BYTES

DEFAULT_WORK_DIR = Path("~/.cache/llmscale/prepare")
UNFINISHED_NAME = "unfinished.json"
_JOURNAL_NAME = "uploaded.txt"
#: What a new data set of the Hub has.
_HUB_NAMES = (".gitattributes", "README.md")
#: Uploads at a time, and shards that are whole and on this disk, those included.
_THREADS, _MOST_WAITING = 2, 4
#: Parts in which boto3 sends what is longer; S3's ETag is of their hashes.
_PART_BYTES = 8 << 20
_REMEDY = "What is done stays on this disk and in the store: when it can be reached, the same command goes on."


class _Uploader(Protocol):
    """What is used here of Streaming's uploaders."""

    local: str

    def upload_file(self, filename: str) -> None: ...


class RemoteSet(Destination):
    """A URL that a set is uploaded to."""

    is_remote = True

    def __init__(self, url: str, *, work_dir: Path = DEFAULT_WORK_DIR) -> None:
        """`work_dir` is where it is prepared; it takes the windows, and a few shards. Raises DataError: a URL that is
        none, credentials missing, no such bucket."""
        self.url = check_out_url(url)
        digest = hashlib.sha256(self.url.encode()).hexdigest()[:12]
        self.beside = work_dir.expanduser() / f"{self.url.rpartition('/')[2]}-{digest}"
        self._store = Store(self.url, remedy=_REMEDY)
        remedy = f"It must be there, and be open to the credentials, {scheme_of(self.url).credentials}."
        self._uploader = faults.with_retries(
            self._open_uploader, f"Cannot write to {self.url}", url=self.url, remedy=remedy
        )
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="upload")
        self._under_way: collections.deque[Future[None]] = collections.deque()
        self._uploaded: set[str] = set()
        self._is_begun = False
        self._folder = self._journal = Path()

    def find(self, request: PrepareRequest) -> Manifest | None:
        names = [name for name in self._store.names_in(self.url) if name not in _HUB_NAMES]
        if MANIFEST_NAME in names:
            where = f"{self.url}/{MANIFEST_NAME}"
            manifest = parse_manifest(self._read_small(where), where)
            check_same(manifest, request, self.url, "A set in a store is never replaced: remove it yourself")
            self._remove_marker(names)
            return manifest
        if UNFINISHED_NAME in names:
            self._check_marker(request)
            self._is_begun = True
        elif names:
            raise DataError(
                f"--out {self.url} holds {len(names):,} names, such as {names[0][:80]}, and is no prepared set. Choose "
                "another one, or empty it."
            )
        return None

    def begin(self, work: WorkFolder, request: PrepareRequest) -> None:
        """Upload the marker, which shows that writing is allowed."""
        self._folder, self._journal = work.set_folder, work.path / _JOURNAL_NAME
        if not self._is_begun and self._journal.exists():
            work.begin_anew()  # what was uploaded is gone, here and there
        if self._journal.exists():
            *lines, _ = self._journal.read_text().split("\n")
            self._uploaded = set(lines)
        with tempfile.TemporaryDirectory(dir=work.path) as folder:
            (Path(folder) / UNFINISHED_NAME).write_text(json.dumps(request))
            self._upload(Path(folder), UNFINISHED_NAME)

    def keep_shard(self, path: Path) -> None:
        """Upload a shard beside the work that goes on, and remove it here. Waits while there are too many."""
        self._under_way.append(self._pool.submit(self._move, path.relative_to(self._folder).as_posix()))
        while len(self._under_way) >= _MOST_WAITING:
            self._under_way.popleft().result()

    def finish(self, work: WorkFolder) -> None:
        while self._under_way:
            self._under_way.popleft().result()
        names = [path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file()]
        # Whoever sees an index sees its shards, whoever sees the manifest sees everything.
        last = (INDEX_NAME, MANIFEST_NAME)
        order = sorted(names, key=lambda name: (last.index(Path(name).name) if Path(name).name in last else -1, name))
        self._check_all_there()
        for name in order:
            self._upload(self._folder, name)
        self._remove_marker([UNFINISHED_NAME])

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _open_uploader(self) -> _Uploader:
        """Streaming's uploader of the scheme; it looks whether the bucket is there."""
        is_hub = self.url.startswith("hf:")
        with tempfile.TemporaryDirectory() as empty:
            # The Hub's takes a URL alone, with a slash at the end.
            out = f"{self.url}/" if is_hub else (empty, streaming_url(self.url))
            made: _Uploader = streaming_module("storage.upload").CloudUploader.get(out, keep_local=True, retry=1)
            if is_hub:
                os.rmdir(made.local)
        return made

    def _check_all_there(self) -> None:
        """Raises DataError when somebody has removed shards meanwhile."""
        if missing := self._uploaded - {one.url.removeprefix(f"{self.url}/") for one in self._store.find(self.url)}:
            raise DataError(
                f"{self.url}/{min(missing)} was uploaded and is no longer there. Remove everything there, and the same "
                "command begins anew."
            )

    def _move(self, name: str) -> None:
        """Upload a shard, note that, and remove it."""
        path = self._folder / name
        if name not in self._uploaded:
            self._upload(self._folder, name)
            with open(self._journal, "a", encoding="utf-8") as journal:
                journal.write(f"{name}\n")
                journal.flush()
                os.fsync(journal.fileno())
            self._uploaded.add(name)
        path.unlink(missing_ok=True)

    def _upload(self, folder: Path, name: str) -> None:
        """Upload a file and look at what came there. Raises DataError."""
        url = f"{self.url}/{name}"

        def upload() -> None:
            # A copy, as several threads upload out of several folders.
            uploader = _with_folder(self._uploader, folder)
            uploader.upload_file(name)
            self._check(folder / name, url)

        faults.with_retries(upload, f"Cannot upload {url}", url=url, remedy=_REMEDY, stop=self._stop)

    def _check(self, path: Path, url: str) -> None:
        """Raises ShortAnswer, DataError."""
        stored, size_bytes = self._store.describe(url), path.stat().st_size
        if stored.size_bytes != size_bytes:
            raise faults.ShortAnswer(f"{stored.size_bytes:,} bytes came there instead of {size_bytes:,}")
        # An ETag that is none of ours is another store's, or of an encrypted object: the bytes themselves say.
        if url.startswith("s3:") and stored.stamp != etag_of(path) and not self._is_equal(path, url):
            raise faults.ShortAnswer("other bytes came there")

    def _is_equal(self, path: Path, url: str) -> bool:
        place = 0
        with path.open("rb") as file:
            while part := file.read(_PART_BYTES):
                if self._store.read(url, place, place + len(part)) != part:
                    return False
                place += len(part)
        return True

    def _read_small(self, url: str) -> bytes:
        """Raises DataError for what is too long to be a manifest."""
        size_bytes = self._store.describe(url).size_bytes
        if size_bytes > MAX_BYTES:
            raise DataError(f"{url} has {size_bytes:,} bytes, and is none of llmscale's files.")
        return self._store.read(url)

    def _check_marker(self, request: PrepareRequest) -> None:
        """Raises DataError when something else is being prepared there."""
        url = f"{self.url}/{UNFINISHED_NAME}"
        try:
            there = json.loads(self._read_small(url))
        except ValueError:
            there = None
        different = describe_differences(there, request) if isinstance(there, dict) else "unreadable"
        if different:
            raise DataError(
                f"--out {self.url} holds a set that is not finished and prepared differently: {different}. Give the "
                "same settings, choose another --out, or remove it yourself."
            )

    def _remove_marker(self, names: list[str]) -> None:
        if UNFINISHED_NAME in names:
            self._store.remove(f"{self.url}/{UNFINISHED_NAME}")


def _with_folder(uploader: _Uploader, folder: Path) -> _Uploader:
    made = copy.copy(uploader)
    made.local = str(folder)
    return made


def etag_of(path: Path) -> str:
    """What S3 says of a file that boto3 has sent: its MD5; of several parts the MD5 of theirs, and how many."""
    parts = []
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            parts.append(hashlib.md5(part, usedforsecurity=False).digest())
    if path.stat().st_size < _PART_BYTES:
        return (b"".join(parts) or hashlib.md5(usedforsecurity=False).digest()).hex()
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"
