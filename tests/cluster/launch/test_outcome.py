from __future__ import annotations

from llmscale.cluster.launch.messages import RankSigns
from llmscale.cluster.launch.outcome import HostStatus, describe_code, judge


def sign(rank: int, exit_code: int | None = None, alive: bool = True, phase: str = "training") -> RankSigns:
    return RankSigns(rank, 100 + rank, 5, phase, 1, 7, exit_code, alive, "S" if alive else "Z")


def host(name: str, *signs: RankSigns, size: int = 2, code: int | None = None, lost: str | None = None) -> HostStatus:
    first = int(name[1:]) * size
    return HostStatus(name, range(first, first + size), {s.rank: s for s in signs}, code, lost)


def test_no_verdict_while_all_run_or_start() -> None:
    assert judge([host("n0", sign(0), sign(1)), host("n1")]) is None
    assert judge([host("n0", sign(0, 0, False, "finished"), sign(1))]) is None


def test_finished_when_every_rank_said_so_whatever_the_launcher_says() -> None:
    done = [sign(rank, 0, False, "finished") for rank in range(4)]
    outcome = judge([host("n0", *done[:2], code=1), host("n1", *done[2:], code=0)])
    assert outcome is not None
    assert outcome.end == "finished"


def test_stopped_when_one_rank_was_asked_to() -> None:
    outcome = judge([host("n0", sign(0, 0, False, "stopped"), sign(1, 0, False, "stopped"))])
    assert outcome is not None
    assert outcome.end == "stopped"


def test_a_lost_host_explains_the_errors_of_the_others() -> None:
    outcome = judge([host("n0", sign(0, 1, False), sign(1, 1, False)), host("n1", sign(2), lost="silent")])
    assert outcome is not None
    assert (outcome.end, outcome.host, outcome.reason) == ("host lost", "n1", "n1: silent")


def test_a_killed_rank_explains_the_errors_of_its_peers() -> None:
    outcome = judge([host("n0", sign(0, 1, False), sign(1)), host("n1", sign(2), sign(3, alive=False), code=-9)])
    assert outcome is not None
    assert (outcome.end, outcome.host, outcome.rank) == ("failed", "n1", 3)
    assert outcome.reason == "rank 3 on n1 (process 103) was killed by SIGKILL"


def test_what_the_user_must_mend_comes_before_a_death() -> None:
    outcome = judge([host("n0", sign(0, alive=False), sign(1)), host("n1", sign(2, 2, False), sign(3, 2, False))])
    assert outcome is not None
    assert (outcome.end, outcome.rank) == ("user error", 2)


def test_an_error_is_named_with_its_rank() -> None:
    outcome = judge([host("n0", sign(0), sign(1, 1, False))])
    assert outcome is not None
    assert outcome.reason == "rank 1 on n0 ended with status 1"


def test_the_one_whose_peer_has_gone_is_not_to_blame() -> None:
    first = HostStatus("n0", [0], {0: sign(0, 1, False)}, None, None, victims=frozenset([0]))
    second = HostStatus("n1", [1], {1: sign(1, 1, False)}, None, None)
    outcome = judge([first, second])
    assert outcome is not None
    assert (outcome.host, outcome.rank) == ("n1", 1)
    only_victims = judge([first])
    assert only_victims is not None
    assert only_victims.rank == 0


def test_a_launcher_that_ends_before_its_ranks_begin() -> None:
    outcome = judge([host("n0", code=1), host("n1")])
    assert outcome is not None
    assert outcome.reason == "the launcher on n0 ended with status 1 before its ranks had begun"


def test_codes_in_words() -> None:
    assert describe_code(3) == "ended with status 3"
    assert describe_code(-15) == "was killed by SIGTERM"
    assert describe_code(-99) == "was killed by signal 99"
