"""Heartbeats and their watchdog, in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from llmscale.training.stop_request import LAUNCHER_VARIABLE
from llmscale.training.watchdog import HUNG_STATUS, REPORTS_VARIABLE, STACKS_SIGNAL, stacks_path
from tests.conftest import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PROLOGUE = """
import os, sys, time
from functools import partial
from pathlib import Path
from llmscale.training.watchdog import Heartbeat
heartbeat = Heartbeat.from_environment()
heartbeat.install()
"""
WATCH = """
from llmscale.config.run_config import RunConfig
from llmscale.training import watchdog
watchdog._POLL_S, watchdog._STACKS_S = 0.05, {stacks_s}
config = RunConfig(run=Path(sys.argv[1]), hang_timeout_s={hang_s}, start_timeout_s={start_s})
watchdog.watch(heartbeat, config, 3, partial(print, flush=True))
def here():
    time.sleep(1000)
"""


class Pipe:
    """What ranks report to."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)

    def start(self, code: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        given = {REPORTS_VARIABLE: str(self.writing), LAUNCHER_VARIABLE: str(os.getpid()), **variables}
        return start(code, arguments, given, [self.writing])

    def reports(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in os.read(self.reading, 1 << 16).splitlines()]


def start(
    code: str, arguments: Sequence[str] = (), variables: dict[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3", **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    )


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    os.close(pipe.reading)
    os.close(pipe.writing)


def test_reports_say_how_far_a_rank_has_come_and_how_it_ends(pipe: Pipe) -> None:
    code = "heartbeat.beat('training', 11); heartbeat.fail('Connection reset by peer'); heartbeat.end(1)"
    rank = pipe.start(code)
    assert rank.communicate() == ("", "")
    start = {"rank": 3, "pid": rank.pid, "phase": "starting", "step": None, "lost_peer": False}
    training = {**start, "phase": "training", "step": 11}
    failed = {**training, "phase": "failed", "lost_peer": True}
    assert pipe.reports() == [start, training, failed, failed]


@pytest.mark.parametrize(
    ("code", "phase"),
    [("beat('stopped', 4); heartbeat.end(0)", "stopped"), ("end(2)", "failed"), ("end_early()", "stopped")],
)
def test_a_failure_and_a_stop_are_told_apart(pipe: Pipe, code: str, phase: str) -> None:
    pipe.start(f"heartbeat.{code}").communicate()
    assert pipe.reports()[-1]["phase"] == phase


def test_a_launcher_that_does_not_read_delays_no_step(pipe: Pipe) -> None:
    rank = pipe.start("for step in range(20_000): heartbeat.beat('training', step)")
    assert rank.wait(HANG_S) == 0


def test_no_child_of_a_rank_reports_to_the_launcher(pipe: Pipe) -> None:
    code = "import subprocess; subprocess.run([sys.executable, '-c', 'import os; print(os.environ)'])"
    assert REPORTS_VARIABLE not in pipe.start(code).communicate()[0]


def test_a_rank_does_not_outlive_the_process_that_started_it(pipe: Pipe) -> None:
    code = """
import os, subprocess, sys
variables = {**os.environ, "LLMSCALE_LAUNCHER": str(os.getpid())}
subprocess.run([sys.executable, "-c", sys.argv[1]], env=variables, pass_fds=[int(os.environ["LLMSCALE_REPORTS"])])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3", REPORTS_VARIABLE: str(pipe.writing)}
    command = [sys.executable, "-c", code, PROLOGUE + "time.sleep(1000)"]
    parent = subprocess.Popen(command, env=environment, pass_fds=[pipe.writing])
    pid = pipe.reports()[0]["pid"]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + HANG_S
    while Path(f"/proc/{pid}").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    orphan = pipe.start("print('trains')", **{LAUNCHER_VARIABLE: "1"})
    assert (orphan.communicate()[0], orphan.returncode) == ("", 1)


def test_stacks_are_to_be_had_from_any_rank() -> None:
    rank = start("heartbeat.beat('training', 1)\nprint('up', flush=True)\ntime.sleep(1000)")
    assert rank.stdout is not None and rank.stderr is not None
    assert rank.stdout.readline() == "up\n"
    rank.send_signal(STACKS_SIGNAL)
    assert any("most recent call first" in line for line in rank.stderr)
    assert rank.poll() is None
    rank.kill()
    rank.communicate()


# ---------------------------------------------------------------- the watchdog


@pytest.mark.parametrize(
    ("limits", "beat", "since", "flag", "is_launched"),
    [
        ({"hang_s": 0.2, "start_s": 0}, "heartbeat.beat('training', 7)", "after step 7", "--hang-timeout-s", True),
        ({"hang_s": 0, "start_s": 0.2}, "", "after the start", "--start-timeout-s", False),
    ],
)
def test_a_rank_that_hangs_writes_its_stacks_and_ends_with_or_without_a_launcher(
    pipe: Pipe, tmp_path: Path, limits: dict[str, float], beat: str, since: str, flag: str, is_launched: bool
) -> None:
    code = f"{WATCH.format(stacks_s=1.0, **limits)}\n{beat}\nhere()"
    rank = pipe.start(code, str(tmp_path)) if is_launched else start(code, [str(tmp_path)])
    output, errors = rank.communicate(timeout=HANG_S)
    assert rank.returncode == HUNG_STATUS == 76
    path = stacks_path(tmp_path, 3)
    assert errors.startswith("error: rank 3: no progress for ")
    assert since in errors and flag in errors and str(path) in errors
    stacks = path.read_text()
    assert stacks.startswith("==== 20") and "in here" in stacks
    assert output.startswith("76 no progress"), "what --notify is told"
    assert json.loads((tmp_path / "failure.json").read_text())["rank"] == 3
    if is_launched:
        assert pipe.reports()[-1]["phase"] == "failed"


def test_a_disk_that_does_not_answer_cannot_keep_a_hanging_rank(tmp_path: Path) -> None:
    slow = "watchdog._write_stacks = lambda *values: time.sleep(1000)"
    rank = start(f"{WATCH.format(stacks_s=0.1, hang_s=9, start_s=0.1)}\n{slow}\nhere()", [str(tmp_path)])
    assert rank.wait(HANG_S) == 76
    rank.communicate()


def test_a_rank_that_gets_on_was_stopped_or_has_ended_does_not_hang(tmp_path: Path) -> None:
    code = f"""{WATCH.format(stacks_s=0.1, hang_s=1.5, start_s=9.0)}
for step in range(20):
    heartbeat.beat("training", step)
    time.sleep(0.1)
    if step == 9:
        print("half", flush=True)
heartbeat.end(0)
time.sleep(2.0)
"""
    rank = start(code, [str(tmp_path)])
    assert rank.stdout is not None and rank.stdout.readline() == "half\n"
    rank.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    rank.send_signal(signal.SIGCONT)
    assert rank.communicate() == ("", "")
    assert rank.returncode == 0
