"""One attempt of a launch: connect to the hosts, start their ranks, watch them, and find what ended them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmscale.cluster.launch.host import MARK
from llmscale.error_handling import signal_name
from llmscale.training.watchdog import HUNG_STATUS

#: train.py's exit status for an error that the user must repair: another attempt would end the same way.
USER_ERROR_STATUS = 2
#: Wait after the first sign of a failure: another rank's may explain it.
_SETTLE_S = 2.0
#: Time that the ranks' own watchdogs have for an attempt that hangs: on a busy machine they count slowly. They do not
#: help if the only rank is stopped.
_WATCHDOGS_S = 60.0
#: Time limit for killing ranks. Lost hosts are not waited for.
_END_S = 20.0
#: Time between two signs of life to the hosts.
_POLL_S = 0.5
#: Number of newest lines of a rank that are shown when it fails.
_EVIDENCE_LINES = 12


@dataclass(frozen=True)
class Outcome:
    """End of an attempt, with the host and rank that caused it if they are known."""

    end: str
    """One of the values of `Attempt.end`."""
    reason: str
    host: str | None = None
    rank: int | None = None


@dataclass
class RankState:
    """State of a rank, as its host last reported it."""

    rank: int
    host: str
    pid: int = 0
    phase: str = "starting"
    step: int | None = None
    lost_peer: bool = False
    """True if the rank failed because another one ended, or does not answer."""
    code: int | None = None
    """Return code; negative for a signal, None while the rank runs."""
    is_stopped: bool = False
    """True in the kernel's state T."""

    @property
    def weight(self) -> int:
        """Return the place of this rank's end among those that may explain an attempt's, the best explanation first.

        A killed rank breaks the connections of its peers, which then end with errors of their own.
        """
        if self.code == USER_ERROR_STATUS:
            return 0
        if self.code is not None and self.code < 0:
            return 1
        if self.code == HUNG_STATUS:
            return 2
        return 3 + self.lost_peer


def classify(failed: Sequence[RankState], states: Sequence[RankState]) -> Outcome:
    """Return the failure that explains all others. `failed`: the ranks in the order of their first signs of it."""
    cause = min(failed, key=lambda state: state.weight)
    rank = cause.rank
    host = cause.host
    code = cause.code or 0
    if code == USER_ERROR_STATUS:
        return Outcome("user error", f"rank {rank} on {host} refused", host, rank)
    if code == HUNG_STATUS:
        return explain_hang(states)
    if code < 0:
        return Outcome("failed", f"rank {rank} on {host} was killed by {signal_name(-code)}", host, rank)
    return Outcome("failed", f"rank {rank} on {host} ended with status {code}", host, rank)


def explain_hang(states: Sequence[RankState]) -> Outcome:
    """Return the end of an attempt whose ranks make no progress."""
    step = max((state.step for state in states if state.step is not None), default=None)
    reason = f"no progress after {'the start' if step is None else f'step {step}'}"
    for state in states:
        if state.is_stopped:
            rank = state.rank
            host = state.host
            return Outcome("hung", f"{reason}: rank {rank} on {host} is stopped (state T)", host, rank)
    return Outcome("hung", f"{reason}; the stacks of all ranks show where they wait")


