"""What the stores' libraries find by themselves, and processes that fork or are interrupted."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from llmscale.data.storage import faults
from llmscale.data.storage.objects import Store
from llmscale.errors import UnreachableError
from tests import warm_start
from tests.conftest import HANG_S
from tests.loopback import serving
from tests.object_store import BUCKET, ObjectStore
from tests.relay import Relay, relay_to

URL = f"s3://{BUCKET}/a"


@pytest.fixture
def relay(object_store: ObjectStore) -> Iterator[Relay]:
    object_store.put("a", b"contents")
    with relay_to(int(object_store.url.rpartition(":")[2])) as relay:
        yield relay


def _read() -> bytes:
    return Store(URL).read(URL, 0, 8)


def test_a_fork_reads_what_its_parent_has_read(object_store: ObjectStore) -> None:
    object_store.put("a", b"contents")
    store = Store(URL)
    assert store.read(URL, 0, 8) == b"contents"
    child = os.fork()
    if child == 0:
        os._exit(0 if store.read(URL, 0, 8) == b"contents" else 1)
    deadline_s = time.monotonic() + HANG_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline_s:
        time.sleep(0.02)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
    assert ended == (child, 0)
    assert store.read(URL, 0, 8) == b"contents"


FETCH = """
import sys
from pathlib import Path
from llmscale.data.storage.objects import Store
try:
    Store(sys.argv[1]).download(sys.argv[1], Path(sys.argv[2]))
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_ends_a_transfer_at_once_and_leaves_nothing(
    relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", relay.url)
    relay.harm = lambda method, path: "stall"
    command = [sys.executable, "-c", FETCH, URL, str(tmp_path / "file")]
    process = warm_start.Process(command, stderr=subprocess.PIPE)
    while not any(path == f"/{BUCKET}/a" for _, path in relay.requests):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(faults.STALL_S / 2) == 130
    process.communicate()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def without_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, object_store: ObjectStore) -> Path:
    """Return the folder of AWS's files, in an environment without keys."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / ".aws" / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / ".aws" / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    (tmp_path / ".aws").mkdir()
    return tmp_path / ".aws"


def _signers(relay: Relay) -> list[str]:
    """Return a list that gets the key that signs each request."""
    signers: list[str] = []

    def note(method: str, headers: object) -> None:
        signers.append(str(headers["Authorization"]).partition("Credential=")[2].partition("/")[0])  # type: ignore[index]

    relay.refuses = note
    return signers


def test_a_profile_signs(relay: Relay, without_keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", relay.url)
    (without_keys / "credentials").write_text(
        "[mine]\naws_access_key_id = of-the-profile\naws_secret_access_key = secret\n"
    )
    signers = _signers(relay)
    assert _read() == b"contents" and set(signers) == {"of-the-profile"}


class _Portal(BaseHTTPRequestHandler):
    """The part of AWS's SSO portal that gives keys for a token."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:  # http.server's name
        keys = {"accessKeyId": "of-the-login", "secretAccessKey": "x", "sessionToken": "y", "expiration": 1 << 42}
        body = json.dumps({"roleCredentials": keys}).encode()
        self.send_response(200 if self.headers["x-amz-sso_bearer_token"] == "token" else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_an_sso_login_signs_and_an_expired_one_is_named(
    relay: Relay, without_keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = "https://portal.example/start"
    (without_keys / "config").write_text(
        f"[profile mine]\nsso_start_url = {start}\nsso_region = us-east-1\nsso_account_id = 1\nsso_role_name = role\n"
    )
    cache = without_keys / f"{sha1(start.encode()).hexdigest()}.json"
    monkeypatch.setattr("botocore.credentials.SSOProvider._SSO_TOKEN_CACHE_DIR", str(without_keys))

    def log_in(hours: int) -> None:
        expires = datetime.now(timezone.utc) + timedelta(hours=hours)
        cache.write_text(
            json.dumps({"startUrl": start, "accessToken": "token", "expiresAt": f"{expires:%Y-%m-%dT%H:%M:%SZ}"})
        )

    monkeypatch.setenv("S3_ENDPOINT_URL", relay.url)
    signers = _signers(relay)
    with serving(_Portal) as portal:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", portal)
        log_in(8)
        assert _read() == b"contents" and set(signers) == {"of-the-login"}
        log_in(-8)
        with pytest.raises(UnreachableError, match=r"Give AWS_ACCESS_KEY_ID .*AWS_PROFILE"):
            _read()


def test_a_proxy_of_the_environment_is_used(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", relay.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert _read() == b"contents"
    assert any(path == f"http://127.0.0.1:1/{BUCKET}/a" for _, path in relay.requests)


class _Contents(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:  # http.server's name
        self.send_response(206)
        self.send_header("Content-Length", "8")
        self.end_headers()
        self.wfile.write(b"contents")


def test_a_certificate_of_ones_own_is_trusted_by_aws_ca_bundle(
    object_store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_certificate: Callable[[Path], None],
) -> None:
    write_certificate(tmp_path / "own.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Contents)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        monkeypatch.setenv("S3_ENDPOINT_URL", f"https://127.0.0.1:{server.server_port}")
        with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            _read()
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "own.pem"))
        assert _read() == b"contents"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def write_certificate() -> Callable[[Path], None]:
    """Write the key and the certificate of a server on loopback, which is its own authority."""
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def write(path: Path) -> None:
        key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
        now, serial = datetime.now(timezone.utc), x509.random_serial_number()
        end = now + timedelta(days=1)
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), serial, now - timedelta(days=1), end)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=True)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        plain = serialization.NoEncryption()
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        path.write_bytes(pem + certificate.public_bytes(serialization.Encoding.PEM))

    return write
