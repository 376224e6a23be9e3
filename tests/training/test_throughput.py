from __future__ import annotations

import time

import pytest
import torch

from llmscale.training.throughput import StepMeter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [50.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_pauses_are_taken_out_and_phases_divided_by_steps(clock: list[float]) -> None:
    meter = StepMeter(torch.device("cpu"))
    for _ in range(2):
        for phase, seconds in (("data_wait", 1.0), ("forward_backward", 4.0), ("optimizer_step", 2.0), ("other", 0.5)):
            meter.phases.mark(phase)
            clock[0] += seconds
        meter.count_step()
        with meter.pause("saving"):
            clock[0] += 100
    interval = meter.read()
    assert (interval.step_s, interval.data_wait_s) == (7.5, 1.0)
    assert (interval.forward_backward_s, interval.optimizer_step_s) == (4.0, 2.0)
    assert interval.other_s == 0.5


def test_each_reading_begins_anew(clock: list[float]) -> None:
    meter = StepMeter(torch.device("cpu"))
    clock[0] += 9
    meter.count_step()
    assert meter.read().step_s == 9
    clock[0] += 3
    meter.count_step()
    meter.count_step()
    assert meter.read().step_s == 1.5


def test_a_pause_that_fails_still_ends(clock: list[float]) -> None:
    meter = StepMeter(torch.device("cpu"))
    with pytest.raises(ValueError, match="disk"), meter.pause("saving"):
        clock[0] += 5
        raise ValueError("disk")
    clock[0] += 1
    meter.count_step()
    assert meter.read().step_s == 1
