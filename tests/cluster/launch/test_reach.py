"""How the agent is started on a host."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmscale.cluster import remote
from llmscale.cluster.environment import PACKAGE
from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch import reach
from llmscale.cluster.launch.listener import Listener
from llmscale.cluster.launch.reach import choose_reach, pdsh_command


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback addresses stand for other hosts: to these there is always a route."""
    for module in (reach, remote):
        monkeypatch.setattr(module, "is_this_machine", lambda host: host == "localhost")


@pytest.mark.usefixtures("elsewhere")
def test_ways_to_a_host(listener: Listener) -> None:
    for launcher, first in (("ssh", "ssh"), ("pdsh", "env"), ("slurm", "srun")):
        way = choose_reach(launcher)(Host("127.0.0.1", 1), listener)
        assert way.argv[0] == first
        assert way.calls_back == (launcher == "pdsh")
        assert any("llmscale.cluster.launch.agent" in word for word in way.argv)
    assert not choose_reach("pdsh")(Host("localhost", 1), listener).calls_back


@pytest.mark.usefixtures("elsewhere")
def test_no_command_line_has_a_secret(listener: Listener) -> None:
    """What differs from one way to the next is the host: there is no word that only one agent may know."""
    first, second = (choose_reach("pdsh")(Host(f"127.0.0.{number}", 1), listener).argv for number in (3, 4))
    assert [word.replace("127.0.0.4", "127.0.0.3") for word in second] == first
    assert re.findall(r"[0-9a-zA-Z_-]{30,}", " ".join(first).replace(str(PACKAGE.parent), "")) == [listener.fingerprint]


def test_a_host_that_nothing_here_leads_to_cannot_call_back(listener: Listener) -> None:
    with pytest.raises(OSError, match=r"no address of node-9\.invalid"):
        choose_reach("pdsh")(Host("node-9.invalid", 1), listener)


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh")
def test_pdsh_replaces_nothing_in_what_it_runs() -> None:
    written = pdsh_command("localhost", ["%h", "100%"])[-1]
    done = subprocess.run(
        ["pdsh", "-R", "exec", "-N", "-w", "localhost", "echo", written], capture_output=True, text=True
    )
    assert done.stdout == "%h 100%\n"


def test_the_agent_answers_without_torch() -> None:
    code = "import llmscale.cluster.launch.agent, llmscale.cli.launch, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])
