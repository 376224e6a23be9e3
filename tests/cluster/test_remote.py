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
    gather_environment,
    is_this_machine,
    module_argv,
    parse_env_file,
    run_on_hosts,
)
from llmscale.errors import ConfigError
from scripts.playground.hosts import Playground

HOSTILE = [
    "a b",
    "",
    "'single'",
    '"double"',
    "$(touch /tmp/executed)",
    "`touch /tmp/executed`",
    "; touch /tmp/executed",
    "&& touch /tmp/executed",
    "*",
    "~",
    "$HOME",
    "back\\slash",
    "two\nlines",
    "!!",
    "ü€",
    "#no comment",
    "--flag=x y",
    "%h %n",
]
ECHO = [sys.executable, "-c", "import json, sys; print(json.dumps([sys.argv[1:], sys.stdin.read()]))"]


def test_this_machine_needs_no_ssh() -> None:
    done = run_on_hosts(["localhost", "127.0.0.1"], [*ECHO, *HOSTILE], timeout_s=120, stdin="in")
    assert list(done) == ["localhost", "127.0.0.1"]
    for finished in done.values():
        assert json.loads(finished.stdout) == [HOSTILE, "in"]
        assert finished.returncode == 0


def test_a_command_that_takes_too_long_is_ended_with_its_children() -> None:
    began = time.monotonic()
    finished = run_on_hosts(["localhost"], ["sh", "-c", "echo out; sleep 60 | sleep 60"], timeout_s=0.5)["localhost"]
    assert finished.timed_out
    assert finished.stdout == "out\n"
    assert time.monotonic() - began < 50, "sooner than its children would have ended"


def test_a_missing_command_is_127_as_in_a_shell() -> None:
    finished = run_on_hosts(["localhost"], ["no-such-command"], timeout_s=300)["localhost"]
    assert (finished.returncode, finished.stderr) == (127, "no-such-command: No such file or directory\n")


def test_no_hosts_is_no_work() -> None:
    assert run_on_hosts([], ["true"], timeout_s=1) == {}


def test_names_of_this_machine() -> None:
    assert is_this_machine("localhost")
    assert is_this_machine("127.0.0.1")
    assert not is_this_machine("192.0.2.1")  # reserved for documentation
    assert not is_this_machine("no-such-host.invalid")


def test_arguments_arrive_unchanged_and_answers_come_per_host(
    make_playground: Callable[..., Playground], tmp_path: Path
) -> None:
    hosts = make_playground(2).hosts
    program = f"""
import json, sys
from llmscale.cluster.remote import run_on_hosts
done = run_on_hosts(["node-0", "node-1", "node-9"], {[*ECHO, *HOSTILE]!r}, timeout_s=120, stdin="x")
print(json.dumps([[name, d.returncode, d.stdout, d.stderr] for name, d in done.items()]))
"""
    from llmscale.cluster import remote

    root = str(Path(remote.__file__).parents[2])
    done = hosts[0].run([sys.executable, "-c", program], environment={"PYTHONPATH": root})
    assert done.returncode == 0, done.stderr
    here, there, nowhere = json.loads(done.stdout)
    assert here[:2] == ["node-0", 0]
    assert there[:2] == ["node-1", 0]
    assert json.loads(here[2]) == json.loads(there[2]) == [HOSTILE, "x"]
    assert nowhere[:2] == ["node-9", SSH_FAILED]
    assert "resolve" in nowhere[3]
    for host in hosts:
        assert "executed" not in host.run(["ls", "/tmp"]).stdout


def test_a_module_is_run_with_this_python_and_this_package() -> None:
    argv = module_argv("llmscale.cli.main", ["--version"])
    finished = run_on_hosts(["localhost"], argv, timeout_s=120)["localhost"]
    assert finished.stdout.startswith("llmscale ")


@pytest.mark.parametrize("fault", ["off", "cut"])
def test_a_dead_host_is_given_up(make_playground: Callable[..., Playground], fault: str) -> None:
    hosts = make_playground(2).hosts
    hosts[1].power_off() if fault == "off" else hosts[1].cut_link()
    program = """
from llmscale.cluster.remote import run_on_hosts
d = run_on_hosts(["node-1"], ["true"], timeout_s=3)["node-1"]
assert d.returncode and d.seconds < 60, d  # without a limit, TCP tries for minutes
"""
    root = str(Path(__file__).resolve().parents[2])
    done = hosts[0].run([sys.executable, "-c", program], environment={"PYTHONPATH": root})
    assert done.returncode == 0, done.stderr


ROOT = PACKAGE.parent


def gather(variables: dict[str, str], extra: tuple[str, ...] = (), files: tuple[Path, ...] = ()) -> dict[str, str]:
    return gather_environment(variables, extra=extra, env_files=files)


@pytest.mark.parametrize(
    "name",
    [
        *("DS_ACCELERATOR", "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OMP_NUM_THREADS", "NCCL_DEBUG"),
        *("GLOO_SOCKET_IFNAME", "CUDA_HOME", "PYTHONHASHSEED", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_EXTENSIONS_DIR"),
        *("AWS_ACCESS_KEY_ID", "LD_LIBRARY_PATH", "CC", "MAX_JOBS", "https_proxy", "TP_SOCKET_IFNAME"),
    ],
)
def test_what_training_needs_goes_along_unchanged(name: str) -> None:
    assert gather({name: "a b; $(c) 'd'"})[name] == "a b; $(c) 'd'"


@pytest.mark.parametrize(
    "name",
    [
        *("HOME", "SSH_CONNECTION", "RANK", "WORLD_SIZE", "MASTER_ADDR", "HOSTNAME", "CUDA_VISIBLE_DEVICES", "TERM"),
        *("LLMSCALE_REPORTS", "CCACHE_DIR", "SLURM_JOB_ID"),
    ],
)
def test_what_belongs_to_one_host_or_shell_stays(name: str) -> None:
    assert name not in gather({name: "x"})


def test_this_llmscale_and_this_python_come_first() -> None:
    chosen = gather({"PYTHONPATH": "/more", "PATH": "/usr/bin"})
    assert chosen["PYTHONPATH"] == f"{ROOT}:/more"
    assert chosen["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"


def test_the_command_line_wins_over_the_file_and_the_file_over_the_shell(tmp_path: Path) -> None:
    file = tmp_path / ".deepspeed_env"
    file.write_text("# tuning\n\nNCCL_DEBUG=INFO\nexport NCCL_ALGO=Ring=x\n MINE = a b \n")
    assert parse_env_file(file) == {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring=x", "MINE": "a b"}
    chosen = gather(
        {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Tree", "OTHER": "o"}, ("NCCL_DEBUG=TRACE", "OTHER", "EMPTY="), (file,)
    )
    assert {name: chosen[name] for name in ("NCCL_DEBUG", "NCCL_ALGO", "MINE", "OTHER", "EMPTY")} == {
        "NCCL_DEBUG": "TRACE",
        "NCCL_ALGO": "Ring=x",
        "MINE": "a b",
        "OTHER": "o",
        "EMPTY": "",
    }


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this shell has no such variable"):
        gather({}, ("MISSING",))
    with pytest.raises(ConfigError, match="is not NAME or NAME=VALUE"):
        gather({}, ("a b=c",))
    (tmp_path / "bad").write_text("NCCL_DEBUG INFO\n")
    with pytest.raises(ConfigError, match="bad:1: 'NCCL_DEBUG INFO' is not NAME=VALUE"):
        parse_env_file(tmp_path / "bad")
