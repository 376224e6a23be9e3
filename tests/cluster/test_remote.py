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
    run_on_hosts,
)
from llmscale.errors import ConfigError
from scripts.playground.hosts import Playground
from tests.conftest import HANG_S

ROOT = PACKAGE.parent
HOSTILE = [
    "a b",
    "",
    "'single'",
    '"double"',
    "$(touch /tmp/executed)",
    "; touch /tmp/executed",
    "*",
    "two\nlines",
    "ü€",
]
ECHO = [sys.executable, "-c", "import json, sys; print(json.dumps([sys.argv[1:], sys.stdin.read()]))"]


def test_this_machine_needs_no_ssh() -> None:
    hosts = ["localhost", "127.0.0.1"]
    done = run_on_hosts({host: [*ECHO, *HOSTILE] for host in hosts}, HANG_S, dict.fromkeys(hosts, "in"))
    assert list(done) == hosts
    for finished in done.values():
        assert (finished.returncode, json.loads(finished.stdout)) == (0, [HOSTILE, "in"])
    assert run_on_hosts({}, 1) == {}


def test_a_command_that_takes_too_long_is_ended_with_its_children() -> None:
    began = time.monotonic()
    finished = run_on_hosts({"localhost": ["sh", "-c", "echo out; sleep 60 | sleep 60"]}, 0.5)["localhost"]
    assert (finished.returncode, finished.stdout) == (TIMED_OUT, "out\n")
    assert finished.describe().endswith("s, after `out`")
    assert time.monotonic() - began < 50, "sooner than its children would have ended"


def test_a_missing_command_is_127_as_in_a_shell() -> None:
    finished = run_on_hosts({"localhost": ["no-such-command"]}, 300)["localhost"]
    assert (finished.returncode, finished.stderr) == (127, "no-such-command: No such file or directory\n")


def test_names_of_this_machine() -> None:
    assert is_this_machine("localhost")
    assert is_this_machine("127.0.0.1")
    assert not is_this_machine("192.0.2.1")  # reserved for documentation
    assert not is_this_machine("no-such-host.invalid")


def test_a_module_gets_folder_variables_and_request_through_stdin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = "import os; from llmscale.cluster.remote import read_request\n"
    (tmp_path / "echo.py").write_text(code + "print(read_request(), os.getcwd(), os.environ['NCCL_DEBUG'])")
    monkeypatch.setenv("NCCL_DEBUG", "it's $HOME; `x`")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    answer = ask_hosts("echo", {"localhost": {"a": 1}}, HANG_S)["localhost"]
    assert answer.stdout == f"{{'a': 1}} {tmp_path} it's $HOME; `x`\n", answer.stderr
    assert not any("it's" in word for word in module_argv("echo"))


def test_arguments_arrive_unchanged_and_answers_come_per_host(make_playground: Callable[..., Playground]) -> None:
    first, second, dead = make_playground(3).hosts
    dead.cut_link()
    program = f"""
import json, sys
from llmscale.cluster.remote import run_on_hosts
hosts = ["node-0", "node-1", "node-2", "node-9"]
done = run_on_hosts({{host: {[*ECHO, *HOSTILE]!r} for host in hosts}}, 120, dict.fromkeys(hosts, "x"))
print(json.dumps([[name, d.returncode, d.stdout, d.stderr] for name, d in done.items()]))
"""
    done = first.run([sys.executable, "-c", program], environment={"PYTHONPATH": str(ROOT)}, timeout_s=120)
    assert done.returncode == 0, done.stderr
    here, there, silent, nowhere = json.loads(done.stdout)
    assert (here[:2], there[:2]) == (["node-0", 0], ["node-1", 0])
    assert json.loads(here[2]) == json.loads(there[2]) == [HOSTILE, "x"]
    assert silent[:2] == ["node-2", SSH_FAILED], "without a limit, TCP tries for minutes"
    assert nowhere[:2] == ["node-9", SSH_FAILED]
    assert "resolve" in nowhere[3]
    for host in (first, second):
        assert "executed" not in host.run(["ls", "/tmp"]).stdout


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
