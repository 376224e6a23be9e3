from __future__ import annotations

import time

import pytest
import torch

from llmscale.engine.train_step import PhaseTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that shows the one number in the list."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_seconds_go_to_the_phase_that_was_running(clock: list[float]) -> None:
    timer = PhaseTimer(torch.device("cpu"))
    for phase, seconds in (("data_wait", 1.0), ("forward_backward", 4.0), ("optimizer_step", 2.0), ("data_wait", 0.5)):
        timer.mark(phase)
        clock[0] += seconds
    assert timer.read() == {"data_wait": 1.5, "forward_backward": 4.0, "optimizer_step": 2.0, "other": 0.0}


def test_a_running_phase_goes_on_after_a_read_and_is_not_counted_twice(clock: list[float]) -> None:
    timer = PhaseTimer(torch.device("cpu"))
    timer.mark("forward_backward")
    clock[0] += 3
    assert timer.read()["forward_backward"] == 3
    clock[0] += 2
    assert timer.read()["forward_backward"] == 2
    assert timer.read()["forward_backward"] == 0


def test_nothing_marked_is_nothing_measured() -> None:
    assert set(PhaseTimer(torch.device("cpu")).read().values()) == {0.0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_phase_is_the_device_s_time() -> None:
    timer = PhaseTimer(torch.device("cuda"))
    matrix = torch.randn(4096, 4096, device="cuda")
    timer.mark("forward_backward")
    for _ in range(20):
        matrix = matrix @ matrix
    timer.mark("other")
    seconds = timer.read()
    assert seconds["forward_backward"] > 10 * seconds["other"]
