"""How each host is found and reached, and what the launcher makes of its lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmscale.cluster import remote
from llmscale.cluster.hostfile import Host
from llmscale.cluster.launch import transport
from llmscale.cluster.launch.transport import HostConnection, host_command_by, slurm_hosts
from llmscale.cluster.remote import PACKAGE
from llmscale.errors import ConfigError


def test_lines_that_are_no_messages_are_shown_and_explain_the_end(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text(
        'Welcome!\n@llmscale {"port": 7}\n\n\x1b[31mssh: no route to host\n@llmscale {"cut o'
    )
    lines: list[str] = []
    host = HostConnection(Host("a", 1), ["sh", "-c", f"cat '{tmp_path}/lines'; exit 255"])
    messages = []
    while not host.closed:
        messages += host.read(lines.append)
    assert messages == [{"port": 7}]
    assert lines == ["a! Welcome!", "a! \x1b[31mssh: no route to host"]
    assert host.why_lost() == "\x1b[31mssh: no route to host"
    assert not host.close(), "the ranks there may still run"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback addresses stand for other hosts."""
    for module in (transport, remote):
        monkeypatch.setattr(module, "is_this_machine", lambda host: host == "localhost")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("launcher", "first"), [("ssh", "ssh"), ("slurm", "srun")])
def test_a_host_is_reached_by_a_command_without_a_secret(launcher: str, first: str) -> None:
    """The host is all that differs from one command to the next: no word is known to one host alone."""
    one, other = (host_command_by(launcher)(Host(f"127.0.0.{number}", 1)) for number in (3, 4))
    assert one[0] == first
    assert any("llmscale.cluster.launch.host" in word for word in one)
    assert [word.replace("127.0.0.4", "127.0.0.3") for word in other] == one
    assert not re.findall(r"[0-9a-zA-Z_-]{30,}", " ".join(one).replace(str(PACKAGE.parent), ""))


def test_a_host_answers_without_torch() -> None:
    code = "import llmscale.cluster.launch.host, llmscale.cli.launch, sys; assert 'torch' not in sys.modules"
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
