"""Write a dataset to an object store: prepared in a local folder, uploaded shard by shard, the manifest last.

`unfinished.json` is written first and holds the request; only a manifest makes a dataset. Shards are uploaded while
others are written and then removed from this disk, which holds a few at a time.

With `overwrite`, the new dataset goes into a folder beside the old files, `set-0123456789ab`. When it is complete, one
write of `manifest.json` names that folder; then the other files are removed. So readers find the old dataset or the new
one, whenever this process is killed. An abandoned folder cannot be told from one in progress: it stays until the next
`overwrite` ends, and a notice names it.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import re
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llmscale.data.prepare.output_folder import Destination, WorkFolder, check_same, describe_differences
from llmscale.data.shards.manifest import (
    GENERATION,
    MANIFEST_NAME,
    SHARD_NAME,
    TOKENIZER_FOLDER,
    UNFINISHED_NAME,
    Manifest,
    PrepareRequest,
    generation_json,
    parse_generation,
    parse_manifest,
)
from llmscale.data.shards.verify_shards import INDEX_NAME
from llmscale.data.storage.objects import Store
from llmscale.data.storage.schemes import check_out_url, scheme_of
from llmscale.errors import DataError
from llmscale.untrusted.documents import Rules, parse_json
from llmscale.untrusted.paths import in_home
from llmscale.untrusted.terminal import print_visible

DEFAULT_WORK_DIR = Path("~/.cache/llmscale/prepare")
_JOURNAL_NAME = "uploaded.txt"
#: Files that a new dataset on the Hub has.
_HUB_NAMES = (".gitattributes", "README.md")
#: Concurrent uploads, and most finished shards on this disk, those included.
_THREADS = 2
_MOST_WAITING = 4
_REMEDY = "Finished work stays on this disk and in the store: once it can be reached, the same command continues."
#: Names that `prepare` writes below a URL.
_OURS = re.compile(
    rf"(?:{GENERATION}/)?(?:{re.escape(MANIFEST_NAME)}|{re.escape(UNFINISHED_NAME)}|{TOKENIZER_FOLDER}/[^/]+|"
    rf"(?:train|val)/(?:{re.escape(INDEX_NAME)}|{SHARD_NAME.pattern}(?:\.zstd)?))"
)


class RemoteSet(Destination):
    """A URL to which a dataset is uploaded."""

    is_remote = True

    def __init__(self, url: str, *, work_dir: Path = DEFAULT_WORK_DIR, overwrite: bool = False) -> None:
        """`work_dir` holds the windows and a few shards. `overwrite` replaces another dataset. Raises DataError:
        invalid URL, missing credentials, no such bucket."""
        self.url = self._place = check_out_url(url)
        digest = hashlib.sha256(self.url.encode()).hexdigest()[:12]
        self.beside = in_home(work_dir) / f"{self.url.rpartition('/')[2]}-{digest}"
        self._overwrite = overwrite
        remedy = f"The bucket must exist and accept your credentials: {scheme_of(self.url).credentials}."
        Store(self.url, remedy=remedy).list_names(self.url)
        self._stop = threading.Event()
        self._store = Store(self.url, remedy=_REMEDY, stop=self._stop)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="upload")
        self._under_way: collections.deque[Future[None]] = collections.deque()
        self._uploaded: set[str] = set()
        self._is_begun = False
        self._folder = self._journal = Path()

    def find(self, request: PrepareRequest) -> Manifest | None:
        names = [name for name in self._store.list_names(self.url) if name not in _HUB_NAMES]
        if MANIFEST_NAME in names:
            return self._find_finished(request)
        if UNFINISHED_NAME in names:
            different = self._find_differences(request)
            if different and not self._overwrite:
                raise DataError(
                    f"--out {self.url} holds an unfinished dataset prepared differently: {different}. Give the same "
                    "settings, replace it with --overwrite, or choose another --out."
                )
            self._is_begun = not different
            if different:
                self._go_beside(request, b"")
        elif names:
            raise DataError(
                f"--out {self.url} holds {len(names):,} names, such as {names[0][:80]}, and is not a prepared dataset. "
                "Choose another --out, or empty it."
            )
        return None

    def _find_finished(self, request: PrepareRequest) -> Manifest | None:
        """Return the finished dataset if it matches the request and is not to be replaced. Raises DataError."""
        contents = self._store.read_small(f"{self.url}/{MANIFEST_NAME}")
        try:
            generation = parse_generation(contents, f"{self.url}/{MANIFEST_NAME}")
            place = f"{self.url}/{generation}" if generation else self.url
            where = f"{place}/{MANIFEST_NAME}"
            manifest = parse_manifest(self._store.read_small(where) if generation else contents, where)
            check_same(manifest, request, self.url)
            is_cleared_up = UNFINISHED_NAME not in self._store.list_names(place)
        except DataError:
            if not self._overwrite:
                raise
            is_cleared_up = True
        if self._overwrite and is_cleared_up:
            self._go_beside(request, contents)
            return None
        self._place = place
        if not is_cleared_up:
            self._clear_up()
        self._report_unfinished()
        return manifest

    def _report_unfinished(self) -> None:
        for name in self._store.list_names(self.url):
            if re.fullmatch(GENERATION, name) and self._place != f"{self.url}/{name}":
                print_visible(
                    f"{self.url}/{name} belongs to an unfinished --overwrite. If none is running, give that command "
                    "again to continue, or remove that folder.",
                    file=sys.stderr,
                    flush=True,
                )

    def _go_beside(self, request: PrepareRequest, replaced: bytes) -> None:
        """Write into a folder named after the request and the replaced manifest, so that only the same command
        continues there."""
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode() + replaced).hexdigest()[:12]
        self._place = f"{self.url}/set-{digest}"
        self._is_begun = UNFINISHED_NAME in self._store.list_names(self._place)

    def begin(self, work: WorkFolder, request: PrepareRequest) -> None:
        """Upload the marker, which also tests the permission to write."""
        self._folder = work.set_folder
        self._journal = work.path / _JOURNAL_NAME
        if not self._is_begun and self._journal.exists():
            work.begin_anew()  # the uploaded shards are neither here nor in the store
        if self._journal.exists():
            *lines, _ = self._journal.read_text().split("\n")
            self._uploaded = set(lines)
        self._store.write(f"{self._place}/{UNFINISHED_NAME}", json.dumps(request).encode())

    def keep_shard(self, path: Path) -> None:
        """Upload a shard in the background and remove it here. Waits while too many are queued."""
        self._under_way.append(self._pool.submit(self._move, path.relative_to(self._folder).as_posix()))
        while len(self._under_way) >= _MOST_WAITING:
            self._under_way.popleft().result()

    def finish(self, work: WorkFolder) -> None:
        while self._under_way:
            self._under_way.popleft().result()
        names = [path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file()]
        # The index follows its shards, and the manifest follows everything.
        last = (INDEX_NAME, MANIFEST_NAME)
        order = sorted(names, key=lambda name: (last.index(Path(name).name) if Path(name).name in last else -1, name))
        self._check_all_there()
        for name in order:
            self._store.upload(self._folder / name, f"{self._place}/{name}")
        if self._place != self.url:
            pointer = generation_json(self._place.removeprefix(f"{self.url}/"))
            self._store.write(f"{self.url}/{MANIFEST_NAME}", pointer.encode())
        self._clear_up()

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _clear_up(self) -> None:
        """Remove the replaced files, then the marker, so that a killed run resumes here."""
        if self._place != self.url:
            for stored in self._store.list_objects(self.url):
                name = stored.url.removeprefix(f"{self.url}/")
                if _OURS.fullmatch(name) and name != MANIFEST_NAME and not stored.url.startswith(f"{self._place}/"):
                    self._store.delete(stored.url)
        self._store.delete(f"{self._place}/{UNFINISHED_NAME}")

    def _check_all_there(self) -> None:
        """Raise DataError when uploaded shards have been removed."""
        stored = {stored.url.removeprefix(f"{self._place}/") for stored in self._store.list_objects(self._place)}
        if missing := self._uploaded - stored:
            raise DataError(
                f"{self._place}/{min(missing)} was uploaded and is missing now. Remove everything there; the same "
                "command then starts over."
            )

    def _move(self, name: str) -> None:
        """Upload a shard, record it in the journal, and remove it here."""
        path = self._folder / name
        if name not in self._uploaded:
            self._store.upload(path, f"{self._place}/{name}")
            with open(self._journal, "a", encoding="utf-8") as journal:
                journal.write(f"{name}\n")
                journal.flush()
                os.fsync(journal.fileno())
            self._uploaded.add(name)
        path.unlink(missing_ok=True)

    def _find_differences(self, request: PrepareRequest) -> str:
        """Return how the unfinished dataset's request differs, or an empty string. Raises DataError."""
        place = f"{self.url}/{UNFINISHED_NAME}"
        contents = self._store.read_small(place)
        try:
            unfinished: Any = parse_json(contents, Rules(DataError), place)
        except DataError:
            return "unreadable"
        return describe_differences(unfinished, request)
