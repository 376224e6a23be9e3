from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from pathlib import Path

import pytest

from llmscale.cluster.launch.channel import Channel
from llmscale.cluster.launch.messages import Message, Output
from llmscale.cluster.launch.tls import ServerKey, TlsSession, call


def shake_hands(key: ServerKey, fingerprint: str) -> tuple[socket.socket, TlsSession, socket.socket, TlsSession]:
    """The caller's end and the other one."""
    theirs, ours = socket.socketpair()
    session = key.session()

    def answer() -> None:
        # The caller hangs up on one it does not know.
        with contextlib.suppress(OSError):
            while not session.is_established:
                received = ours.recv(1 << 16)
                if not received:
                    return
                session.decrypt(received)
                ours.sendall(session.encrypt())

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        return theirs, call(theirs, fingerprint, 5.0), ours, session
    except OSError:
        theirs.close()
        raise
    finally:
        thread.join()


def test_messages_of_any_size_in_both_directions() -> None:
    key = ServerKey()
    theirs, their_session, ours, our_session = shake_hands(key, key.fingerprint)
    ends = [
        Channel(fd, fd, session) for fd, session in ((theirs.detach(), their_session), (ours.detach(), our_session))
    ]
    for sender, receiver in (ends, ends[::-1]):
        sent: list[Message] = [Output(number, "ü" * size) for number, size in enumerate((0, 1, 16384, 2_000_000))]
        received: list[Message] = []
        for message in sent:
            sender.send(message)
        while len(received) < len(sent):
            sender.flush()
            messages, others = receiver.receive()
            assert not others
            assert not receiver.closed
            received += messages
        assert received == sent
    for end in ends:
        os.close(end.reader.descriptor)


def test_only_the_one_with_the_key_of_the_fingerprint_is_spoken_to() -> None:
    with pytest.raises(PermissionError, match="not the supervisor"):
        shake_hands(ServerKey(), ServerKey().fingerprint)


@pytest.mark.parametrize("where", [0, 5, 20, -1])
def test_what_was_changed_on_the_way_ends_the_conversation(where: int) -> None:
    key = ServerKey()
    theirs, their_session, ours, our_session = shake_hands(key, key.fingerprint)
    record = bytearray(their_session.encrypt(b"a line\n"))
    record[where] ^= 1
    channel = Channel(ours.fileno(), ours.fileno(), our_session)
    theirs.sendall(bytes(record))
    theirs.close()
    assert channel.receive() == ([], [])
    assert channel.closed
    ours.close()


def test_a_record_counts_once() -> None:
    key = ServerKey()
    theirs, their_session, ours, our_session = shake_hands(key, key.fingerprint)
    record = their_session.encrypt(b"once")
    assert our_session.decrypt(record) == b"once"
    with pytest.raises(ssl.SSLError):
        our_session.decrypt(record)
    theirs.close()
    ours.close()


def test_the_key_is_in_no_file_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    key = ServerKey()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [path for path in Path("/proc/self/fd").iterdir() if "memfd" in os.path.realpath(path)]
    assert len(key.fingerprint) == 64
    assert key.fingerprint != ServerKey().fingerprint
