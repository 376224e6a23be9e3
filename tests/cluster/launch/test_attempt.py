"""Which end explains the others, and where the ranks meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmscale.cluster.launch.attempt import AttemptRun, HostConnection, Outcome, RankState, classify
from llmscale.training.watchdog import HUNG_STATUS


def ended(rank: int, code: int, lost_peer: bool = False, step: int | None = 7) -> RankState:
    return RankState(rank, f"n{rank}", 100 + rank, "training", step, lost_peer, code)


@pytest.mark.parametrize(
    ("failed", "end", "rank", "reason"),
    [
        ([ended(0, 1), ended(1, 1)], "failed", 0, "rank 0 on n0 ended with status 1"),
        ([ended(0, 1, lost_peer=True), ended(1, 1)], "failed", 1, "rank 1 on n1 ended with status 1"),
        ([ended(0, 1, lost_peer=True)], "failed", 0, "rank 0 on n0 ended with status 1"),
        ([ended(0, 1), ended(1, -9)], "failed", 1, "rank 1 on n1 was killed by SIGKILL"),
        ([ended(0, -99)], "failed", 0, "rank 0 on n0 was killed by signal 99"),
        ([ended(0, -9), ended(1, 2)], "user error", 1, "rank 1 on n1 refused"),
        ([ended(0, 1, lost_peer=True), ended(1, 1), ended(2, HUNG_STATUS)], "hung", None, "no progress after step 7; "),
        ([ended(0, HUNG_STATUS, step=None)], "hung", None, "no progress after the start; "),
    ],
)
def test_the_cause_is_told_from_its_consequences(
    failed: list[RankState], end: str, rank: int | None, reason: str
) -> None:
    outcome = classify(failed, failed)
    assert (outcome.end, outcome.rank) == (end, rank)
    assert outcome.reason.startswith(reason)


def test_a_stopped_rank_explains_a_hang() -> None:
    stopped = RankState(1, "n1", 101, "training", 7, is_stopped=True)
    outcome = classify([ended(0, HUNG_STATUS)], [ended(0, HUNG_STATUS), stopped])
    assert outcome == Outcome("hung", "no progress after step 7: rank 1 on n1 is stopped (state T)", "n1", 1)


class Reached:
    """A host that has answered, and then said nothing more."""

    closed, silence_s = False, 1e6

    def why_lost(self) -> str:
        return "gone"

    def __init__(self, name: str, own: str | None, client: str | None) -> None:
        self.name, self.slots = name, 1
        self.ready = {"port": 7, "own_address": own, "client_address": client}


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(("code", "end"), [(None, "host lost"), (0, None), (1, None)])
def test_a_host_is_lost_only_while_its_ranks_should_run(closed: bool, code: int | None, end: str | None) -> None:
    run: Any = AttemptRun(30.0, 60.0, 60.0, print)
    run.hosts = {"a": Reached("a", None, None), "b": Reached("b", None, None)}
    run.hosts["a"].silence_s, run.hosts["b"].closed = 0.0, closed
    run.states = {0: RankState(0, "a"), 1: RankState(1, "b", code=code)}
    outcome = run._find_outcome()
    assert (outcome.end if outcome else None) == end


@pytest.mark.parametrize(
    ("own", "client", "expected"),
    [("10.0.0.1", "10.0.0.9", "10.0.0.1"), (None, "10.0.0.9", "10.0.0.9"), (None, None, "a")],
)
def test_the_ranks_meet_where_the_others_see_the_first_host(own: str | None, client: str | None, expected: str) -> None:
    run: Any = AttemptRun(30.0, 60.0, 60.0, print)
    run.hosts = {"a": Reached("a", own, None), "b": Reached("b", None, client)}
    assert run.find_rendezvous(None, None) == (expected, 7)
    assert run.find_rendezvous("10.1.1.1", 99) == ("10.1.1.1", 99)
    del run.hosts["b"]
    assert run.find_rendezvous(None, None) == ("127.0.0.1", 7)


def test_lines_that_are_no_messages_are_shown_and_explain_the_end(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text(
        'Welcome!\n@llmscale {"port": 7}\n\n\x1b[31mssh: no route to host\n@llmscale {"cut o'
    )
    lines: list[str] = []
    host = HostConnection("a", 1, ["sh", "-c", f"cat '{tmp_path}/lines'; exit 255"])
    messages = []
    while not host.closed:
        messages += host.read(lines.append)
    assert messages == [{"port": 7}]
    assert lines == ["a! Welcome!", "a! \x1b[31mssh: no route to host"]
    assert host.why_lost() == "\x1b[31mssh: no route to host"
    assert not host.close(), "the ranks there may still run"
