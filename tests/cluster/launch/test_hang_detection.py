from __future__ import annotations

from llmscale.cluster.launch.hang_detection import Progress
from llmscale.cluster.launch.messages import RankSigns


def sign(rank: int, count: int, step: int | None, phase: str = "training", exit_code: int | None = None) -> RankSigns:
    return RankSigns(rank, 1, count, phase, None if step is None else 11, step, exit_code, True, "S")


def progress() -> Progress:
    return Progress(began_s=100.0, ranks=range(2), start_timeout_s=50.0, hang_timeout_s=10.0)


def test_a_rank_that_stands_still_hangs_and_its_peers_with_it() -> None:
    p = progress()
    p.note([sign(0, 5, 11), sign(1, 5, 11)], 120.0)
    p.note([sign(0, 6, 12), sign(1, 5, 11)], 125.0)
    assert p.hanging(129.0) == []
    assert p.hanging(131.0) == [1]
    assert p.hanging(136.0) == [0, 1]
    p.note([sign(0, 7, 13), sign(1, 6, 12)], 137.0)
    assert p.hanging(138.0) == []


def test_a_start_is_bounded_from_its_beginning_or_its_last_sign() -> None:
    p = progress()
    p.note([sign(0, 1, None, "starting")], 101.0)
    p.note([sign(0, 1, None, "starting")], 149.0)
    assert p.hanging(150.0) == []
    assert p.hanging(152.0) == [0, 1]
    p.note([sign(0, 2, None, "starting")], 153.0)
    assert p.hanging(202.0) == [1]
    assert p.hanging(204.0) == [0, 1]


def test_a_rank_that_has_ended_does_not_hang() -> None:
    p = progress()
    p.note([sign(0, 5, 11, "finished", 0), sign(1, 5, 11)], 120.0)
    assert p.hanging(1000.0) == [1]


def test_the_range_of_steps_and_when_they_began() -> None:
    p = progress()
    p.note([sign(0, 1, None, "starting"), sign(1, 1, None, "starting")], 110.0)
    assert (p.first_step, p.last_step, p.training_since_s) == (None, None, None)
    p.note([sign(0, 5, 15), sign(1, 4, 14)], 120.0)
    p.note([sign(0, 9, 19, "finished", 0)], 130.0)
    assert (p.first_step, p.last_step, p.training_since_s) == (11, 19, 120.0)
