"""Heartbeats, in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from llmscale.training.stop_request import STACKS_SIGNAL, WATCH_VARIABLE, heartbeat_path, output_path, stacks_path
from tests.conftest import HANG_S

ROOT = Path(__file__).resolve().parents[2]


def start(code: str, folder: Path | None) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3"}
    if folder:
        environment[WATCH_VARIABLE] = str(folder)
    imports = "from llmscale.training.stop_request import Heartbeat"
    program = f"{imports}\nheartbeat = Heartbeat.from_environment()\nheartbeat.install()\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def make_pipe(folder: Path) -> int:
    os.mkfifo(output_path(folder, 3))
    return os.open(output_path(folder, 3), os.O_RDWR | os.O_NONBLOCK)


def until(condition) -> None:  # type: ignore[no-untyped-def]  # any condition
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_signs_say_how_far_a_rank_has_come_and_how_it_ended(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    code = "heartbeat.beat('training', 11); heartbeat.beat('training', 12); print('out', flush=True); heartbeat.end(0)"
    rank = start(code, tmp_path)
    assert rank.communicate() == ("", "")
    assert os.read(pipe, 100) == b"out\n"
    assert json.loads(heartbeat_path(tmp_path, 3).read_text()) == {
        "pid": rank.pid,
        "count": 4,
        "phase": "finished",
        "first_step": 11,
        "step": 12,
        "exit_code": 0,
    }


def test_a_failure_and_a_stop_are_told_apart(tmp_path: Path) -> None:
    make_pipe(tmp_path)
    for code, phase in (("heartbeat.beat('stopped', 4); heartbeat.end(0)", "stopped"), ("heartbeat.end(2)", "failed")):
        start(code, tmp_path).communicate()
        assert json.loads(heartbeat_path(tmp_path, 3).read_text())["phase"] == phase


def test_stacks_of_a_rank_that_hangs(tmp_path: Path) -> None:
    make_pipe(tmp_path)
    rank = start("def here():\n  import time; heartbeat.beat('training', 1); time.sleep(1000)\nhere()", tmp_path)
    until(lambda: heartbeat_path(tmp_path, 3).exists() and '"training"' in heartbeat_path(tmp_path, 3).read_text())
    rank.send_signal(STACKS_SIGNAL)
    until(lambda: "in here" in stacks_path(tmp_path, 3).read_text())
    assert rank.poll() is None
    rank.kill()
    rank.communicate()


def test_a_rank_does_not_outlive_its_launcher(tmp_path: Path) -> None:
    make_pipe(tmp_path)
    imports = "from llmscale.training.stop_request import Heartbeat; import time"
    rank = f"{imports}; Heartbeat.from_environment().install(); time.sleep(99)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3", WATCH_VARIABLE: str(tmp_path)}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=environment)
    until(lambda: heartbeat_path(tmp_path, 3).exists() and heartbeat_path(tmp_path, 3).read_text())
    pid = json.loads(heartbeat_path(tmp_path, 3).read_text())["pid"]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    until(lambda: not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text())


def test_without_a_supervisor_only_stacks_are_to_be_had(tmp_path: Path) -> None:
    rank = start("import time\nheartbeat.beat('training', 1)\nprint('up', flush=True)\ntime.sleep(1000)", None)
    assert rank.stdout is not None and rank.stderr is not None
    assert rank.stdout.readline() == "up\n"
    rank.send_signal(STACKS_SIGNAL)
    assert any("most recent call first" in line for line in rank.stderr)
    assert rank.poll() is None
    rank.kill()
    rank.communicate()
