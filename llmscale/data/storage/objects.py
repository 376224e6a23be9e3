"""Objects of a store through fsspec: found in a fixed order, described, and read in parts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from llmscale.data.storage import faults
from llmscale.data.storage.azure_blobs import find_login
from llmscale.data.storage.schemes import path_of, scheme_of

_T = TypeVar("_T")
GOOGLE_S3_URL = "https://storage.googleapis.com"
#: Settings of Amazon's clients. They do not try again by themselves: whoever asks does, and says so.
S3_LIMITS = {"connect_timeout": faults.STALL_S, "read_timeout": faults.STALL_S, "retries": {"total_max_attempts": 1}}


class FileSystem(Protocol):
    """What is used here of fsspec's file systems."""

    def info(self, path: str) -> dict[str, Any]: ...

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]: ...

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]: ...

    def glob(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]: ...

    def cat_file(self, path: str, *, start: int | None, end: int | None) -> bytes: ...

    def rm_file(self, path: str) -> None: ...

    def invalidate_cache(self) -> None: ...


@dataclass(frozen=True)
class StoredObject:
    """An object as a listing describes it."""

    url: str
    path: str
    """Bucket and name."""
    size_bytes: int
    stamp: str
    """Changes with the contents: the store's ETag, else the time of modification."""


class Store:
    """The store that a URL names. Every method raises DataError, after retries where the fault may pass."""

    def __init__(self, url: str, *, for_reading: bool = False, remedy: str = "") -> None:
        """`for_reading`: what is public is read without credentials, if there are none. `remedy` ends what is said of
        a fault."""
        self._remedy = remedy
        self._prefix = url.partition("://")[0]
        scheme_of(url)
        self._files = faults.with_retries(
            lambda: _open_filesystem(url, for_reading=for_reading), f"Cannot open {url}", url=url
        )

    def find(self, url: str) -> list[StoredObject]:
        """The object of that name, those that match a pattern, or all below it, by name."""
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
        """Names right below a URL."""
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
        """One object, as it is now. `stop` ends the retries."""

        def look() -> StoredObject:
            self._files.invalidate_cache()
            return self._describe(self._files.info(path_of(url)))

        return self._retried(look, f"Cannot find {url}", url, stop)

    def read(self, url: str, begin: int = 0, end: int | None = None, *, stop: threading.Event | None = None) -> bytes:
        """Bytes begin .. end - 1 of an object. `stop` ends the retries."""

        def fetch() -> bytes:
            data = self._files.cat_file(path_of(url), start=begin, end=end)
            if end is not None and len(data) != end - begin:
                raise faults.DamagedInTransit(f"{len(data):,} bytes instead of {end - begin:,}")
            return bytes(data)

        where = f", from byte {begin:,}" if begin else ""
        return self._retried(fetch, f"Cannot read {url}{where}", url, stop, (end or begin) - begin)

    def remove(self, url: str) -> None:
        """Remove an object, which a try without an answer may have done already."""

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
        stamps = (info.get(name) for name in ("ETag", "etag", "blob_id", "LastModified", "last_modified", "mtime"))
        stamp = next((str(stamp) for stamp in stamps if stamp), "")
        return StoredObject(f"{self._prefix}://{path}", path, int(info["size"] or 0), stamp.strip('"'))


def _open_filesystem(url: str, *, for_reading: bool) -> FileSystem:
    """Credentials come from the variables that Streaming's transport reads. Raises what the client raises."""
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

        return cast(FileSystem, AzureBlobFileSystem(**find_login(url), anon=False, skip_instance_cache=True))
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
