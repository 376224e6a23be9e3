"""The stores' own clients behind one interface: boto3, google-cloud-storage, azure-storage-blob and huggingface_hub.

Their retries are off, as Store retries. Uploads carry a checksum that the store verifies. The libraries find
credentials, proxies and certificates as they always do, in the environment and in their own files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from llmscale.data.storage.faults import STALL_S
from llmscale.data.storage.schemes import SCHEMES, path_of, scheme_of
from llmscale.errors import DataError

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential
    from azure.storage.blob import BlobServiceClient

_CHUNK_BYTES = 1 << 20
#: Longer files are uploaded to Azure in parts of this size, each with its checksum.
_AZURE_PART_BYTES = 8 << 20
_GOOGLE_S3_URL = "https://storage.googleapis.com"


class Entry(NamedTuple):
    """An object as listed or described, or a folder, whose name ends with a slash."""

    name: str
    size_bytes: int
    version: str
    """Changes with the contents: an ETag, Google's generation, or the Hub's blob id."""


class Client(Protocol):
    """The objects of one bucket. Thread-safe. Raises whatever the store's library raises, and FileNotFoundError."""

    def head(self, name: str) -> Entry: ...

    def list(self, prefix: str, delimiter: str) -> Iterable[Entry]:
        """Yield what begins with a prefix; with the delimiter "/", one level and its folders."""

    def read(self, name: str, begin: int, end: int | None) -> tuple[bytes, str]:
        """Return bytes begin .. end - 1, or all of them, and the object's version."""

    def put(self, name: str, contents: bytes, condition: str | None) -> str:
        """Write an object and return its version: without a condition (None), only a new one (""), or only in place
        of that version."""

    def delete(self, name: str) -> None: ...

    def download(self, name: str, path: Path) -> None: ...

    def upload(self, path: Path, name: str) -> None: ...


def open_client(root: str, *, for_reading: bool) -> Client:
    """Return a client for the bucket at the URL `root`. With `for_reading`, public objects need no credentials."""
    kind, bucket = scheme_of(root).kind, path_of(root)
    if kind == "azure":
        return _Azure(bucket, root)
    if kind == "hf":
        return _Hub(bucket)
    if kind == "s3":
        return _Amazon(bucket, for_reading=for_reading, endpoint_url=os.environ.get("S3_ENDPOINT_URL"))
    if has_hmac_key():
        return _open_google_s3(bucket)
    return _Google(bucket, for_reading=for_reading)


def has_hmac_key() -> bool:
    """Return whether the environment names an HMAC key for Google's store, which takes it by Amazon's protocol."""
    return bool(os.environ.get("GCS_KEY") and os.environ.get("GCS_SECRET"))


class _Amazon:
    """A bucket of S3, or of a store with its protocol."""

    def __init__(
        self, bucket: str, *, for_reading: bool = False, settings: dict[str, Any] | None = None, **login: Any
    ) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore import UNSIGNED
        from botocore.config import Config

        session = boto3.session.Session()
        limits = {"connect_timeout": STALL_S, "read_timeout": STALL_S, "retries": {"total_max_attempts": 1}}
        if for_reading and session.get_credentials() is None:
            limits["signature_version"] = UNSIGNED
        self._client = session.client("s3", config=Config(**limits, **(settings or {})), **login)
        self._bucket = bucket
        # No threads: a process would wait at its end for a pool's threads, even if a store stalls them.
        self._transfer = TransferConfig(use_threads=False)
        self._rights = {"ACL": os.environ["S3_CANNED_ACL"]} if "S3_CANNED_ACL" in os.environ else {}

    def head(self, name: str) -> Entry:
        answer = self._client.head_object(Bucket=self._bucket, Key=name)
        return Entry(name, answer["ContentLength"], answer.get("ETag", ""))

    def list(self, prefix: str, delimiter: str) -> Iterable[Entry]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=prefix, Delimiter=delimiter
        )
        for page in pages:
            yield from (Entry(item["Key"], item["Size"], item["ETag"]) for item in page.get("Contents", ()))
            yield from (Entry(item["Prefix"], 0, "") for item in page.get("CommonPrefixes", ()))

    def read(self, name: str, begin: int, end: int | None) -> tuple[bytes, str]:
        part = {} if end is None else {"Range": f"bytes={begin}-{end - 1}"}
        answer = self._client.get_object(Bucket=self._bucket, Key=name, **part)
        return answer["Body"].read(), answer.get("ETag", "")

    def put(self, name: str, contents: bytes, condition: str | None) -> str:
        conditions = {} if condition is None else {"IfMatch": condition} if condition else {"IfNoneMatch": "*"}
        answer = self._client.put_object(Bucket=self._bucket, Key=name, Body=contents, **conditions, **self._rights)
        return str(answer["ETag"])

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=name)

    def download(self, name: str, path: Path) -> None:
        answer = self._client.get_object(Bucket=self._bucket, Key=name)
        with path.open("wb") as file:
            for chunk in answer["Body"].iter_chunks(_CHUNK_BYTES):
                file.write(chunk)

    def upload(self, path: Path, name: str) -> None:
        self._client.upload_file(str(path), self._bucket, name, ExtraArgs=self._rights, Config=self._transfer)


