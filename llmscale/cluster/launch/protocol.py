"""Messages between a supervisor and its agents: one JSON object per line, over descriptors that never block."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

#: Begins every message: a login shell may print a greeting into the same stream.
MARK = "@llmscale "


@dataclass(frozen=True)
class Message:
    """Base of all messages. `kind` names the class in JSON."""

    def encode(self) -> str:
        """Return the message as one line, without a line end."""
        return MARK + json.dumps({"kind": type(self).__name__, **asdict(self)})


# ---------------------------------------------------------------- from the supervisor to an agent


@dataclass(frozen=True)
class Hello(Message):
    """The first message."""

    cwd: str
    environment: dict[str, str]
    """Variables for the ranks."""
    run: str
    """Run folder. One agent per run and host is allowed at a time."""
    lease_s: float
    """Seconds without a message after which an agent ends its ranks."""


@dataclass(frozen=True)
class FindPort(Message):
    """Request for a free rendezvous port."""

    preferred: int | None


@dataclass(frozen=True)
class Start(Message):
    """Request to start this host's ranks."""

    starter: str
    """"deepspeed" or "torchrun"."""
    hosts: list[str]
    """All hosts of the attempt. This one is number `node_rank`."""
    node_rank: int
    ranks_per_host: int
    master_addr: str
    master_port: int
    script: str
    arguments: list[str]
    log_folder: str

    @property
    def ranks(self) -> range:
        """Return the ranks of this host."""
        return range(self.node_rank * self.ranks_per_host, (self.node_rank + 1) * self.ranks_per_host)


@dataclass(frozen=True)
class Signal(Message):
    """Request to send a signal to every rank of the host."""

    name: str


@dataclass(frozen=True)
class DumpStacks(Message):
    """Request for the stacks of every rank's threads."""


@dataclass(frozen=True)
class Stop(Message):
    """Request to kill all processes of the attempt and answer Stopped."""


@dataclass(frozen=True)
class Ping(Message):
    """Renewal of the agent's lease."""


# ---------------------------------------------------------------- from an agent to the supervisor


@dataclass(frozen=True)
class Ready(Message):
    """The answer to Hello."""

    pid: int
    client_address: str | None
    """Source of the ssh connection: the supervisor's machine as this host sees it."""
    own_address: str | None
    """Destination of that connection: this host as the supervisor's machine sees it."""
    notes: list[str]
    """Notices to show, such as stale locks that were removed."""


@dataclass(frozen=True)
class Refused(Message):
    """The agent cannot serve and ends."""

    reason: str


@dataclass(frozen=True)
class Port(Message):
    """The answer to FindPort."""

    port: int
    was_taken: bool
    """True if the preferred port is in use, and this is another one."""


@dataclass(frozen=True)
class Output(Message):
    """One output line of a rank, or of the launcher (`rank` None)."""

    rank: int | None
    text: str


@dataclass(frozen=True)
class RankStatus:
    """The newest heartbeat of one rank, and the state of its process."""

    rank: int
    pid: int
    count: int
    """Number of heartbeats."""
    phase: str
    first_step: int | None
    """First step finished since the rank was started; None before it."""
    step: int | None
    """Number of finished optimizer steps."""
    exit_code: int | None
    """Exit status that the rank announced; None if it still runs or died without announcing one."""
    alive: bool
    state: str
    """Letter of the kernel: R, S, D, T for stopped, Z."""


@dataclass(frozen=True)
class StatusReport(Message):
    """State of all ranks of a host, sent at least once a second."""

    ranks: list[RankStatus]
    launcher_code: int | None
    """Exit status of the launcher, negative for a signal; None while it runs and before it starts."""


@dataclass(frozen=True)
class Stacks(Message):
    """Stacks of a rank's threads; empty if it did not answer."""

    rank: int
    state: str
    text: str


@dataclass(frozen=True)
class Signalled(Message):
    """The agent itself received a signal and asked its ranks to save and stop."""

    name: str


@dataclass(frozen=True)
class Stopped(Message):
    """All processes of the attempt on this host have ended; the agent ends too."""

    reason: str
    launcher_code: int | None


_KINDS: Mapping[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        *(Hello, FindPort, Start, Signal, DumpStacks, Stop, Ping),
        *(Ready, Refused, Port, Output, StatusReport, Stacks, Signalled, Stopped),
    )
}


