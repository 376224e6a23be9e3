"""Faults that `llmscale launch` survives, on real hosts: the run ends as if nothing had happened. What needs no real
host is in test_supervisor.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.training.watchdog import stacks_path
from scripts.playground.kernel import command_line
from tests.cluster.conftest import SHELL
from tests.cluster.lab import PATIENCE_S, Lab, train_alone
from tests.conftest import REPOSITORY, read_losses

pytestmark = pytest.mark.slow

STEPS = 200
FLAGS = ("--steps", str(STEPS), "--save-every", "20")


@pytest.fixture(scope="module")
def alone(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of FLAGS on one host, by one process that nobody touches."""
    return train_alone(tiny_set, tmp_path_factory.mktemp("alone"), *FLAGS)


@pytest.fixture
def lab(make_lab: Callable[..., Lab], alone: Path) -> Lab:
    lab = make_lab(2)
    lab.reference = alone
    return lab


def finish(lab: Lab, launch: subprocess.Popen[str], ends: list[str]) -> None:
    """To the end, which must be as if nothing had happened."""
    assert lab.wait(launch) == 0, lab.output.read_text()[-4000:]
    assert [attempt.end for attempt in lab.attempts()] == ends
    lab.check_equal(lab.reference, STEPS)
    lab.check_nothing_left()


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_rank(lab: Lab, node: int) -> None:
    launch = lab.launch(lab.train_arguments(*FLAGS))
    lab.until_step(25)
    os.kill(lab.ranks_of(lab.hosts[node])[0], signal.SIGKILL)
    finish(lab, launch, ["failed", "finished"])
    reason = lab.attempts()[0].reason
    assert reason == f"rank {node} on node-{node} was killed by SIGKILL"


def test_a_hanging_rank_and_the_stacks_of_all(lab: Lab) -> None:
    # A step of milliseconds takes seconds where other tests run.
    launch = lab.launch(lab.train_arguments(*FLAGS), hang_timeout_s=20)
    lab.until_step(25)
    os.kill(lab.ranks_of(lab.hosts[1])[0], signal.SIGSTOP)
    finish(lab, launch, ["hung", "finished"])
    first = lab.attempts()[0]
    assert first.reason is not None
    assert first.reason.endswith("rank 1 on node-1 is stopped (state T)")
    stacks = stacks_path(lab.run, 0).read_text()
    assert "llmscale/train.py" in stacks, "which line rank 0 waits at"
    assert not stacks_path(lab.run, 1).exists(), "a stopped rank cannot write"


def test_a_host_that_dies_is_left_out_and_taken_in_again(lab: Lab) -> None:
    launch = lab.launch(lab.train_arguments(*FLAGS[:1], "800", *FLAGS[2:]))
    lab.until_step(25)
    lab.hosts[1].power_off()
    lab.until_step(60, times=2)
    lab.playground.power_on(lab.hosts[1])
    os.kill(lab.ranks_of(lab.hosts[0])[0], signal.SIGKILL)
    lab.until(lambda: len(lab.attempts()) == 3)
    assert lab.wait(launch) == 0
    lost, alone, both = lab.attempts()
    assert (lost.end, lost.hosts) == ("host lost", {"node-0": 1, "node-1": 1})
    assert (alone.end, alone.hosts) == ("failed", {"node-0": 1})
    assert "node-1" in alone.left_out
    assert (both.end, both.hosts) == ("finished", {"node-0": 1, "node-1": 1})
    lab.check_equal(train_alone(lab.data, lab.folder / "alone", *FLAGS[:1], "800", *FLAGS[2:]), 800)


def test_a_cut_link_ends_the_ranks_on_both_sides(lab: Lab) -> None:
    launch = lab.launch(lab.train_arguments(*FLAGS))
    lab.until_step(25)
    cut_off = lab.hosts[1]
    cut_off.cut_link()
    lab.until(lambda: not lab.ranks_of(cut_off))
    finish(lab, launch, ["host lost", "finished"])


def test_a_killed_supervisor_leaves_nothing_and_the_next_one_goes_on(lab: Lab) -> None:
    lab.launch(lab.train_arguments(*FLAGS))
    lab.until_step(25)
    lab.signal_supervisor(signal.SIGKILL)
    lab.until(lambda: not any(lab.ranks_of(host) for host in lab.hosts))
    finish(lab, lab.launch(lab.train_arguments(*FLAGS)), ["supervisor lost", "finished"])


def test_the_launchers_own_machine_is_powered_off(make_lab: Callable[..., Lab], alone: Path) -> None:
    lab = make_lab(3)
    lab.reference = alone
    (lab.folder / "two").write_text("node-1 slots=1\nnode-2 slots=1\n")
    launch = lab.launch(lab.train_arguments(*FLAGS), hostfile="two")
    lab.until_step(25)
    lab.hosts[0].power_off()
    launch.wait()
    lab.until(lambda: not any(lab.ranks_of(host) for host in lab.hosts[1:]))
    lab.playground.power_on(lab.hosts[0])
    finish(lab, lab.launch(lab.train_arguments(*FLAGS), hostfile="two"), ["supervisor lost", "finished"])


