"""Whole files to and from a store: by Streaming's transport where that works, by the store's own client elsewhere.

Streaming's uploader and downloader of Azure take two different kinds of URLs, and neither another endpoint than
Azure's own; its uploader of the Hub holds the whole file in memory.
"""

from __future__ import annotations

import copy
import os
import tempfile
import threading
from pathlib import Path
from typing import Protocol

from llmscale.data.shards.streaming_import import streaming_module
from llmscale.data.storage.azure_blobs import AzureBlobs
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
    """For what lies below a URL of a known scheme; looks whether the bucket is there. Raises whatever the client
    raises."""
    kind = _kind_of(url)
    if kind == "azure":
        return AzureBlobs.of_container(path_of(url).partition("/")[0])
    return _HubUploads(url) if kind == "hf" else _StreamingUploads(url)


def open_downloader(url: str) -> Downloader:
    """For files at a URL, of Streaming's other schemes too, or a local path. Raises whatever the client raises."""
    kind = _kind_of(url)
    if kind == "azure":
        return AzureBlobs.of_environment(url)
    if kind == "hf":
        _show_no_bars()
    found: Downloader = streaming_module("storage.download").CloudDownloader.get(url)
    return found


def _kind_of(url: str) -> str:
    name, separator, _ = url.partition("://")
    return SCHEMES[name].kind if separator and name in SCHEMES else name


class _StreamingUploader(Protocol):
    """What is used here of Streaming's uploaders."""

    local: str
    remote: str

    def upload_file(self, filename: str) -> None: ...


class _StreamingUploads:
    """By its uploader of the scheme, which looks whether the bucket is there."""

    def __init__(self, url: str) -> None:
        with tempfile.TemporaryDirectory() as empty:
            uploaders = streaming_module("storage.upload").CloudUploader
            self._uploader: _StreamingUploader = uploaders.get((empty, url), keep_local=True, retry=1)

    def upload(self, path: Path, url: str) -> None:
        # A copy, as several threads upload out of several folders.
        uploader = copy.copy(self._uploader)
        uploader.local, uploader.remote = str(path.parent), url.rpartition("/")[0]
        uploader.upload_file(path.name)


class _HubUploads:
    """To a data set of the Hub, each file a commit; it takes one at a time."""

    def __init__(self, url: str) -> None:
        from huggingface_hub import HfApi

        _show_no_bars()
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


def _show_no_bars() -> None:
    """The Hub's client draws one for each file, unless the environment says what it shall do."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()
