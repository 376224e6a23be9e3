"""The supervisor's side of one host: the process that reaches it, what was heard of it, what became of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque

from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch.channel import Channel, LineReader
from llmscale.cluster.launch.listener import find_announcement
from llmscale.cluster.launch.messages import (
    Beat,
    Hello,
    Message,
    Output,
    Ping,
    RankSigns,
    Ready,
    Refused,
    Stacks,
    Start,
    Stopped,
)
from llmscale.cluster.launch.reach import Reach

#: Lines of a host's stderr that are kept for the reason of its end, and how much of each.
_KEPT_LINES = 20
_KEPT_CHARACTERS = 1000
_PING_S = 1.0


class HostConnection:
    """One host of an attempt."""

    def __init__(self, host: Host, reach: Reach, hello: Hello) -> None:
        """Start the agent there; Hello is sent as soon as there is a connection. Raises OSError."""
        self.host, self._calls_back, self._hello = host, reach.calls_back, hello
        # A session of its own: Ctrl-C in the terminal is for the supervisor alone, which tells the agents what to do.
        self._process = subprocess.Popen(
            reach.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin = self._process.stdin
        self._channel: Channel | None = None
        self._digest: str | None = None
        self._ranks = range(0)
        self._prints = [LineReader(self._process.stderr.fileno())]
        """What is said outside of the conversation."""
        self._error_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.ready: Ready | None = None
        self.refusal: str | None = None
        self.stopped: Stopped | None = None
        self.signs: dict[int, RankSigns] = {}
        self.launcher_code: int | None = None
        self.last_heard = self._last_ping = time.monotonic()
        if not reach.calls_back:
            self.connect(Channel(self._process.stdout.fileno(), self._process.stdin.fileno()))
        else:
            self._prints.append(LineReader(self._process.stdout.fileno()))

    @property
    def expected(self) -> str | None:
        """The digest by which its agent, which has announced it and not called yet, will be known; each only once."""
        return None if self._channel else self._digest

    def connect(self, channel: Channel) -> None:
        """Begin the conversation."""
        self._channel = channel
        self._channel.send(self._hello)

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def descriptors(self) -> list[int]:
        """What to wait for."""
        open_prints = [reader.descriptor for reader in self._prints if not reader.closed]
        has_channel = self._channel is not None and not self._channel.closed
        return [*open_prints, *([self._channel.reader.descriptor] if self._channel and has_channel else [])]

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self.last_heard

    @property
    def closed(self) -> bool:
        """The connection is, or it never was and what should have made it has ended."""
        return self._channel.closed if self._channel else self._prints[-1].closed

    def send(self, message: Message) -> None:
        """Nothing when there is no connection."""
        if isinstance(message, Start):
            self._ranks = message.ranks
        if self._channel:
            self._channel.send(message)

    def receive(self) -> tuple[list[Message], list[str]]:
        """Messages since the last call, and lines to show that are none. Notes what they say about this host."""
        messages, lines = self._channel.receive() if self._channel else ([], [])
        messages = [message for message in messages if self._is_its_own(message)]
        errors = [line for reader in self._prints for line in reader.read()]
        if self._calls_back:
            errors = self._without_announcement(errors)
        self._error_lines.extend(line[:_KEPT_CHARACTERS] for line in errors if line.strip())
        for message in messages:
            self.last_heard = time.monotonic()
            self._note(message)
        return messages, lines + errors

    def _is_its_own(self, message: Message) -> bool:
        """A host speaks for its own ranks only."""
        if isinstance(message, Output):
            return message.rank is None or message.rank in self._ranks
        return not isinstance(message, Stacks) or message.rank in self._ranks

    def _without_announcement(self, lines: list[str]) -> list[str]:
        """The first one counts: it was there before anything else that this host runs."""
        digests = {line: find_announcement(line) for line in lines}
        self._digest = self._digest or next(filter(None, digests.values()), None)
        return [line for line in lines if not digests[line]]

    def _note(self, message: Message) -> None:
        if isinstance(message, Ready):
            self.ready = self.ready or message
        elif isinstance(message, Refused):
            self.refusal = message.reason[:_KEPT_CHARACTERS]
        elif isinstance(message, Stopped):
            self.stopped = message
        elif isinstance(message, Beat):
            self.signs.update({sign.rank: sign for sign in message.ranks if sign.rank in self._ranks})
            self.launcher_code = message.launcher_code

    def ping(self) -> None:
        """Keep the agent's lease; cheap to call often."""
        if time.monotonic() - self._last_ping >= _PING_S:
            self._last_ping = time.monotonic()
            self.send(Ping())
        if self._channel:
            self._channel.flush()

    def why_lost(self) -> str:
        """One line about a host that cannot be reached, or not any more."""
        if self.refusal:
            return self.refusal
        if self._channel and self._channel.reader.has_cut:
            return "it sent more than a message can hold"
        if self._error_lines:
            return self._error_lines[-1]
        code = self._process.poll()
        if self.closed:
            return "its connection closed" + ("" if code is None else f" (exit status {code})")
        return f"nothing was heard of it for {self.silence_s:.0f} s"

    def close(self, patience_s: float = 5.0) -> None:
        """Close the connection, which is also the agent's word to end, and wait for the process that carries it."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        if self._channel and self._calls_back:
            os.close(self._channel.reader.descriptor)
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