def _open_google_s3(bucket: str) -> _Amazon:
    """Return Google's store by Amazon's protocol, without the checksums of Amazon's that it does not know."""
    return _Amazon(
        bucket,
        settings={"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"},
        endpoint_url=_GOOGLE_S3_URL,
        region_name="auto",
        aws_access_key_id=os.environ["GCS_KEY"],
        aws_secret_access_key=os.environ["GCS_SECRET"],
    )


class _Google:
    """A bucket of Google's store."""

    def __init__(self, bucket: str, *, for_reading: bool) -> None:
        from google.auth import default
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud.storage import Client

        try:
            # Requests name buckets, never a project.
            self._client = Client(project="none", credentials=default()[0])
        except DefaultCredentialsError:
            if not for_reading:
                raise
            self._client = Client.create_anonymous_client()
        self._bucket = self._client.bucket(bucket)
        self._limits: dict[str, Any] = {"retry": None, "timeout": STALL_S}

    def head(self, name: str) -> Entry:
        blob = self._bucket.get_blob(name, **self._limits)
        if blob is None:
            raise FileNotFoundError(name)
        return Entry(name, blob.size, str(blob.generation))

    def list(self, prefix: str, delimiter: str) -> Iterable[Entry]:
        blobs = self._client.list_blobs(self._bucket, prefix=prefix, delimiter=delimiter or None, **self._limits)
        yield from (Entry(blob.name, blob.size, str(blob.generation)) for blob in blobs)
        yield from (Entry(name, 0, "") for name in blobs.prefixes)

    def read(self, name: str, begin: int, end: int | None) -> tuple[bytes, str]:
        blob = self._bucket.blob(name)
        last = None if end is None else end - 1
        contents = blob.download_as_bytes(start=begin or None, end=last, raw_download=True, **self._limits)
        return contents, str(blob.generation)

    def put(self, name: str, contents: bytes, condition: str | None) -> str:
        blob = self._bucket.blob(name)
        conditions = {}
        if condition is not None:
            conditions["if_generation_match"] = int(condition or 0)
            # Google caches public objects for an hour otherwise.
            blob.cache_control = "no-store"
        kind = "application/octet-stream"
        blob.upload_from_string(contents, kind, checksum="crc32c", **conditions, **self._limits)
        return str(blob.generation)

    def delete(self, name: str) -> None:
        self._bucket.blob(name).delete(**self._limits)

    def download(self, name: str, path: Path) -> None:
        with path.open("wb") as file:
            self._bucket.blob(name).download_to_file(file, raw_download=True, **self._limits)

    def upload(self, path: Path, name: str) -> None:
        self._bucket.blob(name).upload_from_filename(str(path), checksum="crc32c", **self._limits)


class _Azure:
    """A container of the account in the environment; of another endpoint by a connection string."""

    def __init__(self, container: str, url: str) -> None:
        """Raises DataError when no account is named."""
        self._container = _open_azure_account(url).get_container_client(container)

    def head(self, name: str) -> Entry:
        return self._describe(self._container.get_blob_client(name).get_blob_properties())

    def _describe(self, blob: Any) -> Entry:
        # A folder of an account with a hierarchical namespace.
        is_folder = (getattr(blob, "metadata", None) or {}).get("hdi_isfolder") == "true"
        return Entry(f"{blob.name}/" if is_folder else blob.name, blob.get("size") or 0, str(blob.get("etag")))

    def list(self, prefix: str, delimiter: str) -> Iterable[Entry]:
        walk = self._container.walk_blobs if delimiter else self._container.list_blobs
        yield from map(self._describe, walk(name_starts_with=prefix, include=["metadata"]))

    def read(self, name: str, begin: int, end: int | None) -> tuple[bytes, str]:
        answer = self._container.download_blob(name, begin, None if end is None else end - begin)
        return answer.readall(), str(answer.properties.etag)

    def put(self, name: str, contents: bytes, condition: str | None) -> str:
        from azure.core import MatchConditions

        options: dict[str, Any] = {"overwrite": condition != ""}
        if condition:
            options |= {"etag": condition, "match_condition": MatchConditions.IfNotModified}
        blob = self._container.get_blob_client(name)
        return str(blob.upload_blob(contents, validate_content=True, **options)["etag"])

    def delete(self, name: str) -> None:
        self._container.delete_blob(name)

    def download(self, name: str, path: Path) -> None:
        with path.open("wb") as file:
            self._container.download_blob(name).readinto(file)

    def upload(self, path: Path, name: str) -> None:
        with path.open("rb") as file:
            self._container.upload_blob(name, file, overwrite=True, validate_content=True)


