"""A forked process is what a started one would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm_start
from tests.conftest import HANG_S, REPOSITORY

SHOW = """
import json, os, signal, sys
defaults = [int(n) for n in signal.valid_signals() if signal.getsignal(n) not in (signal.SIG_DFL, signal.SIG_IGN)]
print(json.dumps([__name__, sys.argv, sys.path[0], os.getcwd(), sorted(os.listdir("/proc/self/fd"))[:3], defaults,
    len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), sys.stdout.line_buffering, os.umask(0), sys.stdin.read(),
    {name: value for name, value in os.environ.items() if name != "LC_CTYPE"}]))
"""


def test_what_it_sees_is_what_a_started_one_sees(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    (tmp_path / "shown.py").write_text(SHOW)
    variables = {**warm_start.ENVIRONMENT, "HOME": "/nowhere", "COLUMNS": "71", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    safe = ("PYTHONSAFEPATH", "1")
    for words, more in (
        (["-c", SHOW, "a b"], ()),
        ([str(script), "--x"], ()),
        (["show.py"], ()),
        (["-m", "shown", "y"], ()),
        ([str(script)], (safe,)),
    ):
        warm, cold = (
            run(
                [sys.executable, *words],
                env={**variables, **dict(more)},
                cwd=tmp_path,
                input="text",
                capture_output=True,
                text=True,
            )
            for run in (warm_start.run, subprocess.run)
        )
        assert (warm.returncode, warm.stderr) == (0, ""), words
        assert json.loads(warm.stdout) == json.loads(cold.stdout), words


@pytest.mark.parametrize(
    "code",
    [
        "print('x')",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('bye')",
        "1 / 0",
        "raise KeyboardInterrupt",
        "import os; os.abort()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import sys; sys.stdout.write('left'); import os; os._exit(3)",
        "import atexit; atexit.register(print, 'at the end'); print('before')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start(); print(1)",
        "import multiprocessing; p = multiprocessing.Process(target=print, args=('child',)); p.start(); p.join()",
    ],
)
def test_it_ends_as_a_started_one_ends(code: str) -> None:
    warm, cold = (
        run([sys.executable, "-c", code], env=warm_start.ENVIRONMENT, capture_output=True, text=True, timeout=HANG_S)
        for run in (warm_start.run, subprocess.run)
    )
    assert (warm.returncode, warm.stdout, warm.stderr) == (cold.returncode, cold.stdout, cold.stderr)


def test_signals_reach_it_and_its_end_is_waited_for() -> None:
    command = [sys.executable, "-c", "import time; print('on', flush=True); time.sleep(1000)"]
    with warm_start.Process(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.is_warm and process.stdout.readline() == "on\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        assert process.poll() is None and os.getpgid(process.pid) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == -signal.SIGTERM


def test_ranks_have_different_hash_seeds() -> None:
    code = [sys.executable, "-c", "print(hash('x'))"]
    outputs = {warm_start.run(code, turn=turn, capture_output=True, text=True).stdout for turn in range(2)}
    assert len(outputs) == 2


@pytest.mark.parametrize("variables", [{"TORCH_LOGS": "+dynamo"}, {"PYTHONPATH": "/nowhere"}, {"OMP_NUM_THREADS": "2"}])
def test_other_imports_take_a_start(variables: dict[str, str]) -> None:
    environment = {**warm_start.ENVIRONMENT, **variables}
    with warm_start.Process([sys.executable, "-c", "import sys; sys.exit(4)"], env=environment) as process:
        assert not process.is_warm
        assert process.wait() == 4


def test_all_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from tests import warm_start
os.environ.pop("PYTEST_XDIST_TESTRUNUID", None)
process = warm_start.Process([sys.executable, "-c", "import time; time.sleep(1000)"])
print(process.pid, warm_start.server(process.turn % 2).process.pid, flush=True)
input()
"""
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "WARM_SERVER_IMPORTS_NOTHING": "1"}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as starter:  # type: ignore[call-overload]
        pids = starter.stdout.readline().split()
        assert len(pids) == 2
        starter.kill()
    deadline_s = time.monotonic() + HANG_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
