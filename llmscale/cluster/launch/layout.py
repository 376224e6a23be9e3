"""How many ranks on which hosts: the most that the global batch can be divided over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmscale.cluster.hostfile import Host
from llmscale.config.human_numbers import with_singulars


@dataclass(frozen=True)
class Layout:
    """The same number of ranks on every host: DeepSpeed's launcher numbers local ranks wrongly otherwise (by the global
    rank modulo the host's own number of slots)."""

    hosts: tuple[str, ...]
    """In rank order; the first is where the ranks meet."""
    ranks_per_host: int

    @property
    def world_size(self) -> int:
        return len(self.hosts) * self.ranks_per_host

    def describe(self) -> str:
        """Return the layout in words."""
        where = f"{self.ranks_per_host} on each of {', '.join(self.hosts)}"
        return with_singulars(f"{self.world_size} ranks, {where}")


def choose_layout(hosts: Sequence[Host], is_legal: Callable[[int], bool], min_hosts: int = 1) -> Layout | None:
    """The largest world size that `is_legal` allows on these hosts; of two ways to it, the one on fewer hosts. None
    when there is none on at least `min_hosts`."""
    ways = {
        (count, slots)
        for slots in range(1, max((host.slots for host in hosts), default=0) + 1)
        for count in range(min_hosts, len(_with_slots(hosts, slots)) + 1)
    }
    verdicts: dict[int, bool] = {}
    for count, slots in sorted(ways, key=lambda way: (-way[0] * way[1], way[0])):
        world_size = count * slots
        if world_size not in verdicts:
            verdicts[world_size] = is_legal(world_size)
        if verdicts[world_size]:
            return Layout(tuple(host.name for host in _with_slots(hosts, slots)[:count]), slots)
    return None


def _with_slots(hosts: Sequence[Host], slots: int) -> list[Host]:
    return [host for host in hosts if host.slots >= slots]
