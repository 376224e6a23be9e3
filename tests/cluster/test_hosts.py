"""Hosts of a hostfile and of a Slurm job, the variables that ranks get there, and commands on them."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.cluster import hosts
from llmscale.cluster.hosts import (
    PACKAGE,
    SSH_FAILED,
    TIMED_OUT,
    ask_hosts,
    gather_environment,
    host_command_by,
    is_this_machine,
    module_argv,
    parse_env_file,
    parse_hostfile,
    slurm_hosts,
)
from llmscale.errors import ConfigError
from scripts.playground.hosts import Playground
from tests.conftest import HANG_S


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


def test_hosts_come_in_the_files_order(tmp_path: Path) -> None:
    text = "# the cluster\nnode-1 slots=8\n\n  10.0.0.2\tslots=4   # the small one\nn_3.example.org slots=1\n"
    hosts = parse_hostfile(write(tmp_path, text))
    assert list(hosts.items()) == [("node-1", 8), ("10.0.0.2", 4), ("n_3.example.org", 1)]


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
    monkeypatch.setattr(hosts, "is_this_machine", lambda host: host == "localhost")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("launcher", "first"), [("ssh", "ssh"), ("slurm", "srun")])
def test_a_host_is_reached_by_a_command_without_a_secret(launcher: str, first: str) -> None:
    """The host is all that differs from one command to the next: no word is known to one host alone."""
    one, other = (host_command_by(launcher)(f"127.0.0.{number}") for number in (3, 4))
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
    assert slurm_hosts({"SLURM_JOB_NODELIST": "n[1-2]", **variables}) == {"n1": slots, "n2": slots}
    assert slurm_hosts({"SLURM_JOB_NODELIST": "n[1-2]"}, slots=3)["n1"] == 3


def test_outside_of_a_slurm_job_there_are_no_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST is not set"):
        slurm_hosts({})
    fake_scontrol(tmp_path, monkeypatch, "echo down >&2; exit 1")
    with pytest.raises(ConfigError, match="down"):
        slurm_hosts({"SLURM_JOB_NODELIST": "n1"})


ROOT = PACKAGE.parent


def test_names_of_this_machine() -> None:
    assert is_this_machine("localhost")
    assert is_this_machine("127.0.0.1")
    assert not is_this_machine("192.0.2.1")  # reserved for documentation
    assert not is_this_machine("no-such-host.invalid")


#: A module that can be asked.
ECHO = """
import os, subprocess
from llmscale.cluster.hosts import read_request
print(read_request(), os.getcwd(), os.environ["NCCL_DEBUG"], flush=True)
subprocess.run(["sleep", os.environ["NCCL_SLEEP"]])
"""


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the module `echo`."""
    (tmp_path / "echo.py").write_text(ECHO)
    values = {"PYTHONPATH": str(tmp_path), "NCCL_DEBUG": "it's $HOME; `x`", "NCCL_SLEEP": "0"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_module_gets_folder_variables_and_request_through_stdin(echo: Path) -> None:
    answers = ask_hosts("echo", {"localhost": {"a": 1}, "127.0.0.1": {"a": 2}}, HANG_S)
    here = f"{echo} it's $HOME; `x`\n"
    assert [answer.stdout for answer in answers.values()] == [f"{{'a': 1}} {here}", f"{{'a': 2}} {here}"]
    assert not any("it's" in word for word in module_argv("echo"))


@pytest.mark.usefixtures("echo")
def test_a_host_that_takes_too_long_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SLEEP", "600")
    began = time.monotonic()
    answer = ask_hosts("echo", {"localhost": {}}, 5)["localhost"]
    assert answer.returncode == TIMED_OUT
    assert "no answer within 5 s" in answer.describe()
    assert time.monotonic() - began < 300, "sooner than its children would have ended"


def test_answers_come_per_host(make_playground: Callable[..., Playground]) -> None:
    first, _, dead = make_playground(3).hosts
    dead.cut_link()
    code = """
import json
from llmscale.cluster.hosts import ask_hosts
request = {"hosts": {"node-1": 1}, "host": "node-1", "port": 1, "timeout_s": 0.001}
requests = dict.fromkeys(["node-0", "node-1", "node-2", "node-9"], request)
answers = ask_hosts("llmscale.cluster.doctor.diagnose", requests, 120)
print(json.dumps([answer.returncode for answer in answers.values()]))
"""
    done = first.run([sys.executable, "-c", code], environment={"PYTHONPATH": str(ROOT)}, timeout_s=300)
    assert done.returncode == 0, done.stderr
    # Without a limit, TCP tries a host without a link for minutes.
    assert json.loads(done.stdout) == [TIMED_OUT, TIMED_OUT, SSH_FAILED, SSH_FAILED]


def gather(variables: dict[str, str], extra: tuple[str, ...] = (), files: tuple[Path, ...] = ()) -> dict[str, str]:
    return gather_environment(variables, extra=extra, env_files=files)


FORWARDED = "DS_ACCELERATOR WANDB_API_KEY HF_TOKEN OMP_NUM_THREADS NCCL_DEBUG TP_SOCKET_IFNAME CC MAX_JOBS https_proxy"
NOT_FORWARDED = "HOME SSH_CONNECTION RANK WORLD_SIZE MASTER_ADDR CUDA_VISIBLE_DEVICES LLMSCALE_REPORTS CCACHE_DIR"


def test_what_training_needs_goes_along_unchanged_and_what_belongs_to_a_host_stays() -> None:
    value = "a b; $(c) 'd'"
    chosen = gather(dict.fromkeys((*FORWARDED.split(), *NOT_FORWARDED.split()), value))
    assert {name: chosen[name] for name in FORWARDED.split()} == dict.fromkeys(FORWARDED.split(), value)
    assert not {*NOT_FORWARDED.split()} & {*chosen}


def test_this_llmscale_and_this_python_come_first() -> None:
    chosen = gather({"PYTHONPATH": "/more", "PATH": "/usr/bin"})
    assert chosen["PYTHONPATH"] == f"{ROOT}:/more"
    assert chosen["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"


def test_the_command_line_wins_over_the_file_and_the_file_over_the_shell(tmp_path: Path) -> None:
    file = tmp_path / ".deepspeed_env"
    file.write_text("# tuning\n\nNCCL_DEBUG=INFO\nexport NCCL_ALGO=Ring=x\n MINE = a b \n")
    assert parse_env_file(file) == {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring=x", "MINE": "a b"}
    shell = {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Tree", "OTHER": "o"}
    chosen = gather(shell, ("NCCL_DEBUG=TRACE", "OTHER", "EMPTY="), (file,))
    expected = {"NCCL_DEBUG": "TRACE", "NCCL_ALGO": "Ring=x", "MINE": "a b", "OTHER": "o", "EMPTY": ""}
    assert expected.items() <= chosen.items()


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this shell has no such variable"):
        gather({}, ("MISSING",))
    with pytest.raises(ConfigError, match="is not NAME or NAME=VALUE"):
        gather({}, ("a b=c",))
    (tmp_path / "bad").write_text("NCCL_DEBUG INFO\n")
    with pytest.raises(ConfigError, match="bad:1: 'NCCL_DEBUG INFO' is not NAME=VALUE"):
        parse_env_file(tmp_path / "bad")
