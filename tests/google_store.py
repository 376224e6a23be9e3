"""gcp-storage-emulator on loopback behind a relay that can fail, and a key file of a service account for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest import mock

from tests.conftest import free_port
from tests.loopback import serving
from tests.relay import Relay, relay_to

BUCKET = "bucket"


class GoogleStore:
    """What a test sees of it."""

    url = f"gs://{BUCKET}"

    def __init__(self, relay: Relay, key_file: Path) -> None:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud.storage import Client

        self.relay, self.environment = relay, environment(relay, key_file)
        options = {"api_endpoint": relay.url}
        self._client = Client(project="none", credentials=AnonymousCredentials(), client_options=options)
        self._bucket = self._client.create_bucket(BUCKET)

    def put(self, name: str, contents: bytes) -> None:
        self._bucket.blob(name).upload_from_string(contents)

    def files(self, prefix: str = "") -> dict[str, bytes]:
        """Everything below a prefix, by the name behind it."""
        return {
            blob.name.removeprefix(prefix): blob.download_as_bytes()
            for blob in self._client.list_blobs(BUCKET, prefix=prefix)
        }

    def clear(self) -> None:
        for blob in self._client.list_blobs(BUCKET):
            blob.delete()


def environment(relay: Relay, key_file: Path) -> dict[str, str]:
    return {"STORAGE_EMULATOR_HOST": relay.url, "GOOGLE_APPLICATION_CREDENTIALS": str(key_file)}


class _Tokens(BaseHTTPRequestHandler):
    """Gives a token to whoever asks."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:  # http.server's name
        body = json.dumps({"access_token": "testing", "expires_in": 3600, "token_type": "Bearer"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _write_key_file(path: Path, token_url: str) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account",
        "project_id": "none",
        "private_key_id": "1",
        "private_key": key.decode(),
        "client_email": "testing@none.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": token_url,
    }
    path.write_text(json.dumps(account))


def _with_generation(handler: Callable[..., None]) -> Callable[..., None]:
    """Return a handler of the emulator with what it lacks: generations as conditions and in downloads' headers."""
    from gcp_storage_emulator.exceptions import NotFound

    def handle(request: Any, response: Any, storage: Any) -> None:
        name = request.params.get("object_id") or request.query.get("name", [""])[0]
        if not name and "ifGenerationMatch" in request.query:
            name = request.data["meta"]["name"]
        try:
            generation = storage.get_file_obj(request.params.get("bucket_name"), name)["generation"]
        except NotFound:
            generation = "0"
        if request.query.get("ifGenerationMatch", [generation]) != [generation]:
            response.status = HTTPStatus.PRECONDITION_FAILED
            return
        handler(request, response, storage)
        response["X-Goog-Generation"] = generation

    return handle


@contextmanager
def serve_google(folder: Path) -> Iterator[GoogleStore]:
    """A server with an empty bucket; the key file lies in `folder`."""
    from gcp_storage_emulator import server

    port = free_port()
    emulator = server.create_server("127.0.0.1", port, in_memory=True)
    handlers = [
        (path, {method: _with_generation(handler) for method, handler in handled.items()})
        for path, handled in server.HANDLERS
    ]
    emulator.start()
    try:
        with mock.patch.object(server, "HANDLERS", handlers), serving(_Tokens) as tokens, relay_to(port) as relay:
            _write_key_file(folder / "key.json", f"{tokens}/token")
            yield GoogleStore(relay, folder / "key.json")
    finally:
        emulator.stop()
