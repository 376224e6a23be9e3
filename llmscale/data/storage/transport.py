"""Copy files to and from a store: download by Streaming's transport (Azure by its client), upload by each client.

fsspec's file systems are not used here: the clients of Azure and the Hub in them have retries that cannot be limited,
and each commits to the Hub on its own.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmscale.data.shards.streaming_import import streaming_module
from llmscale.data.storage import faults
from llmscale.data.storage.faults import STALL_S
from llmscale.data.storage.objects import GOOGLE_S3_URL, S3_LIMITS, find_azure_login
from llmscale.data.storage.schemes import SCHEMES, path_of

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential
    from azure.storage.blob import BlobServiceClient


class Uploader(Protocol):
    """Uploads files to one bucket or dataset; thread-safe."""

    def upload(self, path: Path, url: str) -> None:
        """Upload a file. Raises whatever the client raises."""


class Downloader(Protocol):
    """Downloads files; holds a connection."""

    def download(self, remote: str, local: str, timeout: float) -> None:
        """Download a file. Raises whatever the client raises."""


def open_uploader(url: str) -> Uploader:
    """Return an uploader for a URL of a known scheme, after a check that the bucket exists. Raises whatever the client
    raises."""
    kind, bucket = _kind_of(url), path_of(url).partition("/")[0]
    if kind == "azure":
        blobs = _AzureBlobs(url)
        blobs.check_container(bucket)
        return blobs
    if kind == "hf":
        return _HubUploads(url)
    key, secret = os.environ.get("GCS_KEY"), os.environ.get("GCS_SECRET")
    if kind == "s3":
        return _S3Uploads(bucket, endpoint_url=os.environ.get("S3_ENDPOINT_URL"))
    if key and secret:
        login = {"aws_access_key_id": key, "aws_secret_access_key": secret, "region_name": "auto"}
        return _S3Uploads(bucket, endpoint_url=GOOGLE_S3_URL, **login)
    return _GoogleUploads(bucket)


def open_downloader(url: str) -> Downloader:
    """Return a downloader for a URL, of Streaming's other schemes too, or a local path. Raises whatever the client
    raises."""
    kind = _kind_of(url)
    if kind == "azure":
        return _AzureBlobs(url)
    if kind == "hf":
        _quieten_hub()
    found: Downloader = streaming_module("storage.download").CloudDownloader.get(url)
    return found


def download(
    opened: Callable[[], Downloader],
    remote: str,
    path: Path,
    what: str,
    to_error: Callable[[Exception], Exception] | None = None,
) -> None:
    """Download one file to a local path atomically; its bytes on this disk show progress. Errors and `to_error` are
    those of `faults.with_retries`; OSError comes from the folder."""
    with tempfile.TemporaryDirectory(
        prefix=f".download-{path.name}-", dir=path.parent, ignore_cleanup_errors=True
    ) as folder:

        def bring() -> None:
            # An abandoned attempt may still write, so each has its own folder.
            target = Path(tempfile.mkdtemp(dir=folder), path.name)
            opened().download(remote, str(target), faults.STALL_S)
            target.replace(path)

        faults.with_retries(bring, what, url=remote, to_error=to_error, progress=lambda: _count_bytes(Path(folder)))


def _count_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder, or -1 if one is removed meanwhile."""
    with suppress(OSError):
        return sum(path.stat().st_size for path in folder.rglob("*"))
    return -1


def _kind_of(url: str) -> str:
    name, separator, _ = url.partition("://")
    return SCHEMES[name].kind if separator and name in SCHEMES else name


