"""One attempt of a launch: lay out the ranks, start them, watch their progress, and classify how they end."""

from __future__ import annotations

import ipaddress
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch.protocol import DumpStacks, FindPort, Port, RankStatus, Signal, Signalled, Stacks, Start
from llmscale.cluster.launch.transport import HostConnection, HostPool
from llmscale.files.atomic_write import write_durably
from llmscale.terminal.human_numbers import with_singulars
from llmscale.training.stop_request import PEER_GONE


@dataclass(frozen=True)
class Layout:
    """An equal number of ranks on every host.

    DeepSpeed's launcher numbers the local ranks of unequal hosts wrongly: by the global rank modulo the host's slots.
    """

    hosts: tuple[str, ...]
    """Hosts in rank order. The rendezvous is on the first."""
    ranks_per_host: int

    @property
    def world_size(self) -> int:
        return len(self.hosts) * self.ranks_per_host

    def ranks_of(self, host: str) -> range:
        """Return the ranks of one host."""
        first = self.hosts.index(host) * self.ranks_per_host
        return range(first, first + self.ranks_per_host)

    def describe(self) -> str:
        """Return the layout in words."""
        where = f"{self.ranks_per_host} on each of {', '.join(self.hosts)}"
        return with_singulars(f"{self.world_size} ranks, {where}")


def choose_layout(hosts: Sequence[Host], is_legal: Callable[[int], bool], min_hosts: int = 1) -> Layout | None:
    """Return the layout of the largest legal world size, on as few hosts as it needs.

    None when no legal world size fits on at least `min_hosts`.
    """

    def with_slots(slots: int) -> list[str]:
        return [host.name for host in hosts if host.slots >= slots]

    ways = {
        (count, slots)
        for slots in range(1, max((host.slots for host in hosts), default=0) + 1)
        for count in range(min_hosts, len(with_slots(slots)) + 1)
    }
    verdicts: dict[int, bool] = {}
    for count, slots in sorted(ways, key=lambda way: (-way[0] * way[1], way[0])):
        world_size = count * slots
        if world_size not in verdicts:
            verdicts[world_size] = is_legal(world_size)
        if verdicts[world_size]:
            return Layout(tuple(with_slots(slots)[:count]), slots)
    return None


@dataclass
class Progress:
    """Heartbeats of the ranks of one attempt. Times are on the caller's monotonic clock."""

    began_s: float
    ranks: Iterable[int]
    start_timeout_s: float
    """Limit from a rank's start, or its last heartbeat during the start, to its first finished step."""
    hang_timeout_s: float
    """Limit between two heartbeats of a rank that trains."""
    first_step: int | None = None
    last_step: int | None = None
    training_since_s: float | None = None
    """Time at which the first step was finished."""
    _seen: dict[int, tuple[RankStatus, float]] = field(default_factory=dict)

    def note(self, statuses: Iterable[RankStatus], now_s: float) -> None:
        """Record the newest heartbeats."""
        for status in statuses:
            before = self._seen.get(status.rank)
            if before is None or before[0].count != status.count:
                self._seen[status.rank] = (status, now_s)
            if status.first_step is not None and status.step is not None:
                self.first_step = status.first_step
                self.last_step = max(self.last_step or 0, status.step)
                self.training_since_s = now_s if self.training_since_s is None else self.training_since_s

    def hanging(self, now_s: float) -> list[int]:
        """Return the ranks without a heartbeat for longer than their limit."""
        silent = []
        for rank in self.ranks:
            status, since_s = self._seen.get(rank, (None, self.began_s))
            if status is not None and status.exit_code is not None:
                continue
            # A starting rank gives few heartbeats: for downloads, and for weights that are read.
            starting = status is None or status.phase == "starting"
            if now_s - since_s > (self.start_timeout_s if starting else self.hang_timeout_s):
                silent.append(rank)
        return silent


#: train.py's exit status for an error that the user must repair: another attempt would end the same way.
USER_ERROR_STATUS = 2


@dataclass(frozen=True)
class Outcome:
    """End of an attempt, with the host and rank that caused it if they are known."""

    end: str
    """One of the values of `Attempt.end`."""
    reason: str
    host: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class HostStatus:
    """A host's state, as its agent last reported it."""

    name: str
    ranks: Sequence[int]
    """Ranks that should run there."""
    statuses: Mapping[int, RankStatus]
    launcher_code: int | None
    lost: str | None
    """Reason why the host is lost; None while it answers."""
    victims: frozenset[int] = frozenset()
    """Ranks whose last lines say that a peer has gone."""


