"""Objects of a store through fsspec: list in a fixed order, describe, read in parts, upload, remove."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, TypeVar, cast

from llmscale.data.storage import faults
from llmscale.data.storage.schemes import SCHEMES, path_of, scheme_of
from llmscale.errors import DataError

_T = TypeVar("_T")
GOOGLE_S3_URL = "https://storage.googleapis.com"
#: Settings of Amazon's clients. Their own retries are off: faults.with_retries does them.
S3_LIMITS = {"connect_timeout": faults.STALL_S, "read_timeout": faults.STALL_S, "retries": {"total_max_attempts": 1}}


class FileSystem(Protocol):
    """The methods of fsspec's file systems that are used here."""

    def info(self, path: str) -> dict[str, Any]: ...

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]: ...

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]: ...

    def glob(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]: ...

    def cat_file(self, path: str, *, start: int | None, end: int | None) -> bytes: ...

    def rm_file(self, path: str) -> None: ...

    def invalidate_cache(self) -> None: ...


@dataclass(frozen=True)
class StoredObject:
    """An object as listed."""

    url: str
    path: str
    """BUCKET/NAME."""
    size_bytes: int
    etag: str
    """The store's ETag, else the time of modification; changes with the contents."""


class Store:
    """The store that a URL names. Every method retries transient errors and raises DataError."""

    def __init__(self, url: str, *, for_reading: bool = False, remedy: str = "") -> None:
        """With `for_reading`, public objects need no credentials. `remedy` ends every message."""
        self._remedy = remedy
        self._prefix = url.partition("://")[0]
        # The Hub's client answers from a listing that another thread may have begun before the object was there.
        self._listing = threading.Lock() if scheme_of(url).kind == "hf" else nullcontext()
        self._files = faults.with_retries(
            lambda: _open_filesystem(url, for_reading=for_reading), f"Cannot open {url}", url=url
        )

    def find(self, url: str) -> list[StoredObject]:
        """Return the object of that name, those that match a pattern, or all below it, sorted by name."""
        path = path_of(url)

        def look() -> Iterable[dict[str, Any]]:
            self._files.invalidate_cache()
            if any(letter in path for letter in "*?["):
                return self._files.glob(path, detail=True).values()
            try:
                found = self._files.info(path)
            except FileNotFoundError:
                return []
            if found["type"] != "directory":
                return [found]
            return self._files.find(path, detail=True).values()

        infos = self._retried(look, f"Cannot list {url}", url)
        return sorted((self._describe(info) for info in infos if info["type"] == "file"), key=lambda o: o.path)

    def names_in(self, url: str) -> list[str]:
        """Return the names one level below a URL."""
        path = path_of(url)

        def look() -> list[str]:
            self._files.invalidate_cache()
            try:
                return [str(info["name"]) for info in self._files.ls(path, detail=True)]
            except FileNotFoundError:
                return []

        found = self._retried(look, f"Cannot list {url}", url)
        inside = (name.strip("/").removeprefix(f"{path}/") for name in found if name.strip("/").startswith(f"{path}/"))
        return sorted(name for name in inside if name)

    def describe(self, url: str, *, stop: threading.Event | None = None) -> StoredObject:
        """Return the current state of one object. `stop` ends the retries."""

        def look() -> StoredObject:
            with self._listing:
                self._files.invalidate_cache()
                return self._describe(self._files.info(path_of(url)))

        return self._retried(look, f"Cannot find {url}", url, stop)

    def read(self, url: str, begin: int = 0, end: int | None = None, *, stop: threading.Event | None = None) -> bytes:
        """Return bytes begin .. end - 1 of an object. `stop` ends the retries."""

        def fetch() -> bytes:
            data = self._files.cat_file(path_of(url), start=begin, end=end)
            if end is not None and len(data) != end - begin:
                raise faults.DamagedInTransit(f"{len(data):,} bytes instead of {end - begin:,}")
            return bytes(data)

        where = f", from byte {begin:,}" if begin else ""
        return self._retried(fetch, f"Cannot read {url}{where}", url, stop, (end or begin) - begin)

    def read_small(self, url: str, max_bytes: int) -> bytes:
        """Return the contents of an object of llmscale. Raises DataError if it is longer than `max_bytes`."""
        size_bytes = self.describe(url).size_bytes
        if size_bytes > max_bytes:
            raise DataError(f"{url} has {size_bytes:,} bytes, so llmscale did not write it.")
        return self.read(url, 0, size_bytes)

    def remove(self, url: str) -> None:
        """Remove an object; a missing one is fine, as an attempt without an answer may have removed it."""

        def remove() -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(path_of(url))

        self._retried(remove, f"Cannot remove {url}", url)

    def _retried(
        self, action: Callable[[], _T], what: str, url: str, stop: threading.Event | None = None, num_bytes: int = 0
    ) -> _T:
        return faults.with_retries(action, what, url=url, remedy=self._remedy, stop=stop, num_bytes=num_bytes)

    def _describe(self, info: dict[str, Any]) -> StoredObject:
        path = str(info["name"]).strip("/")
        etags = (info.get(name) for name in ("ETag", "etag", "blob_id", "LastModified", "last_modified", "mtime"))
        etag = next((str(etag) for etag in etags if etag), "")
        return StoredObject(f"{self._prefix}://{path}", path, int(info["size"] or 0), etag.strip('"'))


