from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmscale.training import stop_request
from llmscale.training.stop_request import (
    LAUNCHER_VARIABLE,
    STOP_SIGNALS,
    Interrupts,
    StopOfRank,
    StopRequest,
    is_left_by_others,
    launcher_name,
)
from llmscale.untrusted.interpreter import module_command
from tests.conftest import HANG_S


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    """An installed StopRequest; the handlers that were there before come back."""
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGHUP)}
    request = StopRequest()
    request.leave_start_up()
    request.install()
    yield request
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_are_noted_and_nothing_dies(stop: StopRequest) -> None:
    for number in (*STOP_SIGNALS, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert stop.received == ["SIGTERM", "SIGINT", "SIGUSR1", "SIGTERM"]


START = """
import os, signal, time, threading
from llmscale.training.stop_request import StopRequest
stop = StopRequest()
stop.install()
"""
IN_TRAINING = "stop.leave_start_up()\n"
#: In the main thread, so that it runs no Python, as in a collective whose peer is dead.
WAIT_FOR_EVER = """
import ctypes
mutex = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)  # for itself
"""


def run_python(code: str, start: str = START + IN_TRAINING, **variables: str) -> tuple[int, str, str]:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, timeout=HANG_S, env=environment
    )
    return done.returncode, done.stdout, done.stderr


