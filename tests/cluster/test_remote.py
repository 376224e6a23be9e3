"""Commands on hosts, and the variables that ranks get."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.cluster.remote import (
    PACKAGE,
    SSH_FAILED,
    TIMED_OUT,
    ask_hosts,
    gather_environment,
    is_this_machine,
    module_argv,
    parse_env_file,
)
from llmscale.errors import ConfigError
from scripts.playground.hosts import Playground
from tests.conftest import HANG_S

ROOT = PACKAGE.parent


def test_names_of_this_machine() -> None:
    assert is_this_machine("localhost")
    assert is_this_machine("127.0.0.1")
    assert not is_this_machine("192.0.2.1")  # reserved for documentation
    assert not is_this_machine("no-such-host.invalid")


#: A module that can be asked.
ECHO = """
import os, subprocess
from llmscale.cluster.remote import read_request
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
    answer = ask_hosts("echo", {"localhost": {}}, 2)["localhost"]
    assert answer.returncode == TIMED_OUT
    assert "no answer within 2 s" in answer.describe()
    assert time.monotonic() - began < 300, "sooner than its children would have ended"


def test_answers_come_per_host(make_playground: Callable[..., Playground]) -> None:
    first, _, dead = make_playground(3).hosts
    dead.cut_link()
    code = """
import json
from llmscale.cluster.remote import ask_hosts
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
