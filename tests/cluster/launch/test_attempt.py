"""How an attempt is laid out over hosts, followed, and classified."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch.attempt import HostStatus, Layout, Progress, choose_layout, classify, describe_code
from llmscale.cluster.launch.protocol import RankStatus


def status(rank: int, exit_code: int | None = None, alive: bool = True, phase: str = "training") -> RankStatus:
    return RankStatus(rank, 100 + rank, 5, phase, 1, 7, exit_code, alive, "S" if alive else "Z")


def host(
    name: str, *statuses: RankStatus, size: int = 2, code: int | None = None, lost: str | None = None
) -> HostStatus:
    first = int(name[1:]) * size
    return HostStatus(name, range(first, first + size), {s.rank: s for s in statuses}, code, lost)


def test_no_verdict_while_all_run_or_start() -> None:
    assert classify([host("n0", status(0), status(1)), host("n1")]) is None
    assert classify([host("n0", status(0, 0, False, "finished"), status(1))]) is None


def test_finished_when_every_rank_said_so_whatever_the_launcher_says() -> None:
    done = [status(rank, 0, False, "finished") for rank in range(4)]
    outcome = classify([host("n0", *done[:2], code=1), host("n1", *done[2:], code=0)])
    assert outcome is not None
    assert outcome.end == "finished"


def test_stopped_when_one_rank_was_asked_to() -> None:
    outcome = classify([host("n0", status(0, 0, False, "stopped"), status(1, 0, False, "stopped"))])
    assert outcome is not None
    assert outcome.end == "stopped"


def test_a_lost_host_explains_the_errors_of_the_others() -> None:
    outcome = classify([host("n0", status(0, 1, False), status(1, 1, False)), host("n1", status(2), lost="silent")])
    assert outcome is not None
    assert (outcome.end, outcome.host, outcome.reason) == ("host lost", "n1", "n1: silent")


def test_a_killed_rank_explains_the_errors_of_its_peers() -> None:
    outcome = classify(
        [host("n0", status(0, 1, False), status(1)), host("n1", status(2), status(3, alive=False), code=-9)]
    )
    assert outcome is not None
    assert (outcome.end, outcome.host, outcome.rank) == ("failed", "n1", 3)
    assert outcome.reason == "rank 3 on n1 (process 103) was killed by SIGKILL"


def test_what_the_user_must_mend_comes_before_a_death() -> None:
    outcome = classify(
        [host("n0", status(0, alive=False), status(1)), host("n1", status(2, 2, False), status(3, 2, False))]
    )
    assert outcome is not None
    assert (outcome.end, outcome.rank) == ("user error", 2)


def test_an_error_is_named_with_its_rank() -> None:
    outcome = classify([host("n0", status(0), status(1, 1, False))])
    assert outcome is not None
    assert outcome.reason == "rank 1 on n0 ended with status 1"


def test_the_one_whose_peer_has_gone_is_not_to_blame() -> None:
    first = HostStatus("n0", [0], {0: status(0, 1, False)}, None, None, victims=frozenset([0]))
    second = HostStatus("n1", [1], {1: status(1, 1, False)}, None, None)
    outcome = classify([first, second])
    assert outcome is not None
    assert (outcome.host, outcome.rank) == ("n1", 1)
    only_victims = classify([first])
    assert only_victims is not None
    assert only_victims.rank == 0


def test_a_launcher_that_ends_before_its_ranks_begin() -> None:
    outcome = classify([host("n0", code=1), host("n1")])
    assert outcome is not None
    assert outcome.reason == "the launcher on n0 ended with status 1 before its ranks had begun"


def test_codes_in_words() -> None:
    assert describe_code(3) == "ended with status 3"
    assert describe_code(-15) == "was killed by SIGTERM"
    assert describe_code(-99) == "was killed by signal 99"


def heartbeat(
    rank: int, count: int, step: int | None, phase: str = "training", exit_code: int | None = None
) -> RankStatus:
    return RankStatus(rank, 1, count, phase, None if step is None else 11, step, exit_code, True, "S")


def progress() -> Progress:
    return Progress(began_s=100.0, ranks=range(2), start_timeout_s=50.0, hang_timeout_s=10.0)


def test_a_rank_that_stands_still_hangs_and_its_peers_with_it() -> None:
    p = progress()
    p.note([heartbeat(0, 5, 11), heartbeat(1, 5, 11)], 120.0)
    p.note([heartbeat(0, 6, 12), heartbeat(1, 5, 11)], 125.0)
    assert p.hanging(129.0) == []
    assert p.hanging(131.0) == [1]
    assert p.hanging(136.0) == [0, 1]
    p.note([heartbeat(0, 7, 13), heartbeat(1, 6, 12)], 137.0)
    assert p.hanging(138.0) == []


def test_a_start_is_bounded_from_its_beginning_or_its_last_sign() -> None:
    p = progress()
    p.note([heartbeat(0, 1, None, "starting")], 101.0)
    p.note([heartbeat(0, 1, None, "starting")], 149.0)
    assert p.hanging(150.0) == []
    assert p.hanging(152.0) == [0, 1]
    p.note([heartbeat(0, 2, None, "starting")], 153.0)
    assert p.hanging(202.0) == [1]
    assert p.hanging(204.0) == [0, 1]


def test_a_rank_that_has_ended_does_not_hang() -> None:
    p = progress()
    p.note([heartbeat(0, 5, 11, "finished", 0), heartbeat(1, 5, 11)], 120.0)
    assert p.hanging(1000.0) == [1]


def test_the_range_of_steps_and_when_they_began() -> None:
    p = progress()
    p.note([heartbeat(0, 1, None, "starting"), heartbeat(1, 1, None, "starting")], 110.0)
    assert (p.first_step, p.last_step, p.training_since_s) == (None, None, None)
    p.note([heartbeat(0, 5, 15), heartbeat(1, 4, 14)], 120.0)
    p.note([heartbeat(0, 9, 19, "finished", 0)], 130.0)
    assert (p.first_step, p.last_step, p.training_since_s) == (11, 19, 120.0)


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
