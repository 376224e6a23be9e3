"""Azure's blobs by its own client, which a connection string leads to any endpoint: another cloud's, or Azurite."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from llmscale.data.storage.faults import STALL_S
from llmscale.data.storage.schemes import SCHEMES, path_of
from llmscale.errors import DataError

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential
    from azure.storage.blob import BlobServiceClient


class AzureLogin(TypedDict, total=False):
    """Who asks, by the names that adlfs has for it."""

    connection_string: str
    account_name: str
    account_key: str | None


def find_login(url: str) -> AzureLogin:
    """What the environment says. Raises DataError when it says nothing."""
    if connection := os.environ.get("AZURE_STORAGE_CONNECTION_STRING"):
        return {"connection_string": connection}
    account = os.environ.get("AZURE_ACCOUNT_NAME") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if not account:
        raise DataError(f"Cannot open {url}: AZURE_ACCOUNT_NAME is not set. Give {SCHEMES['az'].credentials}.")
    key = os.environ.get("AZURE_ACCOUNT_ACCESS_KEY") or os.environ.get("AZURE_STORAGE_ACCOUNT_KEY")
    return {"account_name": account, "account_key": key}


class AzureBlobs:
    """Files to and from an account's containers. The client is one for any number of threads."""

    def __init__(self, service: BlobServiceClient) -> None:
        self._service = service

    @classmethod
    def of_environment(cls, url: str) -> AzureBlobs:
        """Raises DataError: no account is named."""
        from azure.storage.blob import BlobServiceClient

        login = find_login(url)
        # No retries of its own: whoever asks tries again, and says so.
        limits: dict[str, Any] = {"retry_total": 0, "connection_timeout": STALL_S, "read_timeout": STALL_S}
        if "connection_string" in login:
            return cls(BlobServiceClient.from_connection_string(login["connection_string"], **limits))
        account_url = f"https://{login['account_name']}.blob.core.windows.net"
        return cls(BlobServiceClient(account_url, credential=login["account_key"] or _ask_identity(), **limits))

    @classmethod
    def of_container(cls, name: str) -> AzureBlobs:
        """Of one that is there. Raises FileNotFoundError, and whatever the client raises."""
        made = cls.of_environment(f"az://{name}")
        if not made._service.get_container_client(name).exists():
            raise FileNotFoundError(f"there is no container {name}")
        return made

    def upload(self, path: Path, url: str) -> None:
        """Raises whatever the client raises."""
        container, _, name = path_of(url).partition("/")
        with path.open("rb") as file:
            self._service.get_blob_client(container, name).upload_blob(file, overwrite=True)

    def download(self, remote: str, local: str, timeout: float) -> None:
        """Raises whatever the client raises."""
        container, _, name = path_of(remote).partition("/")
        with Path(local).open("wb") as file:
            self._service.get_blob_client(container, name).download_blob(timeout=int(timeout)).readinto(file)


def _ask_identity() -> TokenCredential:
    from azure.identity import AzureCliCredential, ChainedTokenCredential, DefaultAzureCredential

    return ChainedTokenCredential(AzureCliCredential(), DefaultAzureCredential())
