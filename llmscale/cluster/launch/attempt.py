"""One attempt: gather the hosts, start the ranks, follow them to an end, and leave nothing running."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from llmscale.cluster.launch.hang_detection import Progress
from llmscale.cluster.launch.host_connection import HostConnection
from llmscale.cluster.launch.host_pool import HostPool
from llmscale.cluster.launch.layout import Layout
from llmscale.cluster.launch.messages import DumpStacks, FindPort, Port, Signal, Signalled, Stacks, Start
from llmscale.cluster.launch.outcome import HostStatus, Outcome, judge
from llmscale.files.whole import write_durably

#: After the first sign of a fault, how long the others may take to say theirs: one of them may explain it.
_SETTLE_S = 2.0
#: An agent answers at once when it is asked for a port or stacks.
_ANSWER_S = 10.0
#: In the last words of a rank: gloo's, the kernel's and NCCL's for a peer that has gone.
_PEER_GONE = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
)
#: Killing ranks and hearing the launcher's last word; hosts that are lost are not waited for.
_DISBAND_S = 20.0


@dataclass(frozen=True)
class Limits:
    """Times in seconds."""

    start_timeout_s: float
    hang_timeout_s: float
    lost_after_s: float

    @property
    def lease_s(self) -> float:
        """An agent that is cut off ends its ranks before the supervisor counts its host as lost and starts others: two
        sets of ranks must never write into one run folder."""
        return self.lost_after_s / 2


@dataclass
class AttemptRun:
    """Ranks on gathered hosts."""

    pool: HostPool
    layout: Layout
    limits: Limits
    stop_signals: list[str]
    """Names of signals that came; those from `signals_sent` on are still to be passed on."""
    show: Callable[[str], None]
    signals_sent: int = 0
    progress: Progress | None = None
    """Of the ranks; None before they are started."""
    _pending: Outcome | None = None
    _pending_since_s: float = 0.0
    _stacks: dict[tuple[str, int], Stacks] = field(default_factory=dict)
    """By host and rank."""

    def find_rendezvous(self, master_addr: str | None, master_port: int | None) -> tuple[str, int] | None:
        """Address and free port of the first host; None when it does not answer."""
        master = self.pool.nodes[self.layout.hosts[0]]
        master.send(FindPort(master_port))
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and not master.closed:
            for node, message in self.pool.pump():
                if node is master and isinstance(message, Port) and 0 < message.port < 65536:
                    if message.was_taken:
                        self.show(f"port {master_port} is taken on {master.name}; using {message.port}")
                    return master_addr or self._address_of(master), message.port
        return None

    def _address_of(self, master: HostConnection) -> str:
        """The first host as the others see it: never what its name stands for here, which may be 127.0.1.1."""
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
            # ssh knows it under this name; the ranks will say that they do not.
            return master.name

    def start(self, rendezvous: tuple[str, int], starter: str, script: str, arguments: list[str], logs: str) -> None:
        """Start the ranks on every host."""
        self.pool.tell(
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
        """Until the ranks have ended, or must be."""
        while True:
            self._listen()
            self._pass_on_signals()
            outcome = self._judge()
            if outcome is not None:
                return outcome

    def _listen(self) -> None:
        for node, message in self.pool.pump():
            if isinstance(message, Stacks):
                self._stacks[node.name, message.rank] = message
            elif isinstance(message, Signalled):
                self.show(f"{node.name}: its agent got {message.name}; its ranks save and stop")
        self._note_progress()

    def _note_progress(self) -> None:
        for node in self.pool.nodes.values():
            if self.progress:
                self.progress.note(node.signs.values(), time.monotonic())

    def _pass_on_signals(self) -> None:
        for name in self.stop_signals[self.signals_sent :]:
            self.show(f"{name}: asking the ranks to save and stop")
            # SIGUSR1 whatever came: a second SIGINT would end them at once.
            self.pool.tell(Signal("SIGUSR1"))
        self.signals_sent = len(self.stop_signals)

    def _judge(self) -> Outcome | None:
        now = time.monotonic()
        outcome = judge([self._status(node) for node in self.pool.nodes.values()])
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
        number = self.layout.hosts.index(node.name)
        size = self.layout.ranks_per_host
        lost = None
        if node.stopped is not None:
            lost = node.refusal or node.stopped.reason
        elif node.closed or node.silence_s > self.limits.lost_after_s:
            lost = node.why_lost()
        ranks = range(number * size, (number + 1) * size)
        victims = frozenset(rank for rank in ranks if self._blames_a_peer(node.name, rank))
        return HostStatus(node.name, ranks, node.signs, node.launcher_code, lost, victims)

    def _blames_a_peer(self, name: str, rank: int) -> bool:
        lines = self.pool.last_lines.get((name, rank), ())
        return any(word in line for line in lines for word in _PEER_GONE)

    def _explain_hang(self, hanging: list[int]) -> Outcome:
        """Ask every rank what it is doing, before they are ended."""
        self.show(f"no heartbeat of rank {', '.join(map(str, hanging))} in time; asking every rank for its stacks")
        self.pool.tell(DumpStacks())
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and len(self._stacks) < self.layout.world_size:
            self._listen()
        stopped = [key for key, stacks in self._stacks.items() if stacks.state == "T"]
        step = self.progress.last_step if self.progress else None
        reason = f"no progress after {'the start' if step is None else f'step {step}'}"
        if stopped:
            name, rank = stopped[0]
            return Outcome("hung", f"{reason}: rank {rank} on {name} is stopped (state T)", name, rank)
        return Outcome("hung", f"{reason}; the stacks of all ranks say where they wait")

    def save_stacks(self, folder: Path) -> Path | None:
        """Write down what the ranks were doing; None when they were not asked."""
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
        """Nothing of the attempt runs any more when this returns: confirmed by every host, or by its lease."""
        lost = self.pool.disband(_DISBAND_S, self.limits.lost_after_s)
        self._note_progress()
        for node in lost:
            # Cut off or dead, its agent has ended its ranks when the lease is over, and has two more seconds for it.
            time.sleep(max(0.0, self.limits.lease_s + 2.0 - node.silence_s))
        self.pool.close()


def _is_address(word: str | None) -> bool:
    """What a host says of itself reaches the command lines of all others."""
    try:
        return word is not None and bool(ipaddress.ip_address(word))
    except ValueError:
        return False
