"""Strangers at the door of `--launcher pdsh`, and agents among them."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch import listener as listener_module
from llmscale.cluster.launch.agent import connect
from llmscale.cluster.launch.channel import Channel
from llmscale.cluster.launch.host_pool import HostPool
from llmscale.cluster.launch.listener import ANNOUNCEMENT, MOST_STRANGERS, Listener, digest_of, find_announcement
from llmscale.cluster.launch.messages import Hello, Ping
from llmscale.cluster.launch.reach import Reach
from llmscale.cluster.launch.tls import call
from llmscale.cluster.remote import module_argv
from tests.conftest import HANG_S

CANARY = "canary-" + secrets.token_hex(16)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    # Made now: the threads of a test must not make two of them.
    assert listener.fingerprint
    yield listener
    listener.close()


def dial(listener: Listener, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(listener.address_facing("127.0.0.1"), 10.0, source_address=(source, 0))


def give_secret(listener: Listener, secret: str) -> tuple[socket.socket, threading.Thread]:
    """What an agent does, in a thread of its own until it has said its secret."""
    connection = dial(listener)

    def run() -> None:
        with contextlib.suppress(OSError):
            connection.sendall(call(connection, listener.fingerprint, 10.0).encrypt(f"{secret}\n".encode()))

    thread = threading.Thread(target=run)
    thread.start()
    return connection, thread


def until(condition: Callable[[], object], timeout_s: float = HANG_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def let_in(listener: Listener, digest: str, timeout_s: float = HANG_S) -> Channel:
    found: dict[str, Channel] = {}

    def look() -> bool:
        found.update(listener.accept({digest}))
        return digest in found

    until(look, timeout_s)
    return found[digest]


def is_hung_up(connection: socket.socket) -> bool:
    """Whether the other end has closed it, whatever it had said before."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_an_announcement_may_follow_a_greeting() -> None:
    digest = digest_of("secret")
    for line in (f"{ANNOUNCEMENT}{digest}", f"Welcome! {ANNOUNCEMENT}{digest}"):
        assert find_announcement(line) == digest
    for line in ("", digest, ANNOUNCEMENT, f"{ANNOUNCEMENT}{digest[1:]}", f"{ANNOUNCEMENT}{digest} and more"):
        assert find_announcement(line) is None


def test_who_has_given_the_announced_secret_is_let_in_once(listener: Listener) -> None:
    secret = secrets.token_hex(32)
    connections = []
    for _ in range(2):
        connection, thread = give_secret(listener, secret)
        connections.append(connection)
        until(lambda thread=thread: not listener.accept(()) and not thread.is_alive())  # type: ignore[misc]
    channel = let_in(listener, digest_of(secret))
    channel.send(Ping())
    # The other one is not: the pool expects this digest no more.
    time.sleep(0.1)
    assert listener.accept(()) == {}
    listener.close()
    until(lambda: sum(map(is_hung_up, connections)) == 1)
    os.close(channel.reader.descriptor)
    for connection in connections:
        connection.close()


def test_another_secret_opens_nothing(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "STRANGER_S", 0.5)
    expected = digest_of(secrets.token_hex(32))
    for word in (secrets.token_hex(32), "", expected, "x" * 4000, "\udcff"):
        connection = dial(listener)

        def run(connection: socket.socket = connection, word: str = word) -> None:
            with contextlib.suppress(OSError):
                session = call(connection, listener.fingerprint, 10.0)
                connection.sendall(session.encrypt(word.encode(errors="replace") + b"\n"))

        thread = threading.Thread(target=run)
        thread.start()
        until(lambda connection=connection: listener.accept({expected}) == {} and is_hung_up(connection))  # type: ignore[misc]
        thread.join()
        connection.close()


