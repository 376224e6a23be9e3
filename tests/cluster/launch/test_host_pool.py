"""What a host that lies can do to its supervisor: nothing beyond its own ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch import attempt as attempt_run
from llmscale.cluster.launch.attempt import AttemptRun, Limits
from llmscale.cluster.launch.host_pool import HostPool
from llmscale.cluster.launch.layout import Layout
from llmscale.cluster.launch.messages import MARK, Beat, Hello, Output, RankSigns, Ready, Stacks, Start
from llmscale.cluster.launch.reach import Reach

HELLO = Hello("/", {}, "/run", 30.0)
START = Start("deepspeed", ["a", "b"], 1, 2, "10.0.0.1", 1, "train.py", [], "/logs")
READY = Ready(1, None, None, [])


class HostPools:
    """Of hosts that say given lines, and then nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.made: list[HostPool] = []
        self.shown: list[str] = []

    def make(self, **says: str) -> HostPool:
        for name, text in says.items():
            (self._folder / name).write_text(text)
        code = (
            "import shutil, sys; shutil.copyfileobj(open(sys.argv[1], 'rb'), sys.stdout.buffer); sys.stdout.flush(); "
        )
        code += "sys.stdin.buffer.read()"
        hosts = [Host(name, 2) for name in says]
        pool = HostPool(
            hosts,
            lambda host, _: Reach([sys.executable, "-c", code, str(self._folder / host.name)]),
            HELLO,
            self.shown.append,
        )
        self.made.append(pool)
        return pool


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[HostPools]:
    pools = HostPools(tmp_path)
    yield pools
    for pool in pools.made:
        pool.close()


def lines(*messages: object) -> str:
    return "".join(f"{message if isinstance(message, str) else message.encode()}\n" for message in messages)  # type: ignore[attr-defined]


def sign(rank: int) -> RankSigns:
    return RankSigns(rank, 1, 9, "training", 1, 999, None, True, "S")


def pump(pool: HostPool, times: int = 20) -> list[object]:
    return [message for _ in range(times) for _, message in pool.pump()]


def test_a_host_speaks_for_its_own_ranks_only(pools: HostPools) -> None:
    says = lines(
        READY,
        Beat([sign(rank) for rank in (0, 1, 2, 3, 4, -1)], None),
        *(Output(rank, f"of {rank}") for rank in (0, 1, 2, 3, 7, None)),
        *(Stacks(rank, "R", "text") for rank in (0, 1, 2, 3, 10**9)),
    )
    pool = pools.make(b=says)
    (node,) = pool.nodes.values()
    node.send(START)
    messages = pump(pool)
    assert sorted(node.signs) == [2, 3]
    assert [message.rank for message in messages if isinstance(message, Stacks)] == [2, 3]
    assert [line for line in pools.shown if "of " in line] == [
        "b rank 2: of 2",
        "b rank 3: of 3",
        "b launcher: of None",
    ]
    assert set(pool.last_lines) == {("b", 2), ("b", 3), ("b", None)}


def test_nonsense_and_lines_without_an_end_are_that_hosts_own_fault(pools: HostPools) -> None:
    pool = pools.make(
        good=lines(READY),
        deep=lines(MARK + "[" * 500_000, MARK + '{"kind": "Beat", "ranks": 7}', READY),
        endless=MARK + "x" * (20 << 20),
    )
    pool.gather(30.0, lambda: False)
    assert sorted(pool.nodes) == ["deep", "good"]
    assert pool.left_out == {"endless": "it sent more than a message can hold"}


def test_what_is_kept_of_a_host_that_talks_much_is_bounded(pools: HostPools) -> None:
    pool = pools.make(b=lines(READY, *(Output(None, "x" * (1 << 20)) for _ in range(40))))
    pump(pool, 40)
    kept = pool.last_lines["b", None]
    assert sum(map(len, kept)) <= 30 * 2000


@pytest.mark.parametrize("address", ["10.0.0.1 --evil", "$(id)", "a" * 300, "", "evil.example"])
def test_only_an_address_becomes_the_meeting_point(
    pools: HostPools, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools.make(a=lines(Ready(1, None, address, [])), b=lines(Ready(1, address, None, [])))
    pool.gather(30.0, lambda: False)
    monkeypatch.setattr(attempt_run.socket, "gethostbyname", lambda name: f"address of {name}")
    run = AttemptRun(pool, Layout(("a", "b"), 2), Limits(60.0, 60.0, 30.0), [], pools.shown.append)
    assert run._address_of(pool.nodes["a"]) == "address of a"


def test_a_host_that_cannot_be_called_is_left_out() -> None:
    def reach(host: Host, _: object) -> Reach:
        raise OSError(f"no address of {host.name} is known here")

    pool = HostPool([Host("a", 1)], reach, HELLO, print)
    pool.gather(5.0, lambda: False)
    assert pool.left_out == {"a": "it cannot be reached from here: no address of a is known here"}
