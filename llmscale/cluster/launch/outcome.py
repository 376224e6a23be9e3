"""From what the hosts of an attempt say to how it stands: running, done, or broken, and by whom. Pure functions."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmscale.cluster.launch.messages import RankSigns

#: train.py's status for what the user must mend: trying again would end the same way.
USER_ERROR_STATUS = 2


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, or is about to."""

    end: str
    """One of `attempt_log.Attempt.end`."""
    reason: str
    host: str | None = None
    """To blame, when it is one."""
    rank: int | None = None
    """To blame, when it is one."""


@dataclass(frozen=True)
class HostStatus:
    """What is known of one host."""

    name: str
    ranks: Sequence[int]
    """That should run there."""
    signs: Mapping[int, RankSigns]
    launcher_code: int | None
    lost: str | None
    """Why it is lost; None while it answers."""
    victims: frozenset[int] = frozenset()
    """Ranks whose last words are that a peer has gone."""


def judge(hosts: Sequence[HostStatus]) -> Outcome | None:
    """None while everything runs. Of several faults the one that explains the others: a lost host breaks the ranks of
    all others, a killed rank the connections of its peers, and a rank that says why before it ends knows best."""
    for host in hosts:
        if host.lost is not None:
            return Outcome("host lost", f"{host.name}: {host.lost}", host=host.name)
    told = [(host, sign) for host in hosts for sign in host.signs.values()]
    for host, sign in told:
        if sign.exit_code == USER_ERROR_STATUS:
            return Outcome("user error", f"rank {sign.rank} on {host.name} refused", host.name, sign.rank)
    for host, sign in told:
        if sign.exit_code is None and not sign.alive:
            return Outcome("failed", _describe_death(host, sign), host.name, sign.rank)
    # A rank whose connection broke ends at the same time as the one that broke it.
    for host, sign in sorted(told, key=lambda item: item[1].rank in item[0].victims):
        if sign.exit_code:
            reason = f"rank {sign.rank} on {host.name} ended with status {sign.exit_code}"
            return Outcome("failed", reason, host.name, sign.rank)
    for host in hosts:
        silent = [rank for rank in host.ranks if rank not in host.signs]
        if host.launcher_code is not None and silent:
            reason = f"the launcher on {host.name} {describe_code(host.launcher_code)} before its ranks had begun"
            return Outcome("failed", reason, host.name)
    if all(rank in host.signs and host.signs[rank].exit_code == 0 for host in hosts for rank in host.ranks):
        stopped = any(sign.phase == "stopped" for _, sign in told)
        return Outcome("stopped" if stopped else "finished", "every rank ended with status 0")
    return None


def describe_code(code: int) -> str:
    """`was killed by SIGKILL` or `ended with status 1`."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _describe_death(host: HostStatus, sign: RankSigns) -> str:
    """A rank that is gone without its last sign: only the launcher, its parent, can know more."""
    what = "vanished" if host.launcher_code in (None, 0) else describe_code(host.launcher_code or 0)
    return f"rank {sign.rank} on {host.name} (process {sign.pid}) {what}"
