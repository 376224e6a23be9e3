"""Where agents call back whose starter cannot carry a conversation: pdsh does not pass stdin on.

An agent makes up a secret and prints its digest, which comes back through pdsh and ssh, so it is known to be that
host's. It then calls, sees by the fingerprint on its own command line that the supervisor is the one that started it,
and gives the secret, encrypted. Each digest opens one conversation. Nothing that anyone can read on a command line or
on the wire is of any use to others, and nobody is told anything before.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from llmscale.cluster.launch.channel import Channel
from llmscale.cluster.launch.tls import ServerKey, TlsSession

#: Begins the line by which an agent announces its digest.
ANNOUNCEMENT = "@llmscale-agent "
_ANNOUNCED = re.compile(re.escape(ANNOUNCEMENT) + r"([0-9a-f]{64})$")
#: One who has not proven to be an agent by then is hung up on.
STRANGER_S = 10.0
#: The same for one who has said more than a handshake and a secret take.
MOST_STRANGER_BYTES = 8 << 10
#: So many callers who have proven nothing yet are kept beside one per host.
MOST_STRANGERS = 64
#: Callers that are taken in at a time; the others wait in the kernel.
_MOST_AT_ONCE = 64


def digest_of(secret: str) -> str:
    """By which an agent's secret is announced."""
    return hashlib.sha256(secret.encode()).hexdigest()


def find_announcement(line: str) -> str | None:
    """The digest that a line announces, also after a login shell's greeting that lacks an end; None for any other."""
    found = _ANNOUNCED.search(line)
    return found.group(1) if found else None


class Listener:
    """Ports of this machine, one on each address that faces hosts. None is open before one is asked for."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}
        """By the address that each is open on."""
        self._hosts: set[str] = set()
        """That may call, all at once."""
        self._strangers: list[_Stranger] = []
        self._key: ServerKey | None = None

    @property
    def fingerprint(self) -> str:
        """By which agents know this supervisor. Public."""
        return self._server_key().fingerprint

    def address_facing(self, host: str) -> tuple[str, int]:
        """Address and port that `host` can call. Raises OSError when none faces it."""
        family, address = _own_address_facing(host)
        if address not in self._sockets:
            listening = socket.socket(family, socket.SOCK_STREAM)
            self._sockets[address] = listening
            listening.bind((address, 0))
            listening.listen(128)
            listening.setblocking(False)
        self._hosts.add(host)
        return address, int(self._sockets[address].getsockname()[1])

    @property
    def descriptors(self) -> list[int]:
        """What to wait for."""
        listening = [own.fileno() for own in self._sockets.values()]
        return [*listening, *(stranger.connection.fileno() for stranger in self._strangers)]

    def accept(self, expected: Collection[str]) -> dict[str, Channel]:
        """Channels to those who have proven to be an agent, by its digest, one of `expected`. Others are kept for a
        while: an agent may be faster than its announcement."""
        for listening in self._sockets.values():
            self._take_in(listening)
        found: dict[str, Channel] = {}
        still = []
        for stranger in self._strangers:
            if not stranger.listen():
                stranger.connection.close()
            elif stranger.digest and stranger.digest in expected and stranger.digest not in found:
                descriptor = stranger.connection.detach()
                found[stranger.digest] = Channel(descriptor, descriptor, stranger.session)
            else:
                still.append(stranger)
        self._strangers = still
        return found

    def close(self) -> None:
        """Nobody can call any more; those who have not proven anything are hung up on."""
        for own in self._sockets.values():
            own.close()
        for stranger in self._strangers:
            stranger.connection.close()
        self._sockets, self._strangers = {}, []

    def _take_in(self, listening: socket.socket) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                connection, address = listening.accept()
            except BlockingIOError:
                return
            except OSError:
                # Out of descriptors, or a caller who has hung up meanwhile.
                self._drop_one()
                return
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._strangers.append(_Stranger(connection, address[0], self._server_key().session()))
            if len(self._strangers) > MOST_STRANGERS + len(self._hosts):
                self._drop_one()

    def _drop_one(self) -> None:
        """Hang up on the oldest caller from the address that most of them come from: one who calls often does not push
        out others."""
        if not self._strangers:
            return
        busiest = Counter(stranger.address for stranger in self._strangers).most_common(1)[0][0]
        dropped = next(stranger for stranger in self._strangers if stranger.address == busiest)
        self._strangers.remove(dropped)
        dropped.connection.close()

    def _server_key(self) -> ServerKey:
        if self._key is None:
            self._key = ServerKey()
        return self._key


@dataclass
class _Stranger:
    """A caller who has not proven to be an agent."""

    connection: socket.socket
    address: str
    session: TlsSession
    digest: str | None = None
    """Of the secret that it gave."""
    _said: bytes = b""
    _num_bytes: int = 0
    _since: float = field(default_factory=time.monotonic)

    def listen(self) -> bool:
        """Take in what it says; whether to keep it."""
        if time.monotonic() - self._since > STRANGER_S:
            return False
        try:
            received = self.connection.recv(MOST_STRANGER_BYTES)
            self._num_bytes += len(received)
            if not received or self._num_bytes > MOST_STRANGER_BYTES:
                return False
            self._said += self.session.decrypt(received)
            reply = self.session.encrypt()
            # A fresh connection takes a handshake whole.
            if reply and self.connection.send(reply) != len(reply):
                return False
        except BlockingIOError:
            return True
        except (OSError, ssl.SSLError):
            return False
        secret, end, more = self._said.partition(b"\n")
        if end and not more and self.digest is None:
            self.digest = digest_of(secret.decode(errors="replace"))
            return True
        # An agent says nothing more before it is answered.
        return not end


def _own_address_facing(host: str) -> tuple[socket.AddressFamily, str]:
    """The address of this machine that packets to `host` leave from, and its family. Raises OSError."""
    failure = OSError(f"no address of {host} is known here")
    for family, destination in _addresses_of(host) or _addresses_of(_host_name_for_ssh(host)):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                # A datagram socket sends nothing when it connects; the kernel only picks the route.
                probe.connect(destination)
                return family, str(probe.getsockname()[0])
            except OSError as error:
                failure = error
    raise failure


def _addresses_of(host: str) -> list[tuple[socket.AddressFamily, Any]]:
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return [(family, destination) for family, _, _, _, destination in found]


def _host_name_for_ssh(host: str) -> str:
    """What ssh's configuration says that a name stands for."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["ssh", "-G", host], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)
        for line in done.stdout.splitlines():
            if line.startswith("hostname "):
                return line.split(" ", 1)[1]
    return host
