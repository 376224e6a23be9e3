"""Whole files to and from a store: downloads by Streaming's transport where that works, else by the store's own client.

Uploads go through the stores' own clients, whose timeouts and retries can be set.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from llmscale.data.shards.streaming_import import streaming_module
from llmscale.data.storage import faults
from llmscale.data.storage.azure_blobs import AzureBlobs
from llmscale.data.storage.objects import GOOGLE_S3_URL, S3_LIMITS
from llmscale.data.storage.schemes import SCHEMES, path_of


class Uploader(Protocol):
    """Brings files to one bucket or data set; for any number of threads."""

    def upload(self, path: Path, url: str) -> None:
        """Raises whatever the client raises."""


class Downloader(Protocol):
    """Brings files here; holds a connection."""

    def download(self, remote: str, local: str, timeout: float) -> None:
        """Raises whatever the client raises."""


def open_uploader(url: str) -> Uploader:
    """Return an uploader below a URL of a known scheme, after a look whether the bucket is there. Raises whatever the
    client raises."""
    kind, bucket = _kind_of(url), path_of(url).partition("/")[0]
    if kind == "azure":
        return AzureBlobs.of_container(bucket)
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
    """For files at a URL, of Streaming's other schemes too, or a local path. Raises whatever the client raises."""
    kind = _kind_of(url)
    if kind == "azure":
        return AzureBlobs.of_environment(url)
    if kind == "hf":
        _quieten_hub()
    found: Downloader = streaming_module("storage.download").CloudDownloader.get(url)
    return found


def download(
    opened: Callable[[], Downloader],
    remote: str,
    path: Path,
    what: str,
    explain: Callable[[Exception], Exception] | None = None,
) -> None:
    """Bring one file to a local path, in one move. Its bytes on this disk show that the store still sends. Errors and
    `explain` are those of `faults.with_retries`; OSError comes from the folder."""
    with tempfile.TemporaryDirectory(
        prefix=f".download-{path.name}-", dir=path.parent, ignore_cleanup_errors=True
    ) as folder:

        def bring() -> None:
            # A try that was given up may still write: each has a folder of its own.
            target = Path(tempfile.mkdtemp(dir=folder), path.name)
            opened().download(remote, str(target), faults.STALL_S)
            target.replace(path)

        faults.with_retries(bring, what, url=remote, explain=explain, progress=lambda: _count_bytes(Path(folder)))


def _count_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; -1 where one goes meanwhile."""
    with suppress(OSError):
        return sum(path.stat().st_size for path in folder.rglob("*"))
    return -1


def _kind_of(url: str) -> str:
    name, separator, _ = url.partition("://")
    return SCHEMES[name].kind if separator and name in SCHEMES else name


class _S3Uploads:
    """Uploads to a bucket of S3, or of a store with its protocol."""

    def __init__(self, bucket: str, **login: Any) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self._client = boto3.session.Session().client("s3", config=Config(**S3_LIMITS), **login)
        # A process waits at its end for threads of a pool, also for those that a store keeps waiting.
        self._transfer = TransferConfig(use_threads=False)
        self._client.head_bucket(Bucket=bucket)

    def upload(self, path: Path, url: str) -> None:
        bucket, _, name = path_of(url).partition("/")
        extra = {"ACL": os.environ["S3_CANNED_ACL"]} if "S3_CANNED_ACL" in os.environ else {}
        self._client.upload_file(str(path), bucket, name, ExtraArgs=extra, Config=self._transfer)


class _GoogleUploads:
    """Uploads to a bucket of Google's store."""

    def __init__(self, bucket: str) -> None:
        from llmscale.data.storage.google_files import LIMITS, open_client

        self._limits = LIMITS
        self._bucket = open_client().get_bucket(bucket, **LIMITS)

    def upload(self, path: Path, url: str) -> None:
        self._bucket.blob(path_of(url).partition("/")[2]).upload_from_filename(str(path), **self._limits)


class _HubUploads:
    """To a data set of the Hub, each file a commit; it takes one at a time."""

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
        # What is long goes up beside others, before the commit that names it.
        self._api.preupload_lfs_files(self._name, [added], repo_type="dataset")
        with self._is_committing:
            self._api.create_commit(self._name, [added], repo_type="dataset", commit_message=f"Add {name}")


def _quieten_hub() -> None:
    """Turn off the Hub client's bars and its warnings of each retry, unless the environment asks for them: waits and
    retries are announced here."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, logging

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()
    if "HF_HUB_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
