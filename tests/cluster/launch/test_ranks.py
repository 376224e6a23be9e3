"""Ranks of one machine under `llmscale train`'s hands: stand-ins that print, wait and die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmscale.cluster.launch.ranks import (
    descendants,
    find_port,
    is_free,
    kill_descendants,
    process_state,
    rank_environment,
    visible_gpus,
)
from tests.conftest import HANG_S, REPOSITORY

#: Starts the code of argv[1] as two ranks.
PARENT = """
import os, sys
from llmscale.cluster.launch.ranks import LocalRanks, rank_environment
environments = rank_environment(os.environ, 2, 1, 2)
sys.exit(LocalRanks([sys.executable, "-c", sys.argv[1]], environments, lambda line: print(line, flush=True)).run())
"""
RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(word): os.write(1, f"{rank} {word}\\n".encode())  # at once: another rank writes too
"""
NOTE = "signal.signal(signal.{name}, lambda n, f: (say(signal.Signals(n).name), sys.exit(0)))\n"
HEAR = "signal.pthread_sigmask(signal.SIG_UNBLOCK, range(1, 32))\n"


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(code: str, *prefix: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [*prefix, sys.executable, "-c", PARENT, RANK + code],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_variables_are_those_of_deepspeeds_launcher() -> None:
    first, second = rank_environment({"HOME": "/h", "WORLD_SIZE": "64", "RANK": "9"}, 2, 1234, 8)
    expected = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "HOME": "/h"}
    expected |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "4"}
    assert {**expected, "RANK": "0", "LOCAL_RANK": "0"}.items() <= first.items()
    assert {**expected, "RANK": "1", "LOCAL_RANK": "1"}.items() <= second.items()


def test_what_the_user_has_set_stays() -> None:
    [only] = rank_environment({"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "5,7"}, 1, 1, 8)
    assert (only["OMP_NUM_THREADS"], only["CUDA_VISIBLE_DEVICES"]) == ("3", "5")
    assert "OMP_NUM_THREADS" not in rank_environment({}, 1, 1, 8)[0]


def test_visible_gpus_are_read_as_cuda_does() -> None:
    assert visible_gpus({}) is None
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8932f937, 1,-1,2"}) == ["GPU-8932f937", "1"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3 * rank)", 3),
        ("time.sleep(1000 * (1 - rank)); sys.exit(2)", 2),
    ],
)
def test_the_exit_status_is_the_ranks(start: Callable, code: str, status: int) -> None:
    assert start(code).wait(HANG_S) == status


def test_a_killed_rank_is_named_with_its_signal_and_the_others_are_ended(start: Callable) -> None:
    parent = start("say(os.getpid()); os.kill(os.getpid(), 9) if rank else time.sleep(1000)")
    output = parent.communicate(timeout=HANG_S)[0]
    assert parent.returncode == 128 + signal.SIGKILL
    assert "was killed by SIGKILL, most likely by the kernel for lack of host memory" in output
    for pid in [int(line.split()[1]) for line in output.splitlines() if line[0] in "01"]:
        assert not Path(f"/proc/{pid}").exists()


def test_the_killed_rank_is_to_blame_not_one_that_lost_its_peer(start: Callable) -> None:
    parent = start("time.sleep(0.5); os.kill(os.getpid(), 9) if rank else (time.sleep(0.1), sys.exit(1))")
    assert parent.wait(HANG_S) == 128 + signal.SIGKILL


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_reaches_every_rank_once_and_none_before_it_can_hear(start: Callable, name: str) -> None:
    """Sent while it is blocked, as in a rank that starts."""
    parent = start("say('up'); time.sleep(1.0)\n" + NOTE.format(name=name) + HEAR + "time.sleep(1000)")
    assert sorted(parent.stdout.readline() for _ in range(2)) == ["0 up\n", "1 up\n"]
    parent.send_signal(getattr(signal, name))
    output = parent.communicate(timeout=HANG_S)[0]
    assert sorted(output.splitlines()) == [f"0 {name}", f"1 {name}"]
    assert parent.returncode == 0


def test_ctrl_c_in_the_terminal_comes_once_and_a_third_one_ends_all(start: Callable) -> None:
    code = "signal.signal(signal.SIGINT, lambda n, f: say('SIGINT'))\n" + HEAR + "say(os.getpid())\n"
    parent = start(code + "while True: time.sleep(1)")
    pids = [int(parent.stdout.readline().split()[1]) for _ in range(2)]
    for _ in range(2):
        os.killpg(parent.pid, signal.SIGINT)
        assert sorted(parent.stdout.readline() for _ in range(2)) == ["0 SIGINT\n", "1 SIGINT\n"]
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.wait(HANG_S) == 130
    assert parent.stdout.read().count("SIGINT") <= 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_nohup_keeps_a_closed_terminal_from_all(start: Callable) -> None:
    parent = start(HEAR + "say(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN); time.sleep(2)", "nohup")
    lines = [parent.stdout.readline() for _ in range(2)]
    parent.send_signal(signal.SIGHUP)
    assert parent.wait(HANG_S) == 0
    assert all("True" in line for line in lines), lines


def test_what_a_rank_leaves_behind_is_ended(start: Callable) -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '77'], start_new_session=True); say(p.pid)"
    parent = start(code)
    output = parent.communicate(timeout=HANG_S)[0]
    assert parent.returncode == 0
    for line in output.splitlines():
        assert not Path(f"/proc/{line.split()[1]}").exists()


def test_a_free_port() -> None:
    port = find_port()
    assert is_free(port)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)


def test_a_tree_is_ended_by_its_numbers() -> None:
    script = "sleep 100 & sleep 100 & setsid sleep 100 & wait"
    with subprocess.Popen(["bash", "-c", script]) as shell:
        while len(descendants(shell.pid)) < 3:
            time.sleep(0.01)
        children = descendants(shell.pid)
        assert kill_descendants(shell.pid) == 3
        assert [state for state in map(process_state, children) if state not in ("", "Z")] == []
    assert process_state(shell.pid) == ""
