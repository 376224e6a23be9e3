"""A small object of a store that several writers change by compare-and-swap: a lease, or a pointer to the latest save.

Conditions by store: If-Match and If-None-Match of S3 and Azure, ifGenerationMatch of Google.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from llmscale.data.storage import faults
from llmscale.data.storage.objects import Store
from llmscale.data.storage.schemes import SCHEMES, path_of, scheme_of
from llmscale.data.storage.transport import find_s3_acl, open_azure_client, open_s3_client
from llmscale.errors import DataError
from llmscale.untrusted.documents import MAX_BYTES

_T = TypeVar("_T")


class Overtaken(DataError):
    """Another writer has changed the object since it was read."""


class SharedObject:
    """A small object of a store that several writers change by compare-and-swap. Thread-safe.

    Every method retries transient errors and raises DataError.
    """

    def __init__(self, url: str) -> None:
        """Raise DataError for a store without conditional writes."""
        self._url = url
        kind = scheme_of(url).kind
        if kind not in _OBJECTS or not all(path_of(url).partition("/")):
            legal = ", ".join(SCHEMES[name].example for name in ("s3", "gs", "az"))
            raise DataError(f"{url} cannot be shared by several writers. Legal: {legal}.")
        if kind == "gs" and os.environ.get("GCS_KEY") and os.environ.get("GCS_SECRET"):
            raise DataError(
                f"Cannot open {url} with GCS_KEY and GCS_SECRET: requests with an HMAC key have no conditional writes. "
                "Unset both, and give GOOGLE_APPLICATION_CREDENTIALS (a key file) or `gcloud auth application-default "
                "login`."
            )
        self._open: Callable[[str], _Object] = _OBJECTS[kind]
        self._opened: _Object | None = None

    def read(self) -> tuple[bytes, str] | None:
        """Return the contents and their version (ETag or generation); None for a missing object.

        Raises DataError for more than MAX_BYTES, before they are read to the end.
        """
        # MAX_BYTES only sets the time limit; the client's timeout ends a stalled request earlier.
        return self._ask(lambda opened: opened.read(), "read", MAX_BYTES)

    def write(self, contents: bytes, version: str | None) -> str:
        """Replace the contents if their version still is `version`, and return the new version.

        With None, only creates the object. Callers make contents unique, so that an earlier attempt whose answer was
        lost is recognised. Raises Overtaken when another writer was first. After UnreachableError the contents may
        have been written, or may still arrive.
        """
        if len(contents) > MAX_BYTES:
            raise _too_large(self._url, len(contents))
        try:
            return self._ask(lambda opened: opened.write(contents, version), "write", len(contents))
        except Overtaken:
            found = self.read()
            if found is None or found[0] != contents:
                raise
            return found[1]

    def _ask(self, request: Callable[[_Object], _T], verb: str, num_bytes: int) -> _T:
        """Return the answer to a request, from a new client if the credentials of the open one have expired."""

        def attempt() -> _T:
            opened = self._opened
            if opened is not None:
                try:
                    return request(opened)
                except Exception as error:  # each client raises its own classes
                    if not faults.lacks_credentials(error):
                        raise
                    self._opened = None
            opened = self._open(self._url)
            answer = request(opened)
            self._opened = opened
            return answer

        return faults.with_retries(attempt, f"Cannot {verb} {self._url}", url=self._url, num_bytes=num_bytes)


def check_conditional(url: str) -> None:
    """Check with a probe object below `url` that the store honours the conditions of writes. Raises DataError."""
    probe_url = f"{url.rstrip('/')}/.conditional-{secrets.token_hex(8)}"
    probe = SharedObject(probe_url)
    first = probe.write(secrets.token_bytes(16), None)
    try:
        probe.write(secrets.token_bytes(16), first)
        for version in (None, first):
            try:
                probe.write(secrets.token_bytes(16), version)
            except Overtaken:
                continue
            raise _unconditional(probe_url)
    finally:
        Store(probe_url).remove(probe_url)


def _unconditional(url: str) -> DataError:
    return DataError(
        f"The store of {url} ignores or refuses conditional writes (If-Match, If-None-Match), so two runs could "
        "overwrite each other. Update the server, or use another store."
    )


def _too_large(url: str, size_bytes: int) -> DataError:
    return DataError(f"{url} has {size_bytes:,} bytes. At most {MAX_BYTES:,} are read and written.")


def _overtaken(url: str) -> Overtaken:
    return Overtaken(f"Another writer has changed {url} since it was read.")


# An object by a client of its store. `read` returns contents and version from one answer; `write` writes once, returns
# the version, and raises Overtaken, which a lost answer can cause. Both raise whatever the client raises.


class _S3Object:
    def __init__(self, url: str) -> None:
        bucket, _, name = path_of(url).partition("/")
        self._url, self._where = url, {"Bucket": bucket, "Key": name}
        self._client = open_s3_client(endpoint_url=os.environ.get("S3_ENDPOINT_URL"))

    def read(self) -> tuple[bytes, str] | None:
        from botocore.exceptions import ClientError

        try:
            answer = self._client.get_object(**self._where)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code == "404":
                raise faults.DamagedInTransit("the answer was cut short") from error
            if code == "NoSuchKey":
                return None
            raise
        size_bytes = answer["ContentLength"]
        with answer["Body"] as body:
            if size_bytes > MAX_BYTES:
                raise _too_large(self._url, size_bytes)
            contents = bytes(body.read())
        return contents, str(answer["ETag"])

    def write(self, contents: bytes, version: str | None) -> str:
        from botocore.exceptions import ClientError

        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        try:
            answer = self._client.put_object(**self._where, **condition, **find_s3_acl(), Body=contents)
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            # NoSuchKey: another writer has removed the object.
            if status == 412 or error.response["Error"]["Code"] == "NoSuchKey":
                raise _overtaken(self._url) from error
            if status == 501:
                raise _unconditional(self._url) from error
            raise
        return str(answer["ETag"])


class _GoogleObject:
    def __init__(self, url: str) -> None:
        from llmscale.data.storage.google_files import LIMITS, open_client

        self._bucket, _, self._name = path_of(url).partition("/")
        self._url, self._limits, self._client = url, LIMITS, open_client()

    def read(self) -> tuple[bytes, str] | None:
        from google.cloud.exceptions import NotFound

        blob = self._client.bucket(self._bucket).blob(self._name)
        try:
            contents: bytes = blob.download_as_bytes(end=MAX_BYTES, raw_download=True, **self._limits)
        except NotFound:
            # The answer is the same without the bucket; a listing is not.
            list(self._client.list_blobs(self._bucket, prefix=self._name, max_results=1, **self._limits))
            return None
        if len(contents) > MAX_BYTES:
            raise _too_large(self._url, blob.size or len(contents))
        return contents, str(blob.generation)

    def write(self, contents: bytes, version: str | None) -> str:
        from google.cloud.exceptions import PreconditionFailed

        blob = self._client.bucket(self._bucket).blob(self._name)
        # Google caches public objects for an hour otherwise.
        blob.cache_control = "no-store"
        try:
            blob.upload_from_string(
                contents, "application/octet-stream", if_generation_match=int(version or 0), **self._limits
            )
        except PreconditionFailed as error:
            raise _overtaken(self._url) from error
        return str(blob.generation)


class _AzureObject:
    def __init__(self, url: str) -> None:
        container, _, name = path_of(url).partition("/")
        self._url, self._client = url, open_azure_client(url).get_blob_client(container, name)

    def read(self) -> tuple[bytes, str] | None:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            answer = self._client.download_blob()
        except ResourceNotFoundError as error:
            if getattr(error, "error_code", None) == "BlobNotFound":
                return None
            raise
        if answer.size > MAX_BYTES:
            raise _too_large(self._url, answer.size)
        return answer.readall(), str(answer.properties.etag)

    def write(self, contents: bytes, version: str | None) -> str:
        from azure.core import MatchConditions
        from azure.core.exceptions import HttpResponseError

        condition: dict[str, Any] = {"overwrite": False}
        if version is not None:
            condition = {"overwrite": True, "etag": version, "match_condition": MatchConditions.IfNotModified}
        try:
            return str(self._client.upload_blob(contents, **condition)["etag"])
        except HttpResponseError as error:
            if getattr(error, "error_code", None) in ("BlobAlreadyExists", "ConditionNotMet", "BlobNotFound"):
                raise _overtaken(self._url) from error
            raise


_Object = _S3Object | _GoogleObject | _AzureObject
_OBJECTS: dict[str, Callable[[str], _Object]] = {"s3": _S3Object, "gs": _GoogleObject, "azure": _AzureObject}
