from __future__ import annotations

import os
import socket
import time

import pytest

from llmscale.cluster.launch.channel import MOST_WAITING_BYTES, Channel
from llmscale.cluster.launch.listener import Listener
from llmscale.cluster.launch.messages import (
    Beat,
    FindPort,
    Hello,
    Message,
    Output,
    Ping,
    RankSigns,
    Stacks,
    Start,
    Stopped,
    decode,
)

EVERY_KIND = [
    Hello("/c w d", {"A": "ü $(x)\n"}, "/run", 5.0),
    FindPort(None),
    Start("deepspeed", ["a", "b"], 1, 2, "10.0.0.1", 1, "train.py", ["--x", "a b"], "/logs"),
    Beat([RankSigns(3, 4, 5, "training", 6, 7, None, True, "S")], None, True),
    Output(None, "line"),
    Stacks(1, "T", "a\nb"),
    Stopped("why", -9, 2),
    Ping(),
]


@pytest.fixture
def pair() -> tuple[Channel, Channel]:
    """Both ends of a conversation."""
    ours, theirs = socket.socketpair()
    return tuple(Channel(fd, fd) for fd in (ours.detach(), theirs.detach()))  # type: ignore[return-value]


@pytest.mark.parametrize("message", EVERY_KIND, ids=lambda message: type(message).__name__)
def test_what_is_said_is_what_is_heard(message: Message, pair: tuple[Channel, Channel]) -> None:
    pair[0].send(message)
    assert pair[1].receive() == ([message], [])


def test_what_a_login_shell_prints_is_no_message(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    os.write(ours.reader.descriptor, b'Welcome!\n@llmscale {"kind": "Nonsense"}\n@llmscale {}\n@llmscale []\n')
    ours.send(Ping())
    messages, lines = theirs.receive()
    assert messages == [Ping()]
    assert lines[0] == "Welcome!"
    assert decode("@llmscale not json") is None


def test_messages_come_whole_however_they_are_cut(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    encoded = EVERY_KIND[0].encode().encode() + b"\n"
    os.write(ours.reader.descriptor, encoded[:20])
    assert theirs.receive() == ([], [])
    os.write(ours.reader.descriptor, encoded[20:])
    assert theirs.receive() == ([EVERY_KIND[0]], [])


def test_a_peer_that_does_not_read_blocks_nobody_and_fills_no_memory(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    line = "x" * 100_000
    began = time.monotonic()
    for _ in range(200):
        ours.send(Output(0, line))
    ours.send(Ping())
    assert time.monotonic() - began < 5
    received: list[Message] = []
    while ours.has_waiting or not any(isinstance(message, Ping) for message in received):
        ours.flush()
        received += theirs.receive()[0]
    assert received[-1] == Ping()
    assert len(line) * len(received) < 2 * MOST_WAITING_BYTES


def test_the_end_of_the_other_side_is_noticed(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    theirs.send(Ping())
    os.close(theirs.reader.descriptor)
    assert ours.receive()[0] == [Ping()]
    ours.receive()
    assert ours.closed
    ours.send(Ping())
    assert not ours.has_waiting


def test_only_callers_with_a_known_word_are_listened_to() -> None:
    listener = Listener()
    silent, caller = (socket.create_connection(("127.0.0.1", listener.port)) for _ in range(2))
    caller.sendall(b"tok")
    time.sleep(0.05)
    assert listener.accept() == {}
    caller.sendall(b"en\n")
    time.sleep(0.05)
    channel = listener.accept()["token"]
    channel.send(Ping())
    assert caller.recv(100).startswith(b"@llmscale ")
    silent.close()
    time.sleep(0.05)
    assert listener.accept() == {}
    os.close(channel.reader.descriptor)
    caller.close()
    listener.close()
