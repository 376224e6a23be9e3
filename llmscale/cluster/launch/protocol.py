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
    """Base of all: `kind` names the class on the wire."""

    def encode(self) -> str:
        """One line, without its end."""
        return MARK + json.dumps({"kind": type(self).__name__, **asdict(self)})


# ---------------------------------------------------------------- from the supervisor to an agent


@dataclass(frozen=True)
class Hello(Message):
    """The first message."""

    cwd: str
    environment: dict[str, str]
    """Variables for the ranks."""
    run: str
    """The run folder: one agent per run and host at a time."""
    lease_s: float
    """Seconds of silence after which an agent ends its ranks."""


@dataclass(frozen=True)
class FindPort(Message):
    """Asks for a port that ranks can meet at."""

    preferred: int | None


@dataclass(frozen=True)
class Start(Message):
    """Start this host's ranks."""

    starter: str
    """"deepspeed" or "torchrun"."""
    hosts: list[str]
    """All hosts of the attempt, this one being number `node_rank`."""
    node_rank: int
    ranks_per_host: int
    master_addr: str
    master_port: int
    script: str
    arguments: list[str]
    log_folder: str

    @property
    def ranks(self) -> range:
        """Ranks of this host."""
        return range(self.node_rank * self.ranks_per_host, (self.node_rank + 1) * self.ranks_per_host)


@dataclass(frozen=True)
class Signal(Message):
    """Send a signal to every rank of the host."""

    name: str


@dataclass(frozen=True)
class DumpStacks(Message):
    """Ask every rank what its threads are doing."""


@dataclass(frozen=True)
class Stop(Message):
    """Kill what still runs, and say Stopped."""


@dataclass(frozen=True)
class Ping(Message):
    """The supervisor is there."""


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
    """The agent cannot serve; it ends."""

    reason: str


@dataclass(frozen=True)
class Port(Message):
    """The answer to FindPort."""

    port: int
    was_taken: bool
    """The preferred one is in use, and this is another."""


@dataclass(frozen=True)
class Output(Message):
    """One line that a rank or the launcher (`rank` None) has printed."""

    rank: int | None
    text: str


@dataclass(frozen=True)
class RankStatus:
    """The newest heartbeat of one rank, and whether its process is there."""

    rank: int
    pid: int
    count: int
    """Grows with every heartbeat."""
    phase: str
    first_step: int | None
    """The first step that it finished since it was started; None when it has not."""
    step: int | None
    """Optimizer steps that are done."""
    exit_code: int | None
    """What the rank said its status would be; None when it has not ended, or had no time to say."""
    alive: bool
    state: str
    """The kernel's letter: R, S, D, T for stopped, Z."""


@dataclass(frozen=True)
class StatusReport(Message):
    """The agent lives; how its ranks are."""

    ranks: list[RankStatus]
    launcher_code: int | None
    """Exit status of DeepSpeed's launcher, negative for a signal; None while it runs or before it does."""


@dataclass(frozen=True)
class Stacks(Message):
    """What a rank's threads were doing; empty when it did not answer."""

    rank: int
    state: str
    text: str


@dataclass(frozen=True)
class Signalled(Message):
    """A signal reached the agent itself, and its ranks were told."""

    name: str


@dataclass(frozen=True)
class Stopped(Message):
    """Nothing of the attempt runs on this host any more; the agent ends."""

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
    """The message of one line, every field of its type; None for anything else."""
    if not line.startswith(MARK):
        return None
    try:
        values = json.loads(line[len(MARK) :])
        message = _build(_KINDS[values.pop("kind")], values)
        assert isinstance(message, Message)
        return message
    # The last one for brackets in brackets in brackets.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _build(kind: Any, values: Any) -> object:
    """`values`, which JSON held, as one of `kind`. Raises TypeError when they are something else."""
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
    raise TypeError(f"{values!r} is no {kind}")


@cache
def _fields(kind: type) -> dict[str, Any]:
    """Types by the names of a message's fields."""
    return get_type_hints(kind)


#: Output lines are dropped while this much is waiting to be sent: the log files have them, and a peer that does not
#: read must not fill the memory.
MOST_WAITING_BYTES = 4 << 20
#: A message that is longer than this ends the conversation.
MOST_MESSAGE_BYTES = 16 << 20
#: Longer lines are cut into pieces, so that an endless line does not fill the memory. In JSON one byte may become six:
#: a piece still fits into a message.
MOST_LINE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
#: Read at a time from one descriptor, so that one that always has more does not keep the others waiting.
_MOST_AT_ONCE_BYTES = 4 << 20


class LineReader:
    """Lines from a non-blocking descriptor."""

    def __init__(self, descriptor: int, most_bytes: int = MOST_LINE_BYTES) -> None:
        """Cut a line of more than `most_bytes` into pieces."""
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.closed = False
        """The other side has closed its end."""
        self.has_cut = False
        """A line was too long."""
        self._most_bytes = most_bytes
        self._rest = b""

    def read(self) -> list[str]:
        """Whole lines that have come; at the end of the stream also an unfinished one."""
        chunks: list[bytes] = []
        while not self.closed and len(chunks) * _READ_BYTES < _MOST_AT_ONCE_BYTES:
            try:
                chunk = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                self.closed = True
                break
            chunks.append(chunk)
            if len(chunk) < _READ_BYTES:
                break
        *whole, self._rest = (self._rest + b"".join(chunks)).split(b"\n")
        if self.closed and self._rest:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace").rstrip("\r") for line in self._cut(whole)]

    def _cut(self, lines: list[bytes]) -> list[bytes]:
        """Lines, and the unfinished one as soon as it is too long, in pieces."""
        if len(self._rest) > self._most_bytes:
            lines.append(self._rest)
            self._rest = b""
        if all(len(line) <= self._most_bytes for line in lines):
            return lines
        self.has_cut = True
        size = self._most_bytes
        return [line[start : start + size] for line in lines for start in range(0, max(len(line), 1), size)]


class Channel:
    """Messages to and from one peer."""

    def __init__(self, read_descriptor: int, write_descriptor: int) -> None:
        self.reader = LineReader(read_descriptor, MOST_MESSAGE_BYTES)
        os.set_blocking(write_descriptor, False)
        self._write_descriptor = write_descriptor
        self._waiting = b""

    @property
    def closed(self) -> bool:
        """The peer is gone, or the connection to it, or what it says makes no sense."""
        return self.reader.closed or self.reader.has_cut

    @property
    def has_waiting(self) -> bool:
        """Something is still to be sent to a peer that is there."""
        return bool(self._waiting) and not self.closed

    def send(self, message: Message) -> None:
        """Queue a message and write what can be written now."""
        if isinstance(message, Output) and len(self._waiting) > MOST_WAITING_BYTES:
            return
        self._waiting += message.encode().encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what is waiting, as far as the peer takes it."""
        while self._waiting and not self.closed:
            try:
                written = os.write(self._write_descriptor, self._waiting)
            except BlockingIOError:
                return
            except OSError:
                # The peer's last words may still be there to be read: only reading finds the end.
                self._waiting = b""
                return
            self._waiting = self._waiting[written:]

    def receive(self) -> tuple[list[Message], list[str]]:
        """Return the messages that have come, and all other lines."""
        messages, others = [], []
        lines = [] if self.closed else self.reader.read()
        for line in [] if self.reader.has_cut else lines:
            message = decode(line)
            if message is not None:
                messages.append(message)
            elif line:
                others.append(line)
        return messages, others