def classify(hosts: Sequence[HostStatus]) -> Outcome | None:
    """Return the fault that explains all others, or the end of all ranks; None while everything runs.

    A lost host breaks the ranks of all other hosts, and a killed rank breaks the connections of its peers. A rank that
    reports an error before it ends knows best.
    """
    for host in hosts:
        if host.lost is not None:
            return Outcome("host lost", f"{host.name}: {host.lost}", host=host.name)
    known = [(host, status) for host in hosts for status in host.statuses.values()]
    for host, status in known:
        if status.exit_code == USER_ERROR_STATUS:
            return Outcome("user error", f"rank {status.rank} on {host.name} refused", host.name, status.rank)
    for host, status in known:
        if status.exit_code is None and not status.alive:
            # Only the launcher, its parent, knows how it ended.
            how = describe_code(host.launcher_code) if host.launcher_code else "vanished"
            reason = f"rank {status.rank} on {host.name} (process {status.pid}) {how}"
            return Outcome("failed", reason, host.name, status.rank)
    # A rank whose connection broke ends at the same time as the one that broke it.
    for host, status in sorted(known, key=lambda item: item[1].rank in item[0].victims):
        if status.exit_code:
            reason = f"rank {status.rank} on {host.name} ended with status {status.exit_code}"
            return Outcome("failed", reason, host.name, status.rank)
    for host in hosts:
        silent = [rank for rank in host.ranks if rank not in host.statuses]
        if host.launcher_code is not None and silent:
            reason = f"the launcher on {host.name} {describe_code(host.launcher_code)} before its ranks had begun"
            return Outcome("failed", reason, host.name)
    if all(rank in host.statuses and host.statuses[rank].exit_code == 0 for host in hosts for rank in host.ranks):
        stopped = any(status.phase == "stopped" for _, status in known)
        return Outcome("stopped" if stopped else "finished", "every rank ended with status 0")
    return None