def _open_filesystem(url: str, *, for_reading: bool) -> FileSystem:
    """Open a file system with the credentials that Streaming's transport reads. Raises whatever the client raises."""
    kind = scheme_of(url).kind
    if kind == "s3":
        return _open_s3(os.environ.get("S3_ENDPOINT_URL"), for_reading=for_reading)
    if kind == "gs":
        key, secret = os.environ.get("GCS_KEY"), os.environ.get("GCS_SECRET")
        if key and secret:
            return _open_s3(GOOGLE_S3_URL, key=key, secret=secret)
        from llmscale.data.storage.google_files import GoogleFiles

        return cast(FileSystem, GoogleFiles(for_reading=for_reading))
    if kind == "azure":
        from adlfs import AzureBlobFileSystem

        return cast(FileSystem, AzureBlobFileSystem(**find_azure_login(url), anon=False, skip_instance_cache=True))
    from huggingface_hub import HfFileSystem

    return cast(FileSystem, HfFileSystem(token=os.environ.get("HF_TOKEN"), skip_instance_cache=True))


def _open_s3(
    endpoint_url: str | None, *, key: str | None = None, secret: str | None = None, for_reading: bool = False
) -> FileSystem:
    from botocore.session import get_session
    from s3fs import S3FileSystem

    is_public = for_reading and key is None and get_session().get_credentials() is None
    made = S3FileSystem(
        anon=is_public,
        key=key,
        secret=secret,
        endpoint_url=endpoint_url,
        config_kwargs=S3_LIMITS,
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    made.retries = 1
    return cast(FileSystem, made)


class AzureLogin(TypedDict, total=False):
    """Azure credentials, by adlfs's names."""

    connection_string: str
    account_name: str
    account_key: str | None


def find_azure_login(url: str) -> AzureLogin:
    """Return the Azure credentials in the environment. Raises DataError without any."""
    if connection := os.environ.get("AZURE_STORAGE_CONNECTION_STRING"):
        return {"connection_string": connection}
    account = os.environ.get("AZURE_ACCOUNT_NAME") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if not account:
        raise DataError(f"Cannot open {url}: AZURE_ACCOUNT_NAME is not set. Give {SCHEMES['az'].credentials}.")
    key = os.environ.get("AZURE_ACCOUNT_ACCESS_KEY") or os.environ.get("AZURE_STORAGE_ACCOUNT_KEY")
    return {"account_name": account, "account_key": key}
