from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from llmscale.engine.train_step import PhaseTimer
from llmscale.report.data import build_report
from llmscale.report.history import COLUMNS
from llmscale.training.metrics import MetricsLog, Tracker
from llmscale.training.step_metrics import METRICS, StepMeter, format_duration, format_step
from tests.conftest import HANG_S
from tests.training.made_metrics import make_metrics


class Memory(Tracker):
    name = "memory"

    def __init__(self) -> None:
        self.logged: list[tuple[dict, int]] = []
        self.finished = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.logged.append((dict(values), step))

    def finish(self) -> None:
        self.finished = True


def read(folder: Path) -> list[dict]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert all(abs(record.pop("time") - time.time()) < HANG_S for record in records)
    return records


def test_the_console_line() -> None:
    assert format_step(make_metrics(), 100) == (
        "step     20/100 | loss 3.1416 | lr 6.00e-04 | norm 0.500 "
        "| 12,346 tok/s (6,173/device) | mfu 41.5% | mem 3.00 GiB | eta 1h02m"
    )
    unknown = make_metrics(grad_norm=None, mfu=None, loss_scale=65536.0, skipped_steps=2)
    assert "| norm - | scale 65536 | skipped 2 | 12,346" in format_step(unknown, 100)
    assert "| mfu - |" in format_step(unknown, 100)


def test_the_line_of_experts_and_fp16() -> None:
    sparse = make_metrics(expert_load_min=0.5, expert_load_max=1.5, tokens_moved=0.25, loss_scale=1024.0)
    assert "| scale 1024 | experts 0.50 to 1.50, 25.0% moved | 12,346" in format_step(sparse, 100)


def test_a_declared_metric_is_in_the_line_the_record_and_the_report(tmp_path: Path) -> None:
    """One declaration is all: its column, its chart with unit, and its part of the line follow."""
    numbers = {name for name, declared in METRICS.items() if declared.is_column}
    assert {*COLUMNS} == numbers | {"time"}
    log = MetricsLog(tmp_path, 30)
    log.log_step(make_metrics())
    log.close()
    charts = {chart["title"]: chart for chart in build_report([tmp_path])["charts"]}  # type: ignore[attr-defined]
    declared = {name: metric.chart for name, metric in METRICS.items() if metric.chart}
    assert declared.keys() <= numbers
    given = {chart.title for name, chart in declared.items() if getattr(make_metrics(), name) is not None}
    assert given and given <= charts.keys()
    assert charts["Model FLOPs utilisation"]["curves"][0]["values"] == [41.5]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (200, "3m20s"), (18_420, "5h07m"), (187_200, "2d04h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_sensors_are_in_the_record_and_the_report_where_there_are_some(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 30)
    log.log_step(make_metrics(step=1))
    log.log_step(make_metrics(step=2, power_w=650.0, temperature_c=63, gpu_utilisation=0.97))
    log.close()
    first, second = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert not {"power_w", "temperature_c", "gpu_utilisation"} & first.keys()
    assert (second["power_w"], second["temperature_c"], second["gpu_utilisation"]) == (650.0, 63, 0.97)
    charts = {chart["title"]: chart for chart in build_report([tmp_path])["charts"]}  # type: ignore[attr-defined]
    assert charts["Power"]["curves"][0]["values"] == [None, 650.0]


def test_what_is_no_number_is_null_and_the_file_stays_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 100)
    log.log_step(make_metrics(loss=float("nan"), grad_norm=float("inf")))
    log.close()
    (record,) = read(tmp_path)
    assert (record["loss"], record["grad_norm"], record["lr"]) == (None, None, 6e-4)


def test_a_start_says_which_version_of_the_records_follows(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 100)
    log.begin(7, history=2)
    log.log_event("nonfinite", step=7, loss_scale_history=[(6, math.inf)])
    log.close()
    start, event = read(tmp_path)
    assert (start["event"], start["step"], start["metrics_version"], start["history"]) == ("start", 7, 1, 2)
    assert event["loss_scale_history"] == [[6, None]]


def test_a_second_start_appends_and_a_torn_line_does_not_swallow_the_next_record(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "tr')
    log = MetricsLog(tmp_path, 100)
    log.log_event("resumed")
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["train", "event"]


def test_trackers_get_the_same_numbers_at_the_same_step(tmp_path: Path) -> None:
    run = Memory()
    log = MetricsLog(tmp_path, 100, [run])
    log.log_step(make_metrics(loss_by_set={"web": 3.0}))
    log.log_validation(20, 2.5, 64, samples="64 sequences")
    log.close()
    (train, train_step), (validation, validation_step) = run.logged
    assert (train["train/loss"], train["train/tokens_seen"], train_step) == (3.14159, 163_840, 20)
    assert train["train/loss_by_set/web"] == 3.0
    assert "train/loss_scale" not in train, "what is unknown is left out"
    assert (validation, validation_step) == ({"validation/loss": 2.5}, 20)
    assert run.finished


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [50.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_pauses_are_taken_out_and_phases_divided_by_steps(clock: list[float]) -> None:
    meter = StepMeter(PhaseTimer(torch.device("cpu")))
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
    meter = StepMeter(PhaseTimer(torch.device("cpu")))
    clock[0] += 9
    meter.count_step()
    assert meter.read().step_s == 9
    clock[0] += 3
    meter.count_step()
    meter.count_step()
    assert meter.read().step_s == 1.5


def test_a_pause_that_fails_still_ends(clock: list[float]) -> None:
    meter = StepMeter(PhaseTimer(torch.device("cpu")))
    with pytest.raises(ValueError, match="disk"), meter.pause("saving"):
        clock[0] += 5
        raise ValueError("disk")
    clock[0] += 1
    meter.count_step()
    assert meter.read().step_s == 1
