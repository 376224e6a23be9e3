"""Objects of a store: list, describe, read in parts, write, replace by condition, delete, download, upload."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llmscale.data.storage import faults
from llmscale.data.storage.clients import Client, Entry, has_hmac_key, open_client
from llmscale.data.storage.faults import Missing, Overtaken
from llmscale.data.storage.schemes import SCHEMES, folder_of, has_pattern, path_of, root_of, scheme_of
from llmscale.errors import DataError
from llmscale.untrusted.documents import MAX_BYTES

_T = TypeVar("_T")
#: Parts of a pattern, and what each matches.
_WILDCARD = re.compile(r"\*\*/?|\*|\?|\[[^\]]+\]")
_MATCHES = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@dataclass(frozen=True)
class StoredObject:
    """An object as listed."""

    url: str
    size_bytes: int
    version: str
    """Changes with the contents."""

    @property
    def path(self) -> str:
        """BUCKET/NAME."""
        return path_of(self.url)


class Store:
    """The objects of the bucket that a URL names, each by its URL. Thread-safe; a fork may use it.

    The store is opened when it is first used, and again when its credentials have expired. Every method retries
    transient errors and raises DataError: Missing, Overtaken, or UnreachableError if it says nothing about the data.
    """

    def __init__(
        self, url: str, *, for_reading: bool = False, remedy: str = "", stop: threading.Event | None = None
    ) -> None:
        """With `for_reading`, public objects need no credentials. `remedy` ends every message. `stop` ends retries."""
        self._root = root_of(url)
        self._for_reading, self._remedy, self._stop = for_reading, remedy, stop
        self._opened: tuple[int, Client] | None = None
        """Process id and client."""
        self._opening = threading.Lock()

    def head(self, url: str) -> StoredObject:
        """Return the current state of an object. Raises Missing."""
        return self._ask(lambda client: self._stored(client.head(self._name(url))), "find", url)

    def list_objects(self, url: str) -> list[StoredObject]:
        """Return the object of that name, those that match a pattern, or all below it, sorted by name."""
        name, pattern = self._name(url), None
        if has_pattern(url):
            pattern = _compile(name)
            name = self._name(f"{url.partition('://')[0]}://{folder_of(url)}")
        elif name:
            with suppress(Missing):
                return [self.head(url)]
        prefix = f"{name}/" if name else ""
        entries = self._ask(lambda client: list(client.list(prefix, "")), "list", url)
        objects = [entry for entry in entries if not entry.name.endswith("/")]
        return [self._stored(entry) for entry in sorted(objects) if pattern is None or pattern.fullmatch(entry.name)]

    def list_names(self, url: str) -> list[str]:
        """Return the names of the objects and folders one level below a URL."""
        prefix = f"{name}/" if (name := self._name(url)) else ""
        entries = self._ask(lambda client: list(client.list(prefix, "/")), "list", url)
        names = (entry.name.removeprefix(prefix).rstrip("/") for entry in entries)
        return sorted({name for name in names if name})

    def read(self, url: str, begin: int, end: int, *, version: str = "", stop: threading.Event | None = None) -> bytes:
        """Return bytes begin .. end - 1 of an object. Raises Overtaken unless it has `version`, if given."""

        def fetch(client: Client) -> bytes:
            data, current = client.read(self._name(url), begin, end)
            if version and _bare(current) != version:
                raise self._overtaken(url)
            if len(data) != end - begin:
                raise faults.DamagedInTransit(f"{len(data):,} bytes instead of {end - begin:,}")
            return data

        return self._ask(fetch, "read", url, num_bytes=end - begin, stop=stop) if end > begin else b""

    def read_small(self, url: str, max_bytes: int = MAX_BYTES) -> bytes:
        """Return the contents of an object of llmscale. Raises DataError if it is longer than `max_bytes`."""
        return self._read_all(url, max_bytes)[0]

    def read_versioned(self, url: str) -> tuple[bytes, str] | None:
        """Return the contents and their version, for `replace`; None for a missing object."""
        self._check_conditional(url)
        try:
            return self._read_all(url, MAX_BYTES)
        except Missing:
            self.list_names(url)  # fails without the bucket
            return None

    def _read_all(self, url: str, max_bytes: int) -> tuple[bytes, str]:
        size_bytes = self.head(url).size_bytes
        if size_bytes > max_bytes:
            raise DataError(f"{url} has {size_bytes:,} bytes; llmscale writes at most {max_bytes:,} there.")
        return self._ask(lambda client: client.read(self._name(url), 0, None), "read", url, num_bytes=size_bytes)

    def write(self, url: str, contents: bytes) -> None:
        """Write an object, whatever was there, and compare its size."""

        def put(client: Client) -> None:
            client.put(self._name(url), contents, None)
            self._check_size(client, url, len(contents))

        self._ask(put, "upload", url, num_bytes=len(contents))

    def create(self, url: str, contents: bytes) -> str:
        """Write a new object of at most MAX_BYTES and return its version. Raises Overtaken if there is one.

        Callers make contents unique, so that an earlier attempt whose answer was lost is recognised. After
        UnreachableError the contents may have been written, or may still arrive.
        """
        return self._put_if(url, contents, "")

    def replace(self, url: str, contents: bytes, version: str) -> str:
        """Replace this version and return the new one, as `create` does. Raises Overtaken for another version."""
        return self._put_if(url, contents, version)

    def _put_if(self, url: str, contents: bytes, condition: str) -> str:
        self._check_conditional(url)
        if len(contents) > MAX_BYTES:
            raise DataError(f"{url} would have {len(contents):,} bytes. At most {MAX_BYTES:,} are written.")
        try:
            return self._ask(
                lambda client: client.put(self._name(url), contents, condition), "write", url, num_bytes=len(contents)
            )
        except (Missing, Overtaken) as error:
            stored = self.read_versioned(url)  # fails without the bucket
            if stored is None or stored[0] != contents:
                raise self._overtaken(url) from error
            return stored[1]
        except DataError as error:
            if faults.is_unsupported(error):
                raise _unconditional(url) from error
            raise

    def delete(self, url: str) -> None:
        """Remove an object; a missing one is fine, as an attempt without an answer may have removed it."""
        with suppress(Missing):
            self._ask(lambda client: client.delete(self._name(url)), "remove", url)

    def download(self, url: str, path: Path) -> None:
        """Write an object to a local path atomically; its bytes on this disk show progress. OSError comes from the
        folder."""
        with tempfile.TemporaryDirectory(
            prefix=f".download-{path.name}-", dir=path.parent, ignore_cleanup_errors=True
        ) as folder:

            def fetch(client: Client) -> None:
                # An abandoned attempt may still write, so each has its own folder.
                target = Path(tempfile.mkdtemp(dir=folder), path.name)
                client.download(self._name(url), target)
                target.replace(path)

            self._ask(fetch, "fetch", url, progress=lambda: _count_bytes(Path(folder)))

    def upload(self, path: Path, url: str) -> None:
        """Write a file to an object, whatever was there, and compare its size."""
        size_bytes = path.stat().st_size

        def send(client: Client) -> None:
            client.upload(path, self._name(url))
            self._check_size(client, url, size_bytes)

        self._ask(send, "upload", url, num_bytes=size_bytes)

    def _check_size(self, client: Client, url: str, size_bytes: int) -> None:
        stored_bytes = client.head(self._name(url)).size_bytes
        if stored_bytes != size_bytes:
            raise faults.DamagedInTransit(f"{stored_bytes:,} bytes came there instead of {size_bytes:,}")

    def _ask(
        self,
        request: Callable[[Client], _T],
        verb: str,
        url: str,
        *,
        num_bytes: int = 0,
        progress: Callable[[], int] = lambda: 0,
        stop: threading.Event | None = None,
    ) -> _T:
        """Return the answer to a request, from a new client if the credentials of the open one have expired."""

        def attempt() -> _T:
            client = self._open(None)
            try:
                return request(client)
            except Exception as error:  # each client raises its own classes
                if not faults.lacks_credentials(error):
                    raise
            return request(self._open(client))

        return faults.with_retries(
            attempt,
            f"Cannot {verb} {url}",
            url=url,
            remedy=self._remedy,
            stop=stop or self._stop,
            num_bytes=num_bytes,
            progress=progress,
        )

    def _open(self, expired: Client | None) -> Client:
        """Return a client of this process, and another one than `expired`."""
        with self._opening:
            opened = self._opened
            if opened is None or opened[0] != os.getpid() or opened[1] is expired:
                opened = self._opened = os.getpid(), open_client(self._root, for_reading=self._for_reading)
            return opened[1]

    def _name(self, url: str) -> str:
        """Return an object's name within the bucket."""
        return url.removeprefix(self._root).strip("/")

    def _stored(self, entry: Entry) -> StoredObject:
        return StoredObject(f"{self._root}/{entry.name}", entry.size_bytes, _bare(entry.version))

    def _check_conditional(self, url: str) -> None:
        """Raise DataError for a store without conditional writes."""
        kind = scheme_of(url).kind
        if kind == "hf" or not self._name(url):
            legal = ", ".join(SCHEMES[name].example for name in ("s3", "gs", "az"))
            raise DataError(f"{url} cannot be shared by several writers. Legal: {legal}.")
        if kind == "gs" and has_hmac_key():
            raise DataError(
                f"Cannot open {url} with GCS_KEY and GCS_SECRET: requests with an HMAC key have no conditional writes. "
                "Unset both, and give GOOGLE_APPLICATION_CREDENTIALS (a key file) or `gcloud auth application-default "
                "login`."
            )

    def _overtaken(self, url: str) -> Overtaken:
        return Overtaken(f"Another writer has changed {url} since it was read. Run the command again.")


