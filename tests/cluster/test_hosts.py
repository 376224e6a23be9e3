"""Hosts of a hostfile and of a Slurm job, and the commands that reach them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from llmscale.cluster import hosts, remote
from llmscale.cluster.hosts import Host, host_command_by, parse_hostfile, slurm_hosts
from llmscale.cluster.remote import PACKAGE
from llmscale.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


def test_hosts_come_in_the_files_order(tmp_path: Path) -> None:
    text = "# the cluster\nnode-1 slots=8\n\n  10.0.0.2\tslots=4   # the small one\nn_3.example.org slots=1\n"
    assert parse_hostfile(write(tmp_path, text)) == (Host("node-1", 8), Host("10.0.0.2", 4), Host("n_3.example.org", 1))


def test_the_hostfiles_of_this_repository_are_right() -> None:
    folder = Path(__file__).resolve().parents[2] / "hostfiles"
    files = [path for path in folder.iterdir() if path.suffix != ".md"]
    assert len(files) >= 4
    for path in files:
        assert parse_hostfile(path)


def test_a_file_that_names_no_host_is_an_error_and_no_local_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no host"):
        parse_hostfile(write(tmp_path, "\n# nothing\n"))
    with pytest.raises(ConfigError, match="does not exist"):
        parse_hostfile(tmp_path / "hostfiel")
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_hostfile(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        parse_hostfile(tmp_path / "binary")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("node-0 slots=0", "slots=0 runs nothing"),
        ("node-0 slots=4097", "slots=4097 is too many"),
        ("node-0:2222 slots=8", "a port .* for it in ~/.ssh/config"),
        ("me@node-0 slots=8", "a user"),
        ("node-[0-3] slots=8", "One|one line per host"),
        ("node-0,node-1 slots=8", "one line per host"),
        ("-oProxyCommand=reboot slots=8", "not a plain host name"),
        ("$(reboot) slots=8", "not a plain host name"),
        ("node1", "Write `node1 slots=N`, N being its GPUs."),
        ("node1 slots=eight", "Write `node1 slots=N`, N being its GPUs."),
        ("node1 4", "Write `node1 slots=4`."),
        ("node1:4", "Write `node1 slots=4`."),
        ("node1 slots = 2", "Write `node1 slots=2`."),
        ("node1 gpus=16", "Write `node1 slots=16`."),
        ("node1 slots=8 max_slots=9", "Write `node1 slots=8`."),
        ("4 node1", "Write one line `name slots=N` per host."),
    ],
)
def test_what_cannot_be_used_is_named_with_its_line_and_the_fix(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path, f"good slots=1\n{line}\n")
    with pytest.raises(ConfigError, match=words) as caught:
        parse_hostfile(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_a_host_may_stand_there_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hosts:3: host 'a' is listed twice"):
        parse_hostfile(write(tmp_path, "a slots=1\nb slots=1\na slots=2\n"))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback addresses stand for other hosts."""
    for module in (hosts, remote):
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
