from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time

import pytest

from llmscale.cluster.launch.protocol import (
    MARK,
    MAX_MESSAGE_BYTES,
    MAX_WAITING_BYTES,
    Channel,
    FindPort,
    Hello,
    LineReader,
    Message,
    Output,
    Ping,
    RankStatus,
    Stacks,
    Start,
    StatusReport,
    Stopped,
    decode,
)

EVERY_KIND = [
    Hello("/c w d", {"A": "ü $(x)\n"}, "/run", 5.0),
    FindPort(None),
    Start("deepspeed", ["a", "b"], 1, 2, "10.0.0.1", 1, "train.py", ["--x", "a b"], "/logs"),
    StatusReport([RankStatus(3, 4, 5, "training", 6, 7, None, True, "S")], None),
    Output(None, "line"),
    Stacks(1, "T", "a\nb"),
    Stopped("why", -9),
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


@pytest.mark.parametrize(
    "line",
    [
        *("", "[]", "{}", "null", "7", '"Ping"', '{"kind": 1}', '{"kind": []}', '{"kind": "Message"}', "[" * 200_000),
        *('{"kind": "Ping", "more": 1}', '{"kind": "Stop"', '{"kind": "Signal"}', '{"kind": "Signal", "name": 9}'),
        *('{"kind": "Signal", "name": null}', '{"kind": "Port", "port": "1", "was_taken": false}'),
        *('{"kind": "Port", "port": true, "was_taken": false}', '{"kind": "Port", "port": 1, "was_taken": 0}'),
        *('{"kind": "Port", "port": 1.5, "was_taken": false}', '{"kind": "Output", "rank": "0", "text": "x"}'),
        *(
            '{"kind": "Output", "rank": 0, "text": ["x"]}',
            '{"kind": "StatusReport", "ranks": {}, "launcher_code": null}',
        ),
        *('{"kind": "StatusReport", "ranks": [[]], "launcher_code": null}', '{"kind": "Stacks", "rank": {}}'),
        '{"kind": "StatusReport", "ranks": [{"rank": 0, "pid": "x"}], "launcher_code": null}',
        '{"kind": "Ready", "pid": 1, "client_address": null, "own_address": {}, "notes": []}',
        '{"kind": "Ready", "pid": 1, "client_address": null, "own_address": null, "notes": [1]}',
        '{"kind": "Output", "rank": ' + "9" * 5000 + ', "text": "x"}',
        '{"kind": "Stacks", "rank": 0, "state": "R", "text": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=lambda line: line[:70],
)
def test_what_has_not_the_form_of_a_message_is_none(line: str) -> None:
    assert decode(f"{MARK}{line}") is None


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
    assert time.monotonic() - began < 60, "it would wait for ever"
    received: list[Message] = []
    while ours.has_waiting or not any(isinstance(message, Ping) for message in received):
        ours.flush()
        received += theirs.receive()[0]
    assert received[-1] == Ping()
    assert len(line) * len(received) < 2 * MAX_WAITING_BYTES


def test_the_end_of_the_other_side_is_noticed(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    theirs.send(Ping())
    os.close(theirs.reader.descriptor)
    assert ours.receive()[0] == [Ping()]
    ours.receive()
    assert ours.closed
    ours.send(Ping())
    assert not ours.has_waiting


def test_a_message_without_an_end_ends_the_conversation_and_fills_no_memory(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    piece, sent = MARK.encode() + b"x" * 65536, 0
    while not theirs.closed:
        assert sent < 2 * MAX_MESSAGE_BYTES
        with contextlib.suppress(BlockingIOError):
            sent += os.write(ours.reader.descriptor, piece)
        assert theirs.receive() == ([], [])
    theirs.send(Ping())
    assert not theirs.has_waiting
    assert theirs.receive() == ([], [])


def test_a_printed_line_without_an_end_comes_in_pieces() -> None:
    read, write = os.pipe()
    reader, text = LineReader(read, max_bytes=1000), ""
    for _ in range(10):
        os.write(write, b"x" * 10_000)
        lines = reader.read()
        assert all(len(line) <= 1000 for line in lines)
        text += "".join(lines)
    os.write(write, b"\nshort\n\n")
    assert reader.read()[-2:] == ["short", ""]
    assert len(text) == 100_000
    for descriptor in (read, write):
        os.close(descriptor)


def test_one_who_never_stops_talking_does_not_keep_the_others_waiting() -> None:
    read, write = os.pipe()
    talker = subprocess.Popen(["yes"], stdout=write)
    os.close(write)
    reader = LineReader(read)
    for _ in range(4):
        reader.read()
    talker.kill()
    talker.wait()
    os.close(read)
