"""Records of steps, the clock, and trackers: failures, TensorBoard read back, wandb. Run as a script, it is a rank."""

from __future__ import annotations

import json
import math
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llmscale.config.run_arguments import parse_run_config
from llmscale.engine.train_step import PhaseTimer
from llmscale.errors import ConfigError
from llmscale.report.data import build_report
from llmscale.report.history import COLUMNS
from llmscale.terminal.human_numbers import format_duration
from llmscale.training import metrics
from llmscale.training.metrics import MetricsLog, Tracker, start_tensorboard, start_wandb
from llmscale.training.step_metrics import METRICS, StepMeter, format_step
from tests.conftest import HANG_S, read_losses, run_ranks
from tests.training.made_metrics import make_metrics


def test_what_fails_is_said_once_and_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """At steps 2 to 4, and at the end."""
    arrived: list[int] = []

    def write(values: Mapping[str, float], step: int) -> None:
        if 2 <= step <= 4:
            raise RuntimeError("its server\nis gone")
        arrived.append(step)

    def end() -> None:
        raise OSError(28, "No space left on device")

    tracker = Tracker("flaky", write, end)
    for step in range(1, 7):
        tracker.log({"train/loss": 1.0}, step)
    tracker.finish()
    assert arrived == [1, 5, 6]
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(":")[1].split(". ")[0].strip() for line in lines] == [
        "flaky failed at step 2",
        "flaky works again",
        "flaky could not finish",
    ]
    assert "its server is gone" in lines[0]
    assert "3 records of steps 2 to 4" in lines[1]


def read_curves(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard draws: every file in turn, and a start drops what came before it of its step and later."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    curves: dict[str, dict[int, float]] = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = event_pb2.Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.session_log.status == event_pb2.SessionLog.START:
                curves = {name: {s: v for s, v in points.items() if s < event.step} for name, points in curves.items()}
            for value in event.summary.value:
                curves.setdefault(value.tag, {})[event.step] = value.simple_value
    return curves


def test_a_start_that_goes_back_drops_what_came_later(tmp_path: Path) -> None:
    first = start_tensorboard(tmp_path, first_step=0)
    for step in range(1, 11):
        first.log({"train/loss": float(step)}, step)
    first.roll_back(6)
    for step in range(7, 9):
        first.log({"train/loss": 100.0 + step}, step)
    first.finish()
    again = start_tensorboard(tmp_path, first_step=8)
    again.log({"train/loss": 200.0}, 9)
    again.finish()
    assert read_curves(tmp_path / "tensorboard") == {
        "train/loss": {**{step: float(step) for step in range(1, 7)}, 7: 107.0, 8: 108.0, 9: 200.0}
    }


def test_a_resumed_run_goes_on_with_the_same_curves_and_without_wandb(train_command: Callable, tmp_path: Path) -> None:
    flags = ("--tensorboard", "--precision", "fp32", "--val-every", "2")
    for steps in ("4", "6"):
        output = run_ranks([__file__, *train_command(*flags, "--steps", steps)[1:]], 1)
        assert "wandb imported: False" in output
    curves = read_curves(tmp_path / "run/tensorboard")
    assert curves["train/loss"] == pytest.approx(read_losses(tmp_path / "run"))
    assert sorted(curves["validation/loss"]) == [2, 4, 6]
    assert sorted(curves["train/lr"]) == list(range(1, 7))


def test_a_missing_writer_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"--tensorboard needs tensorboardX: `pip install -e .*\[tensorboard\]"):
        start_tensorboard(tmp_path, first_step=0)


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be started.*Not a directory"):
        start_tensorboard(tmp_path, first_step=0)


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        ((), {}, ("llmscale", "run", None)),
        ((), {"WANDB_PROJECT": "mine", "WANDB_NAME": "first", "WANDB_DIR": "/wandb"}, ("mine", "first", "/wandb")),
        (
            ("--wandb-project", "p", "--wandb-name", "n"),
            {"WANDB_PROJECT": "mine", "WANDB_NAME": "first"},
            ("p", "n", None),
        ),
    ],
)
def test_variables_of_wandb_count_unless_a_flag_says_otherwise(
    flags: tuple[str, ...],
    variables: dict[str, str],
    expected: tuple[str, str, str | None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    given: dict[str, object] = {}

    def init(**words: object) -> SimpleNamespace:
        given.update(words)
        return SimpleNamespace(id="id", finish=None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = parse_run_config(["--data", "d", "--run", str(tmp_path / "run"), "--model", "tiny-1m", "--wandb", *flags])
    resolved = SimpleNamespace(as_dict=dict)
    metrics.start_trackers(config, resolved, first_step=0, wandb_run_id=None)  # type: ignore[arg-type]
    project, name, folder = expected
    assert (given["project"], given["name"], given["dir"]) == (project, name, folder or str(tmp_path / "run"))
    assert "entity" not in given, "wandb reads WANDB_ENTITY itself"


@pytest.mark.slow
def test_offline_runs_leave_their_files_in_the_run_folder_and_continue_under_one_id(
    ranks: Callable, train_command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    flags = ("--wandb", "--wandb-name", "a name", "--steps", "3", "--val-every", "3", "--notify", "true a-token")
    job = ranks([__file__, *train_command(*flags)[1:]], 2)
    outputs = job.wait()
    assert job.exit_codes == [0, 0], outputs
    assert "wandb imported: True" in outputs[0]
    assert "wandb imported: False" in outputs[1], "only the main rank logs"
    files = list(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1
    content = files[0].read_bytes()
    for word in (b"train/loss", b"train/tokens_per_second", b"validation/loss", b"a name"):
        assert word in content
    sent = [file for file in run.glob("wandb/offline-run-*/**/*") if file.is_file() and "logs" not in file.parts]
    for file in sent:
        for word in ("a-token", str(tmp_path), str(Path.cwd())):
            assert word.encode() not in file.read_bytes(), f"{word} leaves the machine in {file.name}"
    state = json.loads((run / "checkpoints/step-00000003/state.json").read_text())
    assert state["wandb_run_id"] == files[0].stem.removeprefix("run-")


def test_a_missing_wandb_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"--wandb needs wandb: `pip install -e .*\[train\]"):
        start_wandb(tmp_path, project="p", name="n", config={}, run_id=None)


def test_without_an_account_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError) as raised:
        start_wandb(tmp_path, project="p", name="n", config={}, run_id=None)
    assert "No API key configured. Use `wandb login` to log in." in str(raised.value)
    assert "WANDB_MODE=offline" in str(raised.value)
    assert "\n" not in str(raised.value)


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
    logged: list[tuple[dict, int]] = []
    ends: list[bool] = []
    tracker = Tracker("memory", lambda values, step: logged.append((dict(values), step)), lambda: ends.append(True))
    log = MetricsLog(tmp_path, 100, [tracker])
    log.log_step(make_metrics(loss_by_set={"web": 3.0}))
    log.log_validation(20, 2.5, 64, samples="64 sequences")
    log.close()
    (train, train_step), (validation, validation_step) = logged
    assert (train["train/loss"], train["train/tokens_seen"], train_step) == (3.14159, 163_840, 20)
    assert train["train/loss_by_set/web"] == 3.0
    assert "train/loss_scale" not in train, "what is unknown is left out"
    assert (validation, validation_step) == ({"validation/loss": 2.5}, 20)
    assert ends == [True]


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


if __name__ == "__main__":
    from llmscale.train import main

    status = main()
    print("wandb imported:", "wandb" in sys.modules, flush=True)
    sys.exit(status)
