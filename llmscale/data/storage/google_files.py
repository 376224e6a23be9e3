"""An fsspec file system for Google Cloud Storage on the client that Streaming requires: gcsfs needs a newer one.

pyarrow's file system reads other credentials than Streaming's transport and hides the HTTP status.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fsspec import AbstractFileSystem

from llmscale.data.storage.faults import STALL_S

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client

_T = TypeVar("_T")
#: Options of every request. The client's own retries are off: faults.with_retries does them.
LIMITS: dict[str, Any] = {"retry": None, "timeout": STALL_S}
_Info = dict[str, Any]


class GoogleFiles(AbstractFileSystem):
    """Objects of any bucket. Paths are BUCKET/NAME."""

    cachable = False

    def __init__(self, *, for_reading: bool) -> None:
        """With `for_reading`, public objects need no credentials. Raises DefaultCredentialsError."""
        super().__init__()
        self._client = open_client(is_public=for_reading)

    def info(self, path: str, **_: object) -> _Info:
        """Raises FileNotFoundError."""
        bucket, _, name = self._strip_protocol(path).partition("/")
        blob: Any = self._ask(self._client.bucket(bucket).get_blob, name) if name else None
        if blob is not None:
            return _describe(blob, bucket)
        if self.ls(path, detail=True):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: object) -> list[Any]:
        """Return names one level below, folders included. Raises FileNotFoundError: no such bucket."""
        bucket, _, folder = self._strip_protocol(path).partition("/")
        prefix = f"{folder.rstrip('/')}/" if folder else ""
        pages = self._client.list_blobs(bucket, prefix=prefix, delimiter="/", **LIMITS)
        blobs: list[Any] = self._ask(lambda **_: list(pages))
        infos = [_describe(blob, bucket) for blob in blobs if blob.name != prefix]
        infos += [{"name": f"{bucket}/{name.rstrip('/')}", "size": 0, "type": "directory"} for name in pages.prefixes]
        return infos if detail else [info["name"] for info in infos]

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any) -> Any:
        """Return all objects below in one listing."""
        bucket, _, folder = self._strip_protocol(path).partition("/")
        prefix = f"{folder.rstrip('/')}/" if folder else ""
        blobs: list[Any] = self._ask(lambda **limits: list(self._client.list_blobs(bucket, prefix=prefix, **limits)))
        found = {f"{bucket}/{blob.name}": _describe(blob, bucket) for blob in blobs if not blob.name.endswith("/")}
        return found if options.get("detail") else sorted(found)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        """Raises FileNotFoundError."""
        bucket, _, name = self._strip_protocol(path).partition("/")
        blob = self._client.bucket(bucket).blob(name)
        if end is not None and end <= (start or 0):
            return b""
        last = None if end is None else end - 1
        return bytes(self._ask(blob.download_as_bytes, start=start, end=last, raw_download=True))

    def rm_file(self, path: str) -> None:
        """Raises FileNotFoundError."""
        bucket, _, name = self._strip_protocol(path).partition("/")
        self._ask(self._client.bucket(bucket).blob(name).delete)

    def _ask(self, request: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
        """Return the answer to a request. Raises FileNotFoundError, and whatever the client raises."""
        from google.cloud.exceptions import NotFound

        try:
            return request(*arguments, **options, **LIMITS)
        except NotFound as error:
            raise FileNotFoundError(str(error)) from error


def _describe(blob: Blob, bucket: str) -> _Info:
    return {
        "name": f"{bucket}/{blob.name}",
        "size": blob.size,
        "type": "file",
        # The generation changes with every new content of the object.
        "etag": str(blob.generation or blob.etag or ""),
    }


def open_client(*, is_public: bool = False) -> Client:
    """Return a client. Raises DefaultCredentialsError."""
    from google.auth import default
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud.storage import Client

    try:
        credentials, _ = default()
    except DefaultCredentialsError:
        if not is_public:
            raise
        return Client.create_anonymous_client()
    # Requests name buckets, never a project.
    return Client(project="none", credentials=credentials)
