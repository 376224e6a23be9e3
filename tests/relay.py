"""An HTTP server that passes everything on to another one, and fails or does harm where a test says so."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler

from tests.conftest import HANG_S
from tests.loopback import serving

#: Of a request's method and path, whether it is to fail.
Failing = Callable[[str, str], bool]
#: Of one connection, not of a message.
_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length", "date", "server"}


class Relay:
    """What a test sees of it."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, str]] = []
        self.fails: Failing = lambda method, path: False
        self.harm: Callable[[str, str], str] = lambda method, path: ""
        """Damage to an answer: "hang" before it, "stall" or "cut" within its body, "flip" a byte, "lose" it."""
        self.refuses: Callable[[str, Message], tuple[int, bytes] | None] = lambda method, headers: None
        """Status and body of an answer to a request's method and headers, in place of the server's."""
        self.strips: set[str] = set()
        """Names of headers, in lower case, that the server does not get."""
        self.released = threading.Event()
        """Set, ends all that hang and stall."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    relay: Relay
    port: int

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _pass_on(self) -> None:
        body = self._read_body()
        self.relay.requests.append((self.command, self.path))
        if self.relay.fails(self.command, self.path):
            self._send(500, [], b"")
            return
        if refusal := self.relay.refuses(self.command, self.headers):
            self._send(refusal[0], [], refusal[1])
            return
        harm = self.relay.harm(self.command, self.path)
        if harm == "hang":
            self.relay.released.wait(HANG_S)
        upstream = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP | self.relay.strips}
        upstream.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        if harm == "lose":
            self.close_connection = True
            return
        self._send(answer.status, answer.getheaders(), data, harm)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _pass_on  # http.server's names

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, headers: list[tuple[str, str]], body: bytes, harm: str = "") -> None:
        length = dict((name.lower(), value) for name, value in headers).get("content-length", str(len(body)))
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(body) // 2
        if harm == "flip" and body:
            body = body[:half] + bytes([body[half] ^ 1]) + body[half + 1 :]
        self.wfile.write(body[:half] if harm in ("cut", "stall") else body)
        if harm == "stall":
            self.relay.released.wait(HANG_S)
        self.close_connection = harm in ("cut", "stall")


@contextmanager
def relay_to(port: int) -> Iterator[Relay]:
    """To a server on this machine."""
    relay = Relay()
    with serving(type("Handler", (_Handler,), {"relay": relay, "port": port})) as relay.url:
        yield relay
        relay.released.set()
