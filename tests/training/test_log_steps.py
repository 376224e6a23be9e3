"""Sensors of a fake NVML, which torch's own code asks; lines by the clock; the pace of a start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmscale.training import log_steps
from llmscale.training.live_run import StepResult
from llmscale.training.log_steps import LogSteps, ReportPace, read_gpu

GPU = torch.device("cuda", 0)


class NVMLError_DriverNotLoaded(Exception):
    pass


def answer(value):
    """A query of the GPU with index 1."""

    def query(handle, *sensor):
        if handle != "gpu 1":
            raise NVMLError_DriverNotLoaded("another device")
        return value

    return query


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(
        NVMLError_DriverNotLoaded=NVMLError_DriverNotLoaded,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu {index}",
        nvmlDeviceGetPowerUsage=answer(71_500),
        nvmlDeviceGetTemperature=answer(63),
        nvmlDeviceGetUtilizationRates=answer(SimpleNamespace(gpu=97, memory=40)),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "pynvml", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", True)
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    return fake


def test_it_is_that_of_the_visible_device(nvml: SimpleNamespace) -> None:
    assert read_gpu(GPU) == {"power_w": 71.5, "temperature_c": 63, "gpu_utilisation": 0.97}
    assert read_gpu(torch.device("cpu")) == {}


def test_what_is_not_told_is_left_out(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.nvmlDeviceGetTemperature = lambda handle, sensor: (_ for _ in ()).throw(OSError("Not Supported"))
    assert read_gpu(GPU) == {"power_w": 71.5, "gpu_utilisation": 0.97}
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", False)
    assert read_gpu(GPU) == {}


class Clock:
    """A clock that moves by hand, in place of the module `time`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(log_steps, "time", SimpleNamespace(monotonic=self.read, perf_counter=self.read))

    def read(self) -> float:
        return self.now


def made_run(folder: Path, **config: object) -> SimpleNamespace:
    """A run of 200 steps of 100 tokens."""
    return SimpleNamespace(
        config=SimpleNamespace(run=folder, minutes=None, log_every=10, **config),
        first_step=0,
        tokens_seen=lambda step: 100 * step,
        world=SimpleNamespace(world_size=1, device_name="cpu"),
        resolved=SimpleNamespace(
            total_steps=200,
            shape=SimpleNamespace(num_parameters=7),
            plan=SimpleNamespace(gradient_accumulation_steps=1),
        ),
        stream=SimpleNamespace(mix=None),
    )


def made_engine(compiler: object = None) -> Any:
    return SimpleNamespace(compiler=compiler, meter=SimpleNamespace(spent_s={"saving": 0.0}))


@pytest.mark.parametrize(("step_s", "logged"), [(1.5, [7, 10, 17]), (4.0, [3, 6, 9]), (20.0, [2, 3, 4])])
def test_early_lines_are_ten_seconds_apart_or_a_step_and_later_ones_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, logged: list[int]
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(log_steps, "RouterLog", lambda *parts: None)
    monkeypatch.setattr(log_steps, "ArithmeticProbe", lambda *parts: None)
    log = LogSteps(made_run(tmp_path), SimpleNamespace(deepspeed=None), SimpleNamespace(log="rank 0"))
    steps = []
    for step in range(1, 401):
        if log.due_by_clock():
            log.add(step)
        clock.now += step_s
        if log.due(step) and step > 1:
            log._last_line_s = clock.now
            steps.append(step)
    assert steps[:3] == logged
    after = [step for step in steps if step * step_s > log_steps._EARLY_S + 10]
    assert after == [step for step in range(10, 401, 10) if step >= after[0]]


def test_a_start_says_once_how_long_the_run_takes_without_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, lines, engine = Clock(monkeypatch), list[str](), made_engine()
    pace = ReportPace(made_run(tmp_path), engine, SimpleNamespace(report=lines.append))
    for step in range(1, 6):
        if pace.due(step):
            pace.run(StepResult(step, [], torch.zeros(()), was_skipped=False))
        clock.now += 4.0
        if step == 1:
            engine.meter.spent_s["saving"] += 1.0
            clock.now += 1.0
    (line,) = lines
    # 197 steps of 4 s.
    assert "13m08s" in line and " 25 tokens/s" in line and "--minutes" in line


@pytest.mark.parametrize(("eager_s", "pays_after"), [(None, 70), (2.0, 10), (0.5, None)])
def test_compiling_has_paid_after_what_it_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager_s: float | None, pays_after: int | None
) -> None:
    """Compiled steps of 1 s, after 10 s of compiling; the eager start before was on one more device, or had steps."""
    clock, events = Clock(monkeypatch), dict[str, Any]()
    facts = {"world_size": 1, "micro_batch_size": 2, "device": "cpu"}
    monkeypatch.setattr(log_steps, "_facts", lambda run: facts)
    start = {"kind": "event", "event": "start", "compile": "off", **facts}
    start |= {"world_size": 2} if eager_s is None else {}
    rates = [{"kind": "train", "tokens_per_second": 100 / (seconds or 3)} for seconds in (9, eager_s, eager_s)]
    now = {**start, "compile": "inductor"}
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in [start, *rates, now]))
    io: Any = SimpleNamespace(report=lambda line: None, log_event=lambda event, **values: events.update(values))
    pace = ReportPace(made_run(tmp_path), made_engine(SimpleNamespace(compile_s=10.0)), io)
    for step in range(1, 40):
        if pace.due(step):
            pace.run(StepResult(step, [], torch.zeros(()), was_skipped=False))
        clock.now += 1.0
    assert (events["pays_after_steps"], events["is_measured"]) == (pays_after, eager_s is not None)
    assert events["tokens_per_second"] == 100