def probe_conditions(url: str) -> None:
    """Check with a probe object below `url` that the store honours the conditions of writes. Raises DataError."""
    probe_url, store = f"{url.rstrip('/')}/.conditional-{secrets.token_hex(8)}", Store(url)
    first = store.create(probe_url, secrets.token_bytes(16))
    try:
        store.replace(probe_url, secrets.token_bytes(16), first)
        with suppress(Overtaken):
            store.create(probe_url, secrets.token_bytes(16))
            raise _unconditional(probe_url)
        with suppress(Overtaken):
            store.replace(probe_url, secrets.token_bytes(16), first)
            raise _unconditional(probe_url)
    finally:
        store.delete(probe_url)


def _unconditional(url: str) -> DataError:
    return DataError(
        f"The store of {url} ignores or refuses conditional writes (If-Match, If-None-Match), so two runs could "
        "overwrite each other. Update the server, or use another store."
    )


def _bare(version: str) -> str:
    """Return a version without quotes, which Azure's listings leave out."""
    return version.strip('"')


def _compile(pattern: str) -> re.Pattern[str]:
    """Return the expression of a pattern: * within a name, ** across /."""
    parts, place = [], 0
    for wildcard in _WILDCARD.finditer(pattern):
        parts.append(re.escape(pattern[place : wildcard.start()]))
        parts.append(_MATCHES.get(wildcard[0], wildcard[0].replace("[!", "[^", 1)))
        place = wildcard.end()
    return re.compile("".join(parts) + re.escape(pattern[place:]))


def _count_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder, or -1 if one is removed meanwhile."""
    with suppress(OSError):
        return sum(path.stat().st_size for path in folder.rglob("*"))
    return -1