@pytest.mark.parametrize(
    "said",
    [
        *(
            b"",
            b"token\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"SSH-2.0-OpenSSH_9.2\r\n",
            b"\0" * 5000,
            b"\x16\x03\x01\xff\xff",
        ),
        *(
            bytes(range(1, 256)) * 16,
            b'@llmscale {"kind": "Ready"}\n',
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 30,
        ),
        *(b"x" * 100_000, b"\x15\x03\x03\x00\x02\x02\x28", b"\x14\x03\x03\x00\x01\x01" * 2000),
    ],
    ids=lambda said: repr(said[:24]),
)
def test_who_speaks_another_language_or_not_at_all_is_hung_up_on(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(listener_module, "STRANGER_S", 0.5)
    with dial(listener) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(said)
        until(lambda: listener.accept({"x"}) == {} and is_hung_up(connection))
    assert len(listener.descriptors) == 1


def test_one_byte_at_a_time_gains_no_time(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "STRANGER_S", 0.5)
    with dial(listener) as connection:
        words = iter(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 10_000)

        def drip() -> bool:
            with contextlib.suppress(OSError):
                connection.send(bytes([next(words)]))
            return listener.accept({"x"}) == {} and is_hung_up(connection)

        until(drip)


def test_an_encrypted_line_without_an_end_is_not_kept(listener: Listener) -> None:
    connection, session = dial(listener), []
    thread = threading.Thread(target=lambda: session.append(call(connection, listener.fingerprint, 10.0)))
    thread.start()
    until(lambda: listener.accept(()) == {} and not thread.is_alive())

    def go_on() -> bool:
        with contextlib.suppress(OSError):
            connection.send(session[0].encrypt(b"x" * 1000))
        return listener.accept(()) == {} and len(listener.descriptors) == 1

    until(go_on)
    connection.close()


def test_older_versions_of_tls_are_refused(listener: Listener) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    failures = []

    def run() -> None:
        try:
            context.wrap_socket(dial(listener))
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: listener.accept(()) == {} and not thread.is_alive())
    assert failures


def test_it_is_open_only_on_the_address_that_faces_the_host(listener: Listener) -> None:
    assert listener.descriptors == []
    address, port = listener.address_facing("127.0.0.1")
    assert address == "127.0.0.1"
    assert listener.address_facing("localhost") == (address, port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5.0)


