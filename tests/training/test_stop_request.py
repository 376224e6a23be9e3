from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from llmscale.training.stop_request import STOP_SIGNALS, StopRequest


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    """An installed StopRequest; the handlers that were there before come back."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    request = StopRequest()
    request.install()
    yield request
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_and_nothing_dies(stop: StopRequest, number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    assert stop.received == [signal.Signals(number).name]


def test_sigterm_may_come_as_often_as_it_likes(stop: StopRequest) -> None:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received == ["SIGTERM"] * 3


START = """
import os, signal, time, threading
from llmscale.training.stop_request import StopRequest
StopRequest().install()
"""


def run_python(code: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_a_second_sigint_ends_the_process_at_once() -> None:
    code = (
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(0.2)\n"
        "print('first', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(50)\n"
        "print('second', flush=True)\n"
    )
    assert run_python(code) == (130, "first\n", "")


def test_it_ends_a_main_thread_that_runs_no_python() -> None:
    """As in a collective whose peer is dead."""
    code = (
        "import ctypes\n"
        "def twice():\n"
        "    for _ in range(2):\n"
        "        time.sleep(0.3)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=twice, daemon=True).start()\n"
        "mutex = ctypes.create_string_buffer(64)\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.pthread_mutex_lock(mutex)\n"
        "libc.pthread_mutex_lock(mutex)  # waits for itself, for ever\n"
    )
    assert run_python(code) == (130, "", "")


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