PRESS = """
def press(times):
    for _ in range(times):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_is_answered_and_the_third_ends_a_main_thread_that_runs_no_python() -> None:
    code = PRESS + "threading.Thread(target=press, args=[3], daemon=True).start()\n" + WAIT_FOR_EVER
    status, output, errors = run_python(code)
    assert (status, errors) == (130, "")
    saves, discards = output.splitlines()
    assert "saving after this step" in saves and "without saving" in discards
    assert run_python(code, RANK="1") == (130, "", ""), "one rank answers for all"


def test_a_question_that_nobody_answers_in_time_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stop_request, "time", SimpleNamespace(monotonic=lambda: now[0]))
    interrupts = Interrupts()
    ends = []
    for now[0] in (100, 101, 107, 113, 114):
        ends.append(interrupts.add())
    assert ends == [False, False, False, False, True]


def test_before_the_first_step_a_second_ctrl_c_ends_it_at_once() -> None:
    """There is nothing to save, and nothing to ask."""
    assert run_python(PRESS + "press(2)\ntime.sleep(1000)", start=START) == (130, "", "")


def test_a_closed_terminal_is_noted_unless_nohup_said_otherwise() -> None:
    code = "os.kill(os.getpid(), signal.SIGHUP)\ntime.sleep(0.2)\nprint(stop.received)"
    assert run_python(code) == (0, "['SIGHUP']\n", "")
    ignored = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + START + IN_TRAINING
    assert run_python(code, start=ignored) == (0, "[]\n", "")


EARLY = "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"


def test_before_the_first_step_it_ends_by_itself_wherever_it_is() -> None:
    """As in the rendezvous, which waits for half an hour and runs no Python."""
    line = "stopped by SIGTERM before the first step of this start: nothing new to save\n"
    assert run_python(EARLY + WAIT_FOR_EVER, start=START) == (0, line, "")


def test_a_stop_that_a_launch_passes_on_is_named_after_it() -> None:
    code = "os.environ['LLMSCALE_LAUNCH'] = 'x'\nos.kill(os.getpid(), signal.SIGUSR1)\n"
    code += "time.sleep(0.2)\nprint(stop.received)"
    assert run_python(code) == (0, "['a request of `llmscale launch`']\n", "")


def test_a_start_up_that_gets_to_a_step_in_time_ends_in_order() -> None:
    code = EARLY + "time.sleep(0.5)\nstop.leave_start_up()\ntime.sleep(4)\nprint(stop.received)"
    assert run_python(code, start=START) == (0, "['SIGTERM']\n", "")


def test_all_ranks_of_a_job_on_this_host_are_told_and_no_others() -> None:
    """One that waited for a rank that has ended would wait for long."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(10_000 + os.getpid() % 20_000), "WORLD_SIZE": "3"}
    other = {**job, "MASTER_PORT": "9"}
    ready = "print('up', flush=True)\n"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", START + ready + WAIT_FOR_EVER],
            env={**os.environ, **variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, variables in enumerate((job, job, job, other))
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "up\n"
    ranks[1].send_signal(signal.SIGTERM)
    assert [rank.wait(HANG_S) for rank in ranks[:3]] == [0, 0, 0]
    assert ranks[0].communicate()[0].startswith("stopped by SIGTERM before the first step")
    assert ranks[3].poll() is None
    ranks[3].kill()
    ranks[3].communicate()


def test_the_signals_of_a_forked_data_worker_do_not_count() -> None:
    code = (
        "if os.fork() == 0:\n"
        "    for _ in range(2):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(0.1)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "time.sleep(0.2)\n"
        "print('alive')\n"
    )
    assert run_python(code) == (0, "alive\n", "")


def test_a_rank_that_has_no_handlers_yet_is_told_once_it_has() -> None:
    """On a busy machine one rank may be seconds behind the other; it too ends with status 0."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2"}
    behind = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(2)\n" + START + "time.sleep(1000)"],
        env={**os.environ, **job, "RANK": "0"},
    )
    try:
        ended = run_python("os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(1000)\n", START, **job, RANK="1")
        assert ended == (0, "", "")
        assert behind.wait(HANG_S) == 0
    finally:
        behind.kill()


def test_at_an_early_end_one_that_fails_keeps_none_of_the_others() -> None:
    """A terminal that is gone cannot get its rows back; the claim on the run folder must go all the same."""
    code = (
        "def fail(): raise OSError('the terminal is gone')\n"
        "stop.before_early_end += [fail, lambda: print('given up', flush=True)]\n"
        "stop.end_now()\n"
    )
    status, output, _ = run_python(code, START)
    assert (status, output.splitlines()[0]) == (0, "given up")


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
        ("python /venv/bin/accelerate launch train.py", "accelerate"),
        ("python -m llmscale train", "llmscale"),
        ("/opt/bin/torchrun --nproc-per-node 2 train.py", "torchrun"),
        ("nohup deepspeed llmscale/train.py", None),
        ("python -c import deepspeed deepspeed", None),
        ("python llmscale/train.py --run deepspeed", None),
        ("", None),
    ],
)
def test_launchers_are_told_by_their_command_lines(command: str, name: str | None) -> None:
    assert launcher_name(command.split()) == name


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start("deepspeed", "bash")` starts scripts of these names, each by the one before it, and a rank by the last."""
    started: list[subprocess.Popen[str]] = []

    def begin(*names: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        rank = tmp_path / "rank.py"
        rank.write_text(RANK)
        command: list[str] = [sys.executable, str(rank)]
        for name in reversed(names):
            script = tmp_path / name
            script.write_text(PARENT)
            command = [sys.executable, str(script), *command]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        started.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )
        return started[-1]

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_end_of_any_launcher_in_a_row_is_noticed(start: Callable) -> None:
    top = start("deepspeed", "torchrun")
    assert said(top) == "watching"
    victim = child_of(top.pid)
    os.kill(victim, signal.SIGKILL)
    assert said(top) == f"the end of its launcher (torchrun, process {victim})"
    top.wait()


def test_a_launcher_that_nobody_reaps_has_ended(start: Callable) -> None:
    """As in a container whose first process is no init."""
    top = start("deepspeed", "torchrun")
    assert said(top) == "watching"
    os.kill(top.pid, signal.SIGTERM)
    assert said(top) == f"the end of its launcher (deepspeed, process {top.pid})"
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


def test_a_module_that_llmscale_itself_starts_counts() -> None:
    command = module_command("deepspeed.launcher.launch", "--node_rank=0", "train.py", flags=["-u"])
    assert launcher_name(command) == "deepspeed.launcher.launch"
    assert launcher_name(module_command("json.tool")) is None


@pytest.mark.parametrize(
    ("reasons", "changes", "is_left"),
    [
        ((None, None, "SIGTERM"), {}, True),
        ((None, "SIGTERM", None), {}, False),
        ((None, "SIGTERM", "SIGTERM"), {}, False),
        ((None, None, "SIGTERM"), {"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ((None, None, "SIGTERM"), {"TORCHELASTIC_RUN_ID": "none"}, False),
    ],
)
def test_only_ranks_of_an_elastic_node_that_nobody_asked_start_again(
    reasons: Sequence[str | None], changes: dict[str, str], is_left: bool
) -> None:
    """Two ranks of node 0, which asks, and one of node 1."""
    stops = [StopOfRank(reason, node) for reason, node in zip(reasons, ("0", "0", "1"), strict=True)]
    variables = {"GROUP_RANK": "0", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "job-1"}
    assert is_left_by_others(stops, variables | changes) == is_left
    assert not is_left_by_others(stops, {})
