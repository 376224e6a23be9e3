from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch.layout import Layout, choose_layout


def hosts(*slots: int) -> list[Host]:
    return [Host(f"n{index}", count) for index, count in enumerate(slots)]


def divides(batch: int):  # type: ignore[no-untyped-def]
    return lambda world_size: batch % world_size == 0


def test_all_slots_when_they_divide_the_batch() -> None:
    assert choose_layout(hosts(8, 8), divides(64)) == Layout(("n0", "n1"), 8)


def test_the_largest_legal_world_size_otherwise() -> None:
    assert choose_layout(hosts(8, 8, 8), divides(64)) == Layout(("n0", "n1"), 8)
    assert choose_layout(hosts(4, 4), divides(12)) == Layout(("n0", "n1"), 3)
    assert choose_layout(hosts(1, 1, 1), divides(16)) == Layout(("n0", "n1"), 1)
    assert choose_layout(hosts(7), divides(5)) == Layout(("n0",), 5)


def test_hosts_of_several_sizes_run_equally_many_ranks() -> None:
    assert choose_layout(hosts(2, 8, 8), divides(64)) == Layout(("n1", "n2"), 8)
    assert choose_layout(hosts(2, 3, 2), divides(12)) == Layout(("n0", "n1", "n2"), 2)


def test_of_two_ways_the_one_on_fewer_hosts() -> None:
    assert choose_layout(hosts(4, 4, 4, 4), divides(8)) == Layout(("n0", "n1"), 4)


def test_none_when_nothing_is_legal_or_hosts_are_too_few() -> None:
    assert choose_layout(hosts(4), lambda _: False) is None
    assert choose_layout(hosts(4), divides(4), min_hosts=2) is None
    assert choose_layout([], divides(4)) is None


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 64))
def test_no_legal_uniform_layout_is_larger(slots: list[int], batch: int) -> None:
    found = choose_layout(hosts(*slots), divides(batch))
    ways = [
        count * ranks
        for ranks in range(1, 7)
        for count in range(1, sum(s >= ranks for s in slots) + 1)
        if batch % (count * ranks) == 0
    ]
    assert found is not None
    assert found.world_size == max(ways)
    sizes = {host.name: host.slots for host in hosts(*slots)}
    assert all(sizes[name] >= found.ranks_per_host for name in found.hosts)
