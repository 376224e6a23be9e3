"""Who counts as a launcher, and how its end is noticed, in real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from llmscale.training.launcher_chain import LAUNCHER_VARIABLE, launcher_name
from llmscale.untrusted.interpreter import module_command

ROOT = Path(__file__).resolve().parents[2]

#: A stand-in for a rank: it says when it watches, and what it notices.
RANK = """
import time
from llmscale.training.stop_request import StopRequest
stop = StopRequest()
stop.leave_start_up()
stop.install()
stop.watch_launchers()
print("watching", flush=True)
for _ in range(600):
    time.sleep(0.1)
    if stop.received:
        break
print(stop.received[0] if stop.received else "nothing", flush=True)
"""
#: A stand-in for what stands above it: starts its arguments, and waits. With GIVE in the environment it makes them a
#: rank, as launchers do.
PARENT = """
import os, subprocess, sys
variables = dict(os.environ)
if variables.pop("GIVE", ""):
    variables["RANK"] = "0"
subprocess.Popen(sys.argv[1:], env=variables).wait()
"""


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/venv/bin/python3.11 /venv/bin/deepspeed --num_gpus 2 llmscale/train.py", "deepspeed"),
        ("/venv/bin/python -u -m deepspeed.launcher.launch --world_info=e30= train.py", "deepspeed.launcher.launch"),
        ("python -X dev -W error /venv/bin/torchrun --nproc-per-node 2 train.py", "torchrun"),
        ("python3 /lib/python3.11/site-packages/torch/distributed/run.py train.py", "torchrun"),
        ("python -m torch.distributed.run train.py", "torchrun"),
        ("python /venv/bin/accelerate launch train.py", "accelerate"),
        ("python -m llmscale train", "llmscale"),
        ("-bash", None),
        ("bash -c deepspeed llmscale/train.py", None),
        ("nohup deepspeed llmscale/train.py", None),
        ("tmux new deepspeed", None),
        ("python -c import deepspeed deepspeed", None),
        ("python my_torchrun.py", None),
        ("python llmscale/train.py --run deepspeed", None),
        ("srun torchrun", None),
        ("", None),
    ],
)
def test_launchers_are_told_by_their_command_lines(command: str, name: str | None) -> None:
    assert launcher_name(command.split()) == name


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """`start("deepspeed", "bash")` starts scripts of these names, each by the one before it, and a rank by the last."""

    def begin(*names: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        rank = tmp_path / "rank.py"
        rank.write_text(RANK)
        command: list[str] = [sys.executable, str(rank)]
        for name in reversed(names):
            script = tmp_path / name
            script.write_text(PARENT)
            command = [sys.executable, str(script), *command]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True)

    return begin


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("depth", [0, 1])
def test_the_end_of_any_launcher_in_a_row_is_noticed(start: Callable, number: signal.Signals, depth: int) -> None:
    top = start("deepspeed", "torchrun")
    assert said(top) == "watching"
    victim = child_of(top.pid) if depth else top.pid
    os.kill(victim, number)
    if not depth:
        top.wait()
    assert said(top) == f"the end of its launcher ({'torchrun' if depth else 'deepspeed'}, process {victim})"
    top.wait()


def test_a_launcher_that_nobody_reaps_has_ended(start: Callable) -> None:
    """As in a container whose first process is no init."""
    top = start("deepspeed")
    assert said(top) == "watching"
    os.kill(top.pid, signal.SIGKILL)
    assert "process" in said(top)
    top.wait()


@pytest.mark.parametrize("names", [("bash",), ("deepspeed", "a_users_own.py")])
def test_the_end_of_anything_else_changes_nothing(start: Callable, names: Sequence[str]) -> None:
    """Nor that of a launcher above it: what a user's own program starts is not that launcher's rank."""
    top = start(*names)
    assert said(top) == "watching"
    top.kill()
    top.wait()
    assert top.stdout is not None
    assert select.select([top.stdout], [], [], 2.5)[0] == []


def test_a_wrapper_between_launcher_and_rank_does_not_hide_it(start: Callable) -> None:
    """A script that binds cores, as `torchrun --no-python` runs it: it has the rank's environment."""
    top = start("torchrun", "bind_cores.sh", environment={"GIVE": "yes"})
    assert said(top) == "watching"
    top.kill()
    top.wait()
    assert said(top) == f"the end of its launcher (torchrun, process {top.pid})"


def test_a_launcher_that_was_gone_before_its_rank_could_look(start: Callable) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    rank = start(environment={LAUNCHER_VARIABLE: str(gone.pid)})
    assert said(rank) == "watching"
    assert said(rank) == f"the end of its launcher (llmscale train, process {gone.pid})"
    rank.wait()


def test_deepspeed_that_died_before_it_had_ranks(tmp_path: Path) -> None:
    """Its second process, whose command line then says no node's number, starts them all the same."""
    package = tmp_path / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    (package / "launch.py").write_text("import subprocess, sys\nsubprocess.Popen(sys.argv[2:]).wait()\n")
    (tmp_path / "rank.py").write_text(RANK)
    rank = [sys.executable, str(tmp_path / "rank.py")]
    for flag, heard in (("--world_info=e30=", "the end of its launcher (deepspeed, process"), ("--node_rank=0", "")):
        launch = subprocess.Popen(
            [sys.executable, str(package / "launch.py"), flag, *rank],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert said(launch) == "watching"
        if heard:
            assert said(launch).startswith(heard)
        else:
            time.sleep(1.5)
            launch.kill()
            assert said(launch).startswith("the end of its launcher (deepspeed.launcher.launch")
        launch.wait()


def test_a_module_that_llmscale_itself_starts_counts() -> None:
    command = module_command("deepspeed.launcher.launch", "--node_rank=0", "train.py", flags=["-u"])
    assert launcher_name(command) == "deepspeed.launcher.launch"
    assert launcher_name(module_command("json.tool")) is None