def describe_code(code: int) -> str:
    """Return `was killed by SIGKILL` or `ended with status 1`."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


#: Wait after the first status of a fault: another rank's status may explain it.
_SETTLE_S = 2.0
#: Time limit of an agent's answer about a port or stacks.
_ANSWER_S = 10.0
#: Time limit for killing ranks and the launcher's last report. Lost hosts are not waited for.
_DISBAND_S = 20.0


@dataclass(frozen=True)
class Limits:
    """Times in seconds."""

    start_timeout_s: float
    hang_timeout_s: float
    lost_after_s: float

    @property
    def lease_s(self) -> float:
        """Return the silence after which an agent ends its ranks.

        It ends before the supervisor counts the host as lost and starts other ranks: two sets of ranks must never
        write into one run folder.
        """
        return self.lost_after_s / 2


@dataclass
class AttemptRun:
    """Ranks on connected hosts."""

    pool: HostPool
    layout: Layout
    limits: Limits
    stop_signals: list[str]
    """Names of received signals. Those from `signals_sent` on are still to be passed on."""
    show: Callable[[str], None]
    signals_sent: int = 0
    progress: Progress | None = None
    """Progress of the ranks; None before they are started."""
    _pending: Outcome | None = None
    _pending_since_s: float = 0.0
    _stacks: dict[tuple[str, int], Stacks] = field(default_factory=dict)
    """Stacks by host and rank."""

    def find_rendezvous(self, master_addr: str | None, master_port: int | None) -> tuple[str, int] | None:
        """Return an address and a free port of the first host; None if it does not answer."""
        master = self.pool.nodes[self.layout.hosts[0]]
        master.send(FindPort(master_port))
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and not master.closed:
            for node, message in self.pool.poll():
                if node is master and isinstance(message, Port) and 0 < message.port < 65536:
                    if message.was_taken:
                        self.show(f"port {master_port} is in use on {master.name}; using {message.port} instead")
                    return master_addr or self._address_of(master), message.port
        return None

    def _address_of(self, master: HostConnection) -> str:
        """Return the first host's address as the others see it. Its name may resolve to 127.0.1.1 here."""
        if len(self.layout.hosts) == 1:
            return "127.0.0.1"
        assert master.ready is not None
        if _is_address(master.ready.own_address):
            return str(master.ready.own_address)
        # Not reached through ssh: it is this machine, and the others know where they were reached from.
        for name in self.layout.hosts[1:]:
            ready = self.pool.nodes[name].ready
            if ready is not None and _is_address(ready.client_address):
                return str(ready.client_address)
        try:
            return socket.gethostbyname(master.name)
        except OSError:
            # Only ssh knows this name; the ranks will report that they do not.
            return master.name

    def start(self, rendezvous: tuple[str, int], starter: str, script: str, arguments: list[str], logs: str) -> None:
        """Start the ranks on every host."""
        self.pool.broadcast(
            {
                name: Start(
                    starter=starter,
                    hosts=list(self.layout.hosts),
                    node_rank=number,
                    ranks_per_host=self.layout.ranks_per_host,
                    master_addr=rendezvous[0],
                    master_port=rendezvous[1],
                    script=script,
                    arguments=arguments,
                    log_folder=logs,
                )
                for number, name in enumerate(self.layout.hosts)
            }
        )
        self.progress = Progress(
            began_s=time.monotonic(),
            ranks=range(self.layout.world_size),
            start_timeout_s=self.limits.start_timeout_s,
            hang_timeout_s=self.limits.hang_timeout_s,
        )

    def follow(self) -> Outcome:
        """Wait until the ranks have ended, or must be ended."""
        while True:
            self._poll()
            self._pass_on_signals()
            outcome = self._find_outcome()
            if outcome is not None:
                return outcome

    def _poll(self) -> None:
        for node, message in self.pool.poll():
            if isinstance(message, Stacks):
                self._stacks[node.name, message.rank] = message
            elif isinstance(message, Signalled):
                self.show(f"{node.name}: its agent received {message.name}; its ranks save and stop")
        self._note_progress()

    def _note_progress(self) -> None:
        for node in self.pool.nodes.values():
            if self.progress:
                self.progress.note(node.statuses.values(), time.monotonic())

    def _pass_on_signals(self) -> None:
        for name in self.stop_signals[self.signals_sent :]:
            self.show(f"{name}: asking the ranks to save and stop")
            # SIGUSR1 for every signal: a second SIGINT would end them at once.
            self.pool.broadcast(Signal("SIGUSR1"))
        self.signals_sent = len(self.stop_signals)

    def _find_outcome(self) -> Outcome | None:
        now = time.monotonic()
        outcome = classify([self._status(node) for node in self.pool.nodes.values()])
        if outcome is None:
            hanging = self.progress.hanging(now) if self.progress else []
            return self._explain_hang(hanging) if hanging and self._pending is None else None
        if outcome.end in ("finished", "stopped", "host lost"):
            return outcome
        if self._pending is None:
            self._pending_since_s = now
        self._pending = outcome
        return outcome if now - self._pending_since_s > _SETTLE_S else None

    def _status(self, node: HostConnection) -> HostStatus:
        lost = None
        if node.stopped is not None:
            lost = node.refusal or node.stopped.reason
        elif node.closed or node.silence_s > self.limits.lost_after_s:
            lost = node.why_lost()
        ranks = self.layout.ranks_of(node.name)
        victims = frozenset(rank for rank in ranks if self._blames_a_peer(node.name, rank))
        return HostStatus(node.name, ranks, node.statuses, node.launcher_code, lost, victims)

    def _blames_a_peer(self, name: str, rank: int) -> bool:
        lines = self.pool.last_lines.get((name, rank), ())
        return any(part in line.lower() for line in lines for part in PEER_GONE)

    def _explain_hang(self, hanging: list[int]) -> Outcome:
        """Collect the stacks of every rank before the ranks are ended."""
        self.show(f"no heartbeat of rank {', '.join(map(str, hanging))} in time; asking every rank for its stacks")
        self.pool.broadcast(DumpStacks())
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and len(self._stacks) < self.layout.world_size:
            self._poll()
        stopped = [key for key, stacks in self._stacks.items() if stacks.state == "T"]
        step = self.progress.last_step if self.progress else None
        reason = f"no progress after {'the start' if step is None else f'step {step}'}"
        if stopped:
            name, rank = stopped[0]
            return Outcome("hung", f"{reason}: rank {rank} on {name} is stopped (state T)", name, rank)
        return Outcome("hung", f"{reason}; the stacks of all ranks show where they wait")

    def save_stacks(self, folder: Path) -> Path | None:
        """Write the collected stacks to a file; None without stacks, or if the file cannot be written."""
        if not self._stacks:
            return None
        texts = [
            f"==== rank {stacks.rank} on {name}, state {stacks.state}\n{stacks.text or '(no answer)'}\n"
            for (name, _), stacks in sorted(self._stacks.items(), key=lambda item: item[0][1])
        ]
        path = folder / "stacks.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(path, "\n".join(texts))
        except OSError:
            return None
        return path

    def end(self) -> None:
        """End all processes of the attempt, confirmed by every host or by the end of its lease."""
        lost = self.pool.disband(_DISBAND_S, self.limits.lost_after_s)
        self._note_progress()
        for node in lost:
            # A disconnected agent has ended its ranks two seconds after the lease at the latest.
            time.sleep(max(0.0, self.limits.lease_s + 2.0 - node.silence_s))
        self.pool.close()


def _is_address(text: str | None) -> bool:
    """Return whether a host's report is an address: it reaches the command lines of all other hosts."""
    try:
        return text is not None and bool(ipaddress.ip_address(text))
    except ValueError:
        return False
