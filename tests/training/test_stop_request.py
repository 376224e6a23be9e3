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


def test_a_second_sigint_ends_the_process_at_once() -> None:
    code = (
        "import os, signal\n"
        "from llmscale.training.stop_request import StopRequest\n"
        "StopRequest().install()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('first', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('second', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "first\n", "")