class HostConnection:
    """The launcher's side of one host of an attempt."""

    def __init__(self, name: str, slots: int, argv: Sequence[str]) -> None:
        """Start the command `argv`. Raises OSError."""
        self.name = name
        self.slots = slots
        # In a separate session: Ctrl-C in the terminal reaches the launcher alone, which tells the hosts what to do.
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout
        self._input, self._output = self._process.stdin, self._process.stdout.fileno()
        self.ready: dict[str, Any] | None = None
        """The host's first message: a free port, and addresses."""
        self.closed = False
        """True once the other side has closed the connection."""
        self._rest = b""
        """Received part of the next line."""
        self._last_line = ""
        """Newest line that is not a message, such as ssh's error."""
        self.heard_s = time.monotonic()

    def fileno(self) -> int:
        """Return the descriptor to wait for, as selectors ask for it."""
        return self._output

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self.heard_s

    def send(self, message: object = None) -> None:
        """Send a message, or an empty line as a sign of life; a closed connection drops it."""
        if message:
            line = json.dumps(message)
        else:
            line = ""
        with contextlib.suppress(OSError, ValueError):
            self._input.write(f"{line}\n".encode())
            self._input.flush()

    def read(self, show: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """Yield the messages that have come, and show all other lines."""
        data = os.read(self._output, 1 << 16)
        self.closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(MARK):
                self.heard_s = time.monotonic()
                yield json.loads(line[len(MARK) :])
            elif text := line.decode(errors="replace").strip():
                self._last_line = text
                show(f"{self.name}! {text}")

    def why_lost(self) -> str:
        """Return one line that explains why the host is lost."""
        if self._last_line:
            return self._last_line
        if self.closed:
            return f"its connection closed (exit status {self._process.wait()})"
        return f"no message from it for {self.silence_s:.0f} s"

    def hang_up(self) -> None:
        """Close this side of the connection, which ends the ranks of the host."""
        with contextlib.suppress(OSError):
            self._input.close()

    def close(self) -> bool:
        """Kill what is left of the connection. Return whether the ranks of the host are surely gone."""
        self.hang_up()
        if not self.closed:
            os.killpg(self._process.pid, signal.SIGKILL)
        # Ranks are killed with a process of this machine that started them.
        return self._process.wait() <= 0 and self.closed


@dataclass
class AttemptRun:
    """Connected hosts and, once started, their ranks."""

    limit_s: float
    """Silence after which a host is lost. Half of it ends the ranks there: two sets of ranks must never write into
    one run folder."""
    start_timeout_s: float
    hang_timeout_s: float
    show: Callable[[str], None]
    left_out: dict[str, str] = field(default_factory=dict)
    """Hosts left out, with the reason."""
    first_step: int | None = None
    last_step: int | None = None
    training_since_s: float | None = None
    """Time at which the first step was finished."""
    states: dict[int, RankState] = field(default_factory=dict)
    last_lines: dict[int, deque[str]] = field(default_factory=dict)
    """The newest lines of each rank."""

    def __post_init__(self) -> None:
        self.hosts: dict[str, HostConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._failed: list[RankState] = []
        self._failing_since_s = self._progress_s = self._pinged_s = time.monotonic()

    def gather(
        self,
        hosts: Mapping[str, int],
        command: Callable[[str], list[str]],
        hello: Mapping[str, object],
        timeout_s: float,
        stop: Sequence[str],
    ) -> None:
        """Reach the hosts, and leave out those that do not answer in time. Returns early when there is a `stop`."""
        for name, slots in hosts.items():
            try:
                connection = HostConnection(name, slots, command(name))
            except OSError as error:
                self.left_out[name] = f"it cannot be reached from here: {error}"
                continue
            connection.send({**hello, "limit_s": self.limit_s / 2})
            self._selector.register(connection, selectors.EVENT_READ)
            self.hosts[name] = connection
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not stop:
            if all(host.ready or host.closed for host in self.hosts.values()):
                break
            self._poll()
        for reached in list(self.hosts.values()):
            if reached.ready is None or reached.closed:
                self.dismiss(reached.name, reached.why_lost())

    def dismiss(self, name: str, why: str) -> None:
        """Leave a host out of the attempt."""
        self.show(f"WARNING: {name} is left out: {why}")
        self.left_out[name] = why
        self.hosts.pop(name).close()

    def find_rendezvous(self, master_addr: str | None, master_port: int | None) -> tuple[str, int]:
        """Return an address of the first host as the others see it, and a free port there."""
        first, *others = self.hosts.values()
        assert first.ready is not None
        port = master_port or int(first.ready["port"])
        reached_from = [host.ready["client_address"] for host in others if host.ready]
        if master_addr or not others:
            return master_addr or "127.0.0.1", port
        # A host that was not reached through ssh is this machine, and the others know where they were reached from.
        return next(filter(None, (first.ready["own_address"], *reached_from)), first.name), port

    def start(self, rendezvous: tuple[str, int], script: str, arguments: Sequence[str], logs: str) -> None:
        """Start as many ranks on every host as it has slots."""
        world_size = sum(host.slots for host in self.hosts.values())
        for node, host in enumerate(self.hosts.values()):
            ranks = range(len(self.states), len(self.states) + host.slots)
            self.states |= {rank: RankState(rank, host.name) for rank in ranks}
            variables = {
                "MASTER_ADDR": rendezvous[0],
                "MASTER_PORT": str(rendezvous[1]),
                "WORLD_SIZE": str(world_size),
                "CROSS_RANK": str(node),
                "CROSS_SIZE": str(len(self.hosts)),
            }
            order = {"ranks": [*ranks], "variables": variables, "logs": logs}
            host.heard_s = time.monotonic()  # it had nothing to say while others were waited for
            host.send({**order, "script": script, "arguments": list(arguments)})
        self._progress_s = time.monotonic()

    def follow(self, stop: Sequence[str]) -> Outcome:
        """Wait until the ranks have ended, or must be ended. Each name in `stop` asks them to save and stop."""
        num_sent = 0
        while True:
            self._poll()
            for name in stop[num_sent:]:
                self.show(f"{name}: asking the ranks to save and stop")
                for host in self.hosts.values():
                    host.send({"stop": name})
                num_sent += 1
            if outcome := self._find_outcome():
                return outcome

    def _find_outcome(self) -> Outcome | None:
        now = time.monotonic()
        states = [*self.states.values()]
        running = {state.host for state in states if state.code is None}
        running -= {state.host for state in states if state.code}
        for host in self.hosts.values():
            # A host whose ranks have all ended says no more.
            if host.name in running and (host.closed or host.silence_s > self.limit_s):
                return Outcome("host lost", f"{host.name}: {host.why_lost()}", host.name)
        ended = [state for state in self._failed if state.code]
        if ended:
            if now - self._failing_since_s > _SETTLE_S:
                return classify(ended, states)
            return None
        self._failing_since_s = now
        if all(state.code == 0 for state in states):
            stopped = any(state.phase == "stopped" for state in states)
            return Outcome("stopped" if stopped else "finished", "every rank ended with status 0")
        limit_s = self.start_timeout_s if self.last_step is None else self.hang_timeout_s
        if limit_s and now - self._progress_s > limit_s + _WATCHDOGS_S:
            return explain_hang(states)
        return None

    def _poll(self) -> None:
        """Wait for messages, and handle those that have come; give the hosts a sign of life."""
        for key, _ in self._selector.select(_POLL_S):
            host: HostConnection = key.fileobj  # type: ignore[assignment]
            for message in host.read(self.show):
                self._note(host, message)
            if host.closed:
                self._selector.unregister(host)
        if time.monotonic() - self._pinged_s >= _POLL_S:
            self._pinged_s = time.monotonic()
            for host in self.hosts.values():
                host.send()

    def _note(self, host: HostConnection, message: Mapping[str, Any]) -> None:
        if "port" in message:
            host.ready = dict(message)
        for state in self.states.values():
            if "stopped" in message and state.host == host.name:
                state.is_stopped = state.pid in message["stopped"]
        if "rank" not in message:
            return
        state = self.states[message["rank"]]
        if "text" in message:
            self.last_lines.setdefault(state.rank, deque(maxlen=_EVIDENCE_LINES)).append(message["text"])
            # Rank 0 speaks for the run.
            self.show(f"{f'{host.name} rank {state.rank}: ' if state.rank else ''}{message['text']}")
        elif "code" in message:
            state.code = message["code"]
        else:
            self._note_report(state, message)
        if (state.code or state.phase == "failed") and state not in self._failed:
            self._failed.append(state)

    def _note_report(self, state: RankState, report: Mapping[str, Any]) -> None:
        state.pid = report["pid"]
        state.phase = report["phase"]
        state.lost_peer = report["lost_peer"]
        if report["step"] is not None and report["phase"] == "training" and state.step is None:
            self.first_step = min(report["step"], self.first_step or report["step"])
            self.training_since_s = self.training_since_s or time.monotonic()
        state.step = report["step"] if report["step"] is not None else state.step
        if state.step is not None and self.first_step is not None:
            self.last_step = max(state.step, self.last_step or 0)
        self._progress_s = time.monotonic()

    def end(self) -> None:
        """End all processes of the attempt, confirmed by every host or by the limit on the launcher's silence."""
        for host in self.hosts.values():
            host.hang_up()
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline and any(
            not host.closed and host.silence_s < self.limit_s for host in self.hosts.values()
        ):
            self._poll()
        lost = [host for host in self.hosts.values() if not host.close()]
        for host in lost:
            time.sleep(max(0.0, self.limit_s / 2 + 2.0 - host.silence_s))
