"""Azurite, npm's emulator of Azure's blobs, on loopback behind a relay that can fail."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import HANG_S, free_port
from tests.relay import Relay, relay_to

CONTAINER = "container"
#: Azurite's account, which everybody knows.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def find_azurite() -> str | None:
    """`npm install -g azurite` puts it there."""
    return shutil.which("azurite-blob")


class AzureStore:
    """What a test sees of it."""

    url = f"az://{CONTAINER}"

    def __init__(self, relay: Relay) -> None:
        from azure.storage.blob import ContainerClient

        self.relay = relay
        message = (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={relay.url}/{ACCOUNT};"
        )
        self.environment = {"AZURE_STORAGE_CONNECTION_STRING": message}
        self._client = ContainerClient.from_connection_string(message, CONTAINER)
        self._client.create_container()

    def put(self, name: str, contents: bytes) -> None:
        self._client.upload_blob(name, contents, overwrite=True)

    def files(self, prefix: str = "") -> dict[str, bytes]:
        """Everything below a prefix, by the name behind it."""
        names = list(self._client.list_blob_names(name_starts_with=prefix))
        return {name.removeprefix(prefix): self._client.download_blob(name).readall() for name in names}

    def clear(self) -> None:
        for name in self.files():
            self._client.delete_blob(name)


@contextmanager
def serve_azure(folder: Path) -> Iterator[AzureStore]:
    """A server with an empty container; what it keeps lies in `folder`."""
    command, port = find_azurite(), free_port()
    assert command is not None
    flags = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    process = subprocess.Popen([command, *flags, "--skipApiVersionCheck", "--disableTelemetry"])
    try:
        _wait_for(port, process)
        with relay_to(port) as relay:
            yield AzureStore(relay)
    finally:
        process.terminate()
        process.wait(HANG_S)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("azurite did not start")