def decode(line: str) -> Message | None:
    """Return the message in a line, with every field of its type; None for any other line."""
    if not line.startswith(MARK):
        return None
    try:
        values = json.loads(line[len(MARK) :])
        message = _build(_KINDS[values.pop("kind")], values)
        assert isinstance(message, Message)
        return message
    # RecursionError for deeply nested brackets.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _build(kind: Any, values: Any) -> object:
    """Convert JSON values to `kind`. Raises TypeError for values of other types."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _fields(kind)
        return kind(**{name: _build(hints[name], value) for name, value in values.items()})
    if get_origin(kind) is types.UnionType:
        return None if values is None else _build(get_args(kind)[0], values)
    if get_origin(kind) is list and type(values) is list:
        return [_build(get_args(kind)[0], value) for value in values]
    if get_origin(kind) is dict and type(values) is dict:
        return {name: _build(get_args(kind)[1], value) for name, value in values.items()}
    # Not isinstance: True is an int to Python.
    if type(values) is kind:
        return values
    if kind is float and type(values) is int:
        return float(values)
    raise TypeError(f"{values!r} is not a {kind}")


@cache
def _fields(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


#: Output lines are dropped while more than this waits to be sent: the log files have them, and a peer that does not
#: read must not fill the memory.
MAX_WAITING_BYTES = 4 << 20
#: A longer message ends the connection.
MAX_MESSAGE_BYTES = 16 << 20
#: A longer line is cut into pieces, so that an endless line does not fill the memory. In JSON one byte may become six:
#: a piece still fits into a message.
MAX_LINE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
#: Most bytes of one read, so that a descriptor that always has more does not delay the others.
_MAX_BYTES_AT_ONCE = 4 << 20


class LineReader:
    """Lines from a non-blocking descriptor."""

    def __init__(self, descriptor: int, max_bytes: int = MAX_LINE_BYTES) -> None:
        """Cut a line of more than `max_bytes` into pieces."""
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.closed = False
        """True once the other side has closed its end."""
        self.has_cut = False
        """True once a line was too long."""
        self._max_bytes = max_bytes
        self._rest = b""

    def read(self) -> list[str]:
        """Return the complete lines that have arrived; at the end of the stream also an unfinished one."""
        chunks: list[bytes] = []
        while not self.closed and len(chunks) * _READ_BYTES < _MAX_BYTES_AT_ONCE:
            try:
                chunk = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            self.closed = not chunk
            chunks.append(chunk)
            if len(chunk) < _READ_BYTES:
                break
        *lines, self._rest = (self._rest + b"".join(chunks)).split(b"\n")
        if len(self._rest) > self._max_bytes or (self.closed and self._rest):
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace").rstrip("\r") for line in self._cut(lines)]

    def _cut(self, lines: list[bytes]) -> list[bytes]:
        """Cut lines that are too long into pieces."""
        size = self._max_bytes
        if all(len(line) <= size for line in lines):
            return lines
        self.has_cut = True
        return [line[start : start + size] for line in lines for start in range(0, max(len(line), 1), size)]


class Channel:
    """Messages to and from one peer."""

    def __init__(self, read_descriptor: int, write_descriptor: int) -> None:
        self.reader = LineReader(read_descriptor, MAX_MESSAGE_BYTES)
        os.set_blocking(write_descriptor, False)
        self._write_descriptor = write_descriptor
        self._waiting = b""

    @property
    def closed(self) -> bool:
        """Return whether the connection has ended, or the peer sent a line that is too long."""
        return self.reader.closed or self.reader.has_cut

    @property
    def has_waiting(self) -> bool:
        """Return whether messages still wait to be sent to a connected peer."""
        return bool(self._waiting) and not self.closed

    def send(self, message: Message) -> None:
        """Queue a message and write as much as the peer takes now."""
        if isinstance(message, Output) and len(self._waiting) > MAX_WAITING_BYTES:
            return
        self._waiting += message.encode().encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write waiting messages, as far as the peer takes them."""
        while self._waiting and not self.closed:
            try:
                written = os.write(self._write_descriptor, self._waiting)
            except BlockingIOError:
                return
            except OSError:
                # The peer's last messages may still wait to be read: only reading finds the end.
                self._waiting = b""
                return
            self._waiting = self._waiting[written:]

    def receive(self) -> tuple[list[Message], list[str]]:
        """Return the messages that have arrived, and all other lines."""
        messages, others = [], []
        lines = [] if self.closed else self.reader.read()
        for line in [] if self.reader.has_cut else lines:
            message = decode(line)
            if message is not None:
                messages.append(message)
            elif line:
                others.append(line)
        return messages, others