def _open_azure_account(url: str) -> BlobServiceClient:
    """Return a client of the account in the environment. Raises DataError when none is named."""
    from azure.storage.blob import BlobServiceClient

    limits: dict[str, Any] = {
        "retry_total": 0,
        "connection_timeout": STALL_S,
        "read_timeout": STALL_S,
        "max_single_put_size": _AZURE_PART_BYTES,
        "max_block_size": _AZURE_PART_BYTES,
    }
    if connection := os.environ.get("AZURE_STORAGE_CONNECTION_STRING"):
        return BlobServiceClient.from_connection_string(connection, **limits)
    account = os.environ.get("AZURE_ACCOUNT_NAME") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if not account:
        raise DataError(f"Cannot open {url}: AZURE_ACCOUNT_NAME is not set. Give {SCHEMES['az'].credentials}.")
    key = os.environ.get("AZURE_ACCOUNT_ACCESS_KEY") or os.environ.get("AZURE_STORAGE_ACCOUNT_KEY")
    return BlobServiceClient(
        f"https://{account}.blob.core.windows.net", credential=key or _open_azure_identity(), **limits
    )


def _open_azure_identity() -> TokenCredential:
    from azure.identity import AzureCliCredential, ChainedTokenCredential, DefaultAzureCredential

    return ChainedTokenCredential(AzureCliCredential(), DefaultAzureCredential())


class _Hub:
    """A repository of the Hub. Every write is a commit, one at a time."""

    def __init__(self, path: str) -> None:
        """`path` is datasets/ORGANISATION/NAME or that of a model, perhaps with @REVISION."""
        from huggingface_hub import HfApi

        _quieten_hub()
        name, _, revision = path.partition("@")
        kind, separator, below = name.partition("/")
        is_typed = kind in ("datasets", "spaces") and separator
        self._repository: dict[str, Any] = {
            "repo_id": below if is_typed else name,
            "repo_type": kind.removesuffix("s") if is_typed else "model",
            "revision": revision or None,
        }
        self._token = os.environ.get("HF_TOKEN")
        self._api = HfApi(token=self._token)
        self._is_committing = threading.Lock()

    def head(self, name: str) -> Entry:
        described = list(map(_describe_on_hub, self._api.get_paths_info(paths=[name], **self._repository)))
        if not described or described[0].name != name:
            raise FileNotFoundError(name)
        return described[0]

    def list(self, prefix: str, delimiter: str) -> Iterable[Entry]:
        from huggingface_hub.errors import EntryNotFoundError

        folder = prefix.strip("/") or None
        try:
            items = list(self._api.list_repo_tree(path_in_repo=folder, recursive=not delimiter, **self._repository))
        except EntryNotFoundError:
            return ()
        return map(_describe_on_hub, items)

    def read(self, name: str, begin: int, end: int | None) -> tuple[bytes, str]:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = build_hf_headers(token=self._token)
        if end is not None:
            headers["Range"] = f"bytes={begin}-{end - 1}"
        url = hf_hub_url(filename=name, endpoint=self._api.endpoint, **self._repository)
        answer = get_session().get(url, headers=headers, timeout=STALL_S)
        hf_raise_for_status(answer)
        # The answer's ETag may be that of another server.
        return answer.content, self.head(name).version

    def put(self, name: str, contents: bytes, condition: str | None) -> str:
        assert condition is None
        self._commit(name, contents)
        return ""

    def delete(self, name: str) -> None:
        self.head(name)
        with self._is_committing:
            self._api.delete_file(name, commit_message=f"Remove {name}", **self._repository)

    def download(self, name: str, path: Path) -> None:
        from huggingface_hub import hf_hub_download

        fetched = hf_hub_download(filename=name, local_dir=path.parent, token=self._token, **self._repository)
        Path(fetched).replace(path)

    def upload(self, path: Path, name: str) -> None:
        self._commit(name, path)

    def _commit(self, name: str, contents: bytes | Path) -> None:
        from huggingface_hub import CommitOperationAdd

        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=contents)]
        # Large files are uploaded concurrently, before the commit that names them.
        self._api.preupload_lfs_files(additions=added, **self._repository)
        with self._is_committing:
            self._api.create_commit(operations=added, commit_message=f"Add {name}", **self._repository)


def _describe_on_hub(item: Any) -> Entry:
    """Return a file or a folder of the Hub, which has no size."""
    if hasattr(item, "size"):
        return Entry(item.path, item.size, item.blob_id)
    return Entry(f"{item.path}/", 0, "")


def _quieten_hub() -> None:
    """Turn off the Hub client's progress bars and warnings of retries, unless the environment asks for them."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, logging

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()
    if "HF_HUB_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