def open_s3_client(**login: Any) -> Any:
    """Return boto3's client, with the credentials of the environment or `login`."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client("s3", config=Config(**S3_LIMITS), **login)


def find_s3_acl() -> dict[str, str]:
    """Return the access rights of new objects that the environment sets, as arguments of boto3."""
    return {"ACL": os.environ["S3_CANNED_ACL"]} if "S3_CANNED_ACL" in os.environ else {}


class _S3Uploads:
    """Uploads to a bucket of S3, or of a store with its protocol."""

    def __init__(self, bucket: str, **login: Any) -> None:
        from boto3.s3.transfer import TransferConfig

        self._client = open_s3_client(**login)
        # No threads: a process would wait at its end for a pool's threads, even if a store stalls them.
        self._transfer = TransferConfig(use_threads=False)
        self._client.head_bucket(Bucket=bucket)

    def upload(self, path: Path, url: str) -> None:
        bucket, _, name = path_of(url).partition("/")
        self._client.upload_file(str(path), bucket, name, ExtraArgs=find_s3_acl(), Config=self._transfer)


class _GoogleUploads:
    """Uploads to a bucket of Google's store."""

    def __init__(self, bucket: str) -> None:
        from llmscale.data.storage.google_files import LIMITS, open_client

        self._limits = LIMITS
        self._bucket = open_client().get_bucket(bucket, **LIMITS)

    def upload(self, path: Path, url: str) -> None:
        self._bucket.blob(path_of(url).partition("/")[2]).upload_from_filename(str(path), **self._limits)


def open_azure_client(url: str) -> BlobServiceClient:
    """Return a client of the account in the environment. Raises DataError when none is named."""
    from azure.storage.blob import BlobServiceClient

    login = find_azure_login(url)
    # No retries by the client: faults.with_retries does them.
    limits: dict[str, Any] = {"retry_total": 0, "connection_timeout": STALL_S, "read_timeout": STALL_S}
    if "connection_string" in login:
        return BlobServiceClient.from_connection_string(login["connection_string"], **limits)
    account_url = f"https://{login['account_name']}.blob.core.windows.net"
    return BlobServiceClient(account_url, credential=login["account_key"] or _ask_identity(), **limits)


class _AzureBlobs:
    """Files to and from an account's containers; another endpoint's by a connection string. Thread-safe."""

    def __init__(self, url: str) -> None:
        """Raises DataError when no account is named."""
        self._service = open_azure_client(url)

    def check_container(self, name: str) -> None:
        """Raises FileNotFoundError, and whatever the client raises."""
        if not self._service.get_container_client(name).exists():
            raise FileNotFoundError(f"the container {name} does not exist")

    def upload(self, path: Path, url: str) -> None:
        container, _, name = path_of(url).partition("/")
        with path.open("rb") as file:
            self._service.get_blob_client(container, name).upload_blob(file, overwrite=True)

    def download(self, remote: str, local: str, timeout: float) -> None:
        container, _, name = path_of(remote).partition("/")
        with Path(local).open("wb") as file:
            self._service.get_blob_client(container, name).download_blob(timeout=int(timeout)).readinto(file)


def _ask_identity() -> TokenCredential:
    from azure.identity import AzureCliCredential, ChainedTokenCredential, DefaultAzureCredential

    return ChainedTokenCredential(AzureCliCredential(), DefaultAzureCredential())


class _HubUploads:
    """Uploads to a dataset on the Hub: a commit per file, one at a time."""

    def __init__(self, url: str) -> None:
        from huggingface_hub import HfApi

        _quieten_hub()
        self._name = "/".join(path_of(url).split("/")[1:3])
        self._api = HfApi(token=os.environ.get("HF_TOKEN"))
        self._api.repo_info(self._name, repo_type="dataset")
        self._is_committing = threading.Lock()

    def upload(self, path: Path, url: str) -> None:
        from huggingface_hub import CommitOperationAdd

        name = path_of(url).split("/", 3)[3]
        added = CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)
        # Large files are uploaded concurrently, before the commit that names them.
        self._api.preupload_lfs_files(self._name, [added], repo_type="dataset")
        with self._is_committing:
            self._api.create_commit(self._name, [added], repo_type="dataset", commit_message=f"Add {name}")


def _quieten_hub() -> None:
    """Turn off the Hub client's progress bars and warnings of retries, unless the environment asks for them."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, logging

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()
    if "HF_HUB_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
