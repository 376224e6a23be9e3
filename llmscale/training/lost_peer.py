"""Errors of connections between ranks, explained by the rank that has gone. No torch. Linux' /proc.

A rank that is killed breaks the connections of all others, whose libraries name an address at best. Under any launcher
the ranks of a host are processes of one job, and the launcher's children: who is missing, and how a child ended that
nobody has waited for yet, is in /proc.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

from llmscale.errors import MachineError
from llmscale.training.stop_request import find_ranks, read_stat

#: Parts of messages of gloo, NCCL, torch's store and the kernel about a peer that has gone or does not answer.
PEER_GONE = (
    "connection closed",
    "closed by peer",
    "connection reset",
    "reset by peer",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "recvvalue failed",
    "sendbytes failed",
    "failed to recv",
    "socket timeout",
    "wait timeout",
    "timed out waiting",
    "remote process exited",
    "nccl communicator was aborted",
    "no route to host",
    "its connections broke",
)
#: torch's errors of process groups and stores, by name: this module imports no torch.
_CLASSES = frozenset(("DistError", "DistBackendError", "DistNetworkError", "DistStoreError"))
#: Errors of these classes that say nothing about a peer.
_OWN_FAULTS = ("cuda error", "invalid usage", "invalid argument")
#: Time in which a rank that ends is looked for: its data workers, which look like it, end within a second. All
#: surviving ranks stay that long, so that none of them counts as missing.
_LOOK_S, _LOOK_EVERY_S = 2.0, 0.02
_MAX_REASON = 200


class LostPeer(MachineError):
    """Another rank has ended, or does not answer."""


def explain_lost_peer(error: BaseException) -> LostPeer | None:
    """Return the error for the user if the connection to another rank broke, else None. Takes `_LOOK_S`."""
    reason = next((reason for one in _chain(error) if (reason := _reason_of(one))), None)
    if reason is None or os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        return None
    peers = _Peers()
    words = f"{peers.describe(reason)} ({reason})"
    lost = LostPeer(f"{words}. The same command continues from the last checkpoint.")
    # The first rank of the host reports it, if it is there.
    lost.is_on_every_rank = peers.first in peers.living
    return lost


def signal_name(number: int) -> str:
    """Return `SIGKILL`, or `signal 99` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_death(number: int) -> str:
    """Return `was killed by SIGKILL`, with the likely cause."""
    cause = ", most likely by the kernel for lack of host memory (see dmesg)" if number == signal.SIGKILL else ""
    return f"was killed by {signal_name(number)}{cause}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _reason_of(error: BaseException) -> str | None:
    """Return the text of an error about a peer without its place in torch's source, or None."""
    text = " ".join(str(error).split())
    is_of_ranks = any(kind.__name__ in _CLASSES for kind in type(error).__mro__)
    if is_of_ranks and not any(fault in text.lower() for fault in _OWN_FAULTS):
        pass
    elif not isinstance(error, RuntimeError) or not any(part in text.lower() for part in PEER_GONE):
        return None
    text = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h|hpp):\d+\] ", "", text)
    return re.split(r"\. This is typically|[.,]? ?Exception raised from", text)[0][:_MAX_REASON]


class _Peers:
    """The ranks of this job on this host, while one of them may be ending."""

    def __init__(self) -> None:
        count = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        self.first = int(os.environ["RANK"]) - int(os.environ.get("LOCAL_RANK", "0"))
        self._is_all = count == int(os.environ["WORLD_SIZE"])
        expected = range(self.first, self.first + count)
        killed: dict[int, int] = {}
        deadline = time.monotonic() + _LOOK_S
        self.living = set(find_ranks().values())
        while time.monotonic() < deadline:
            killed |= _killed_children(os.getppid())
            if self.living.issuperset(expected):
                self.living = set(find_ranks().values())
            time.sleep(_LOOK_EVERY_S)
        self._killed = killed
        """Signal by process."""
        self._missing = [rank for rank in expected if rank not in self.living]

    def describe(self, reason: str) -> str:
        """Return which rank has gone, why, and where to look."""
        if len(self._missing) == len(self._killed) == 1:
            ((process, number),) = self._killed.items()
            return f"rank {self._missing[0]} (process {process}) {describe_death(number)}, and its connections broke"
        if self._missing:
            ranks = f"rank{'s' * (len(self._missing) > 1)} {', '.join(map(str, self._missing))}"
            deaths = [f"process {process} {describe_death(number)}" for process, number in self._killed.items()]
            why = "; ".join(deaths) or "its own error, or its launcher's report, says why: exit code -9 is SIGKILL"
            return f"{ranks} on this host ended, and its connections broke; {why}"
        for process, rank in find_ranks().items():
            if (stat := read_stat(process)) and stat.state == "T":
                return f"rank {rank} (process {process}) is stopped: `kill -CONT {process}` continues it"
        if self._is_all:
            return "a rank does not answer, and all of them still run"
        address = re.search(r"\d+\.\d+\.\d+\.\d+", reason)
        where = f" ({address.group()})" if address else ""
        return (
            f"a rank on another host{where} ended or cannot be reached, and its connections broke; that host's output "
            "says why, and `llmscale doctor --hostfile FILE` checks the network"
        )


def _killed_children(parent: int) -> dict[int, int]:
    """Return the signals by which children of a process ended that it has not waited for, by process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := read_stat(int(name))) and stat.parent == parent and stat.state in "ZX":
            number = stat.exit_code & 0x7F
            if number:
                found[int(name)] = number
    return found