def test_one_of_three_hosts_comes_and_goes(make_lab: Callable[..., Lab], alone: Path) -> None:
    lab = make_lab(3)
    lab.reference = alone
    launch = lab.launch(lab.train_arguments(*FLAGS))
    lab.until_step(5)
    while launch.poll() is None:
        lab.hosts[2].power_off()
        time.sleep(3)
        lab.playground.power_on(lab.hosts[2])
        time.sleep(10)
    assert launch.returncode == 0, lab.output.read_text()[-4000:]
    assert [attempt.end for attempt in lab.attempts()][-1] == "finished"
    assert len(lab.attempts()) <= 4
    lab.check_equal(lab.reference, STEPS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_ends_with_0_and_the_next_launch_goes_on(lab: Lab, number: signal.Signals) -> None:
    launch = lab.launch(lab.train_arguments(*FLAGS))
    lab.until_step(25)
    lab.signal_supervisor(number)
    assert lab.wait(launch) == 0
    assert "asked to stop; the ranks have saved, at step" in lab.output.read_text()
    stopped_at = lab.attempts()[0].last_step
    finish(lab, lab.launch(lab.train_arguments(*FLAGS)), ["stopped", "finished"])
    assert stopped_at is not None
    assert lab.attempts()[1].first_step == stopped_at + 1


def test_a_signal_to_every_process_of_a_job_does_the_same(lab: Lab) -> None:
    """What Slurm does: the ranks and what started them all get it."""
    launch = lab.launch(lab.train_arguments(*FLAGS))
    lab.until_step(25)
    for host in lab.hosts:
        for pid in [*host.pids_running("llmscale.cluster.launch.host"), *host.pids_running("train.py")]:
            if "llmscale.cli.main" not in command_line(pid) and "ssh" not in command_line(pid).split()[0]:
                os.kill(pid, signal.SIGTERM)
    assert lab.wait(launch) == 0
    finish(lab, lab.launch(lab.train_arguments(*FLAGS)), ["stopped", "finished"])


FAKE_SRUN = """#!{python}
# Stands in for Slurm's: a task without ssh's variables, on the node that is named, its stdin and stdout connected.
import os, shlex, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
node = next(word.split("=")[1] for word in options if word.startswith("--nodelist="))
command = sys.argv[1 + len(options):]
setting = ["env", "--unset=SSH_CONNECTION", "SLURM_LAUNCH_NODE_IPADDR=10.77.0.1", *command]
if node == "node-0":
    os.execvp("env", setting)
os.execvp("ssh", ["ssh", node, shlex.join(setting)])
"""


def test_the_nodes_of_a_slurm_job(lab: Lab) -> None:
    tools = lab.folder / "slurm"
    tools.mkdir()
    (tools / "srun").write_text(FAKE_SRUN.format(python=sys.executable))
    (tools / "scontrol").write_text('#!/bin/sh\nprintf "node-0\\nnode-1\\n"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_JOB_ID": "7", "PATH": f"{tools}:{SHELL['PATH']}"}
    launch = lab.launch(lab.train_arguments(*FLAGS), environment=job, hostfile="")
    lab.until_step(25)
    os.kill(lab.ranks_of(lab.hosts[1])[0], signal.SIGKILL)
    finish(lab, launch, ["failed", "finished"])
    assert lab.attempts()[0].master.startswith("10.77.0.1:")


def test_one_remote_host_is_not_this_machine(lab: Lab) -> None:
    (lab.folder / "one").write_text("node-1 slots=1\n")
    launch = lab.launch(lab.train_arguments(*FLAGS), hostfile="one")
    lab.until_step(3)
    assert not lab.ranks_of(lab.hosts[0])
    assert len(lab.ranks_of(lab.hosts[1])) == 1
    finish(lab, launch, ["finished"])


def test_a_signal_during_the_start_ends_it(lab: Lab) -> None:
    launch = lab.launch(lab.train_arguments(*FLAGS))
    lab.until(lambda: lab.output.exists() and "attempt 1" in lab.output.read_text())
    lab.signal_supervisor(signal.SIGTERM)
    assert lab.wait(launch) == 0
    lab.check_nothing_left()


def test_a_third_ctrl_c_ends_everything_at_once(lab: Lab) -> None:
    launch = lab.launch(lab.train_arguments(*FLAGS))
    lab.until_step(5)
    os.kill(lab.ranks_of(lab.hosts[1])[0], signal.SIGSTOP)
    for answer in ("saving after this step", "stops without saving"):
        lab.signal_supervisor(signal.SIGINT)
        lab.until(lambda answer=answer: answer in lab.output.read_text())
    lab.signal_supervisor(signal.SIGINT)
    assert lab.wait(launch) == 130
    lab.until(lambda: not any(lab.ranks_of(host) for host in lab.hosts))


def test_a_taken_port_is_named(lab: Lab) -> None:
    code = "import socket, time; s = socket.create_server(('', 29511)); time.sleep(300)"
    squatter = lab.hosts[0].popen([sys.executable, "-c", code])
    launch = lab.launch(lab.train_arguments(*FLAGS), flags=["--master-port", "29511"])
    assert lab.wait(launch) == 1
    squatter.kill()
    assert "MASTER_PORT 29511 is taken on this host" in lab.output.read_text()
    assert [attempt.end for attempt in lab.attempts()] == ["failed"] * 3


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("num_hosts", [2, 3])
@pytest.mark.parametrize("by", ["deepspeed", "launch"])
def test_hosts_together_do_what_one_does(
    make_lab: Callable[..., Lab], zero_stage: int, num_hosts: int, by: str
) -> None:
    lab = make_lab(num_hosts)
    arguments = lab.train_arguments("--steps", "12", ds_config=f"zero{zero_stage}")
    if by == "launch":
        assert lab.wait(lab.launch(arguments)) == 0
    else:
        hostfile = lab.playground.write_hostfile(lab.folder / "hostfile", 1)
        command = ["deepspeed", "--hostfile", str(hostfile), "--launcher", "pdsh", "llmscale/train.py", *arguments]
        done = lab.hosts[0].run(command, cwd=REPOSITORY, environment=SHELL, timeout_s=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
    lab.check_equal(train_alone(lab.data, lab.folder / "alone", "--steps", "12"), 12)
    assert len(read_losses(lab.run)) == 12
