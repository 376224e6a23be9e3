"""How each host is found and reached, and a lying host: it can change nothing beyond its own ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmscale.cluster import remote
from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch import attempt as attempt_run
from llmscale.cluster.launch import transport
from llmscale.cluster.launch.attempt import AttemptRun, Layout, Limits
from llmscale.cluster.launch.protocol import MARK, Hello, Output, RankStatus, Ready, Stacks, Start, StatusReport
from llmscale.cluster.launch.transport import HostPool, agent_command_by, slurm_hosts
from llmscale.cluster.remote import PACKAGE
from llmscale.errors import ConfigError

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
            hosts, lambda host: [sys.executable, "-c", code, str(self._folder / host.name)], HELLO, self.shown.append
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


def status(rank: int) -> RankStatus:
    return RankStatus(rank, 1, 9, "training", 1, 999, None, True, "S")


def pump(pool: HostPool, times: int = 20) -> list[object]:
    return [message for _ in range(times) for _, message in pool.poll()]


def test_a_host_speaks_for_its_own_ranks_only(pools: HostPools) -> None:
    says = lines(
        READY,
        StatusReport([status(rank) for rank in (0, 1, 2, 3, 4, -1)], None),
        *(Output(rank, f"of {rank}") for rank in (0, 1, 2, 3, 7, None)),
        *(Stacks(rank, "R", "text") for rank in (0, 1, 2, 3, 10**9)),
    )
    pool = pools.make(b=says)
    (node,) = pool.nodes.values()
    node.send(START)
    messages = pump(pool)
    assert sorted(node.statuses) == [2, 3]
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
        deep=lines(MARK + "[" * 500_000, MARK + '{"kind": "StatusReport", "ranks": 7}', READY),
        endless=MARK + "x" * (20 << 20),
    )
    pool.gather(30.0, lambda: False)
    assert sorted(pool.nodes) == ["deep", "good"]
    assert pool.left_out == {"endless": "it sent a message that is too long"}


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


def test_a_host_whose_agent_cannot_be_started_is_left_out() -> None:
    pool = HostPool([Host("a", 1)], lambda host: ["/nowhere/ssh"], HELLO, print)
    pool.gather(5.0, lambda: False)
    assert list(pool.left_out) == ["a"]
    assert "cannot be started from here" in pool.left_out["a"]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback addresses stand for other hosts."""
    for module in (transport, remote):
        monkeypatch.setattr(module, "is_this_machine", lambda host: host == "localhost")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("launcher", "first"), [("ssh", "ssh"), ("slurm", "srun")])
def test_ways_to_a_host(launcher: str, first: str) -> None:
    argv = agent_command_by(launcher)(Host("127.0.0.1", 1))
    assert argv[0] == first
    assert any("llmscale.cluster.launch.agent" in word for word in argv)


@pytest.mark.usefixtures("elsewhere")
def test_no_command_line_has_a_secret() -> None:
    """The host is all that differs from one command to the next: no word is known to one agent alone."""
    first, second = (agent_command_by("ssh")(Host(f"127.0.0.{number}", 1)) for number in (3, 4))
    assert [word.replace("127.0.0.4", "127.0.0.3") for word in second] == first
    assert not re.findall(r"[0-9a-zA-Z_-]{30,}", " ".join(first).replace(str(PACKAGE.parent), ""))


def test_the_agent_answers_without_torch() -> None:
    code = "import llmscale.cluster.launch.agent, llmscale.cli.launch, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])


def fake_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    tool = tmp_path / "scontrol"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("variables", "slots"),
    [
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2"}, 2),
        ({}, 1),
    ],
)
def test_hosts_of_a_slurm_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], slots: int
) -> None:
    fake_scontrol(tmp_path, monkeypatch, '[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"')
    assert slurm_hosts({"SLURM_JOB_NODELIST": "n[1-2]", **variables}) == (Host("n1", slots), Host("n2", slots))
    assert slurm_hosts({"SLURM_JOB_NODELIST": "n[1-2]"}, slots=3)[0].slots == 3


def test_outside_of_a_slurm_job_there_are_no_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST is not set"):
        slurm_hosts({})
    fake_scontrol(tmp_path, monkeypatch, "echo down >&2; exit 1")
    with pytest.raises(ConfigError, match="down"):
        slurm_hosts({"SLURM_JOB_NODELIST": "n1"})
