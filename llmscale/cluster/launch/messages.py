"""What a supervisor and its agents say to each other: one JSON object per line."""

from __future__ import annotations

import json
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
    """An agent that hears nothing for so long ends its ranks."""


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
        """Of this host."""
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
    """Where the ssh connection came from: the supervisor's machine as this host sees it."""
    own_address: str | None
    """Where it arrived: this host as the supervisor's machine sees it."""
    notes: list[str]
    """What was put right on the way."""


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
class RankSigns:
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
class Beat(Message):
    """The agent lives; how its ranks are."""

    ranks: list[RankSigns]
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
        *(Ready, Refused, Port, Output, Beat, Stacks, Signalled, Stopped),
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