FLOOD = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held = []
for number in range(1200):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20))
print("done", flush=True)
time.sleep(60)
"""


def test_1200_idle_callers_neither_end_it_nor_keep_an_agent_out(listener: Listener) -> None:
    _, port = listener.address_facing("127.0.0.1")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 1400:
        pytest.skip("may not open 1,400 files")
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, str(port)], stdout=subprocess.PIPE)
    assert flood.stdout is not None
    # Below 1,200, and not so low that this process cannot live.
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 150, limits[1]))
    connection = None
    try:
        os.set_blocking(flood.stdout.fileno(), False)
        until(lambda: listener.accept({"x"}) == {} and flood.stdout.read() is not None, 60)  # type: ignore[union-attr]
        assert len(listener.descriptors) <= MOST_STRANGERS + 3
        secret = secrets.token_hex(32)
        connection, thread = give_secret(listener, secret)
        os.close(let_in(listener, digest_of(secret)).reader.descriptor)
        thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        flood.kill()
        flood.wait()
        flood.stdout.close()
        if connection:
            connection.close()


def test_who_calls_often_does_not_push_out_others(listener: Listener) -> None:
    secret = secrets.token_hex(32)
    agent, thread = give_secret(listener, secret)
    until(lambda: listener.accept(()) == {} and not thread.is_alive())
    crowd = []
    for _ in range(3 * MOST_STRANGERS):
        crowd.append(dial(listener, source="127.0.0.2"))
        listener.accept(())
    os.close(let_in(listener, digest_of(secret)).reader.descriptor)
    for connection in (agent, *crowd):
        connection.close()


def test_no_descriptors_left_is_no_end(listener: Listener) -> None:
    with dial(listener) as first, dial(listener) as second:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
        try:
            for _ in range(5):
                assert listener.accept(()) == {}
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        secret = secrets.token_hex(32)
        agent, thread = give_secret(listener, secret)
        os.close(let_in(listener, digest_of(secret)).reader.descriptor)
        thread.join()
        for connection in (agent, first, second):
            connection.close()


class Wire:
    """Between an agent and its listener: it writes down what passes, in both directions."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = self.server.getsockname()
        self.up, self.down = bytearray(), bytearray()
        self._target = target
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        while True:
            try:
                near, _ = self.server.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            for source, sink, record in ((near, far, self.up), (far, near, self.down)):
                threading.Thread(target=self._copy, args=(source, sink, record), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(1 << 16):
                record += received
                sink.sendall(received)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def make_crew(wires: list[Wire], shown: list[str], run: str) -> HostPool:
    """One host, this one, whose agent calls back over a wire as if pdsh had started it."""

    def reach(host: Host, listener: Listener) -> Reach:
        wires.append(Wire(listener.address_facing("127.0.0.1")))
        words = ["--connect", wires[-1].address[0], str(wires[-1].address[1]), "--supervisor", listener.fingerprint]
        return Reach(module_argv("llmscale.cluster.launch.agent", words), calls_back=True)

    return HostPool([Host("here", 1)], reach, Hello(os.getcwd(), {"A_KEY": CANARY}, run, 30.0), shown.append)


def test_an_agent_that_calls_back_says_and_is_told_everything_encrypted(tmp_path: object) -> None:
    wires: list[Wire] = []
    shown: list[str] = []
    pool = make_crew(wires, shown, str(tmp_path))
    listening = pool._listener.address_facing("127.0.0.1")
    pool.gather(60.0, lambda: False)
    assert list(pool.nodes) == ["here"], pool.left_out
    # Once all are there, nobody can call any more.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(listening, 5.0)
    pool.disband(20.0, 20.0)
    pool.close()
    (wire,) = wires
    assert min(len(wire.up), len(wire.down)) > 500
    for record in (wire.up, wire.down):
        for word in (CANARY, "A_KEY", "@llmscale", "Hello", "Ready"):
            assert word.encode() not in record
    assert not [line for line in shown if "@llmscale" in line]
    wire.server.close()

    # What was recorded, sent once more, while the same digest would still be welcome.
    listener = Listener()
    with dial(listener) as connection:
        connection.sendall(bytes(wire.up))
        until(lambda: listener.accept({"x"}) == {} and is_hung_up(connection))
    listener.close()


def test_an_agent_tells_nothing_to_another_who_answers(capfd: pytest.CaptureFixture[str]) -> None:
    """Someone in the middle, with a key of their own."""
    impostor, supervisor = Listener(), Listener()
    address, port = impostor.address_facing("127.0.0.1")
    failures: list[OSError] = []

    def run() -> None:
        try:
            connect(address, port, supervisor.fingerprint)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    said: list[bytes] = []

    def listen() -> bool:
        impostor.accept(())
        said.extend(stranger._said for stranger in impostor._strangers)
        return not thread.is_alive()

    until(listen)
    assert isinstance(failures[0], PermissionError)
    assert not any(said)
    announced = capfd.readouterr().out.split()
    assert announced[0] == "@llmscale-agent"
    impostor.close()


def test_an_agent_calls_again_when_it_was_hung_up_on(capfd: pytest.CaptureFixture[str]) -> None:
    listener = Listener()
    address, port = listener.address_facing("127.0.0.1")
    channels: list[Channel] = []
    thread = threading.Thread(target=lambda: channels.append(connect(address, port, listener.fingerprint)))
    thread.start()
    for _ in range(2):
        until(lambda: listener.accept(()) == {} and listener._strangers)
        listener._drop_one()
    printed = ""

    def announced() -> bool:
        nonlocal printed
        printed += capfd.readouterr().out
        return "\n" in printed

    until(announced)
    channel = let_in(listener, printed.split()[1])
    channel.send(Ping())
    thread.join(20)
    assert channels[0].receive() == ([Ping()], [])
    for end in (channel, *channels):
        os.close(end.reader.descriptor)
    listener.close()
