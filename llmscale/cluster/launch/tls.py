"""TLS 1.3 over a descriptor that never blocks, with keys that live as long as one attempt and in memory only.

Nobody signs these keys: the command line that starts an agent names the supervisor's by its fingerprint. That is no
secret, and who knows it cannot play the supervisor.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl
import time
from datetime import datetime, timedelta, timezone

_READ_BYTES = 1 << 14


class TlsSession:
    """One end of one connection. It turns bytes into bytes; whoever owns the descriptor reads and writes them."""

    def __init__(self, context: ssl.SSLContext, server_side: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self.is_established = False
        """The handshake is done: what is encrypted from now on only the other end can read."""

    def decrypt(self, received: bytes) -> bytes:
        """What the other end said, as far as it has come; takes the handshake on. Raises ssl.SSLError for what is no
        TLS, was changed on the way, or is the other end's goodbye."""
        self._incoming.write(received)
        chunks: list[bytes] = []
        try:
            if not self.is_established:
                self._tls.do_handshake()
                self.is_established = True
            while True:
                chunk = self._tls.read(_READ_BYTES)
                if not chunk:
                    raise ssl.SSLZeroReturnError("the other end has closed the conversation")
                chunks.append(chunk)
        except ssl.SSLWantReadError:
            return b"".join(chunks)

    def encrypt(self, plain: bytes = b"") -> bytes:
        """What to send for `plain`, after all that is still to be sent for the handshake. `plain` may only be given
        once the handshake is done. Raises ssl.SSLError."""
        if plain:
            self._tls.write(plain)
        return self._outgoing.read()

    @property
    def peer_fingerprint(self) -> str:
        """SHA-256 of the other end's certificate; "" without one."""
        certificate = self._tls.getpeercert(binary_form=True)
        return hashlib.sha256(certificate).hexdigest() if certificate else ""


class ServerKey:
    """The supervisor's key of one attempt. It is in no file."""

    def __init__(self) -> None:
        # Not at the top: only `--launcher pdsh` needs it.
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "llmscale launch")])
        now = datetime.now(timezone.utc)
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=365))
            .sign(key, hashes.SHA256())
        )
        self.fingerprint = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()
        self._context = _context(ssl.PROTOCOL_TLS_SERVER)
        self._context.num_tickets = 0
        pem = serialization.Encoding.PEM
        _load_from_memory(
            self._context,
            certificate.public_bytes(pem)
            + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        )

    def session(self) -> TlsSession:
        """For one who has called."""
        return TlsSession(self._context, server_side=True)


def call(connection: socket.socket, fingerprint: str, timeout_s: float) -> TlsSession:
    """The caller's handshake over a fresh connection, which is left without a time limit. Raises OSError, also when the
    other end is not the one that `fingerprint` names: it has then been told nothing."""
    session = TlsSession(_context(ssl.PROTOCOL_TLS_CLIENT), server_side=False)
    deadline = time.monotonic() + timeout_s
    received = b""
    while True:
        session.decrypt(received)
        connection.sendall(session.encrypt())
        if session.is_established:
            break
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        received = connection.recv(_READ_BYTES)
        if not received:
            raise ConnectionError("the connection was closed during the handshake")
    connection.settimeout(None)
    if not hmac.compare_digest(session.peer_fingerprint, fingerprint):
        raise PermissionError("whoever answers there is not the supervisor that started this agent")
    return session


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The fingerprint is checked instead: TLS proves that the other end has the key of the certificate that it shows.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _load_from_memory(context: ssl.SSLContext, pem: bytes) -> None:
    """Python's ssl reads keys from files only: this one never comes near a disk."""
    descriptor = os.memfd_create("key", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
