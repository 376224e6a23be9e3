"""Sensors of a fake NVML, which torch's own code asks; lines by the clock; the pace of a start; collapsed routers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from llmscale.architecture.shape import GPTShape
from llmscale.config.loss_settings import LossSettings
from llmscale.model.gpt import GPT
from llmscale.training import log_steps
from llmscale.training.live_run import Engine, Run, RunIO, StepResult
from llmscale.training.log_steps import (
    MIN_READINGS,
    PATIENCE_STEPS,
    CollapseDetector,
    LogSteps,
    ReportPace,
    RouterLog,
    read_gpu,
)

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


SHAPE = GPTShape(3, 2, 16, 64, 40, num_experts=4, dense_layers=1, bias=False, router_bias=True)
#: Of two blocks with four experts each, 40 tokens sent to two.
EVEN = np.full((2, 4), 20.0)


class Lines:
    """Records what is reported and logged."""

    def __init__(self) -> None:
        self.reported: list[str] = []
        self.events: list[dict] = []
        self.log = self

    def report(self, line: str) -> None:
        self.reported.append(line)

    def log_event(self, event: str, **values: object) -> None:
        self.events.append({"event": event, **values})


@pytest.fixture
def model() -> GPT:
    return GPT(SHAPE, seed=0, loss=LossSettings(balance_loss=0.02, router_z_loss=0.5)).train()


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def log(model: GPT, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> RouterLog:
    """A log of one of two ranks with the same tokens, whose sequences have half of their final length."""
    monkeypatch.setattr(log_steps.dist, "all_reduce", lambda tensor: tensor.mul_(2))
    resolved = SimpleNamespace(shape=SHAPE, loss=model.loss, total_steps=500)
    run = cast("Run", SimpleNamespace(resolved=resolved, seq_len=lambda step: 20))
    engine = cast("Engine", SimpleNamespace(deepspeed=SimpleNamespace(module=model)))
    return RouterLog(run, engine, cast("RunIO", lines))


def test_metrics_are_those_of_all_tokens(log: RouterLog, model: GPT, lines: Lines) -> None:
    tokens = torch.randint(64, (3, 21), generator=torch.Generator().manual_seed(0))
    seen = []
    for block in model.blocks[1:]:
        # So large that it moves every token to the first two experts.
        block.mlp.router.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
        block.mlp.router.register_forward_hook(lambda module, inputs, logits: seen.append(logits.detach()))
    model(tokens[:, :-1], tokens[:, 1:])
    values = log.read(7)
    scores = [logits.softmax(-1) for logits in seen]
    moved = [(score.topk(2).indices.sort(-1).values != torch.tensor([0, 1])).any(-1) for score in scores]
    entropies = [-(score * score.log()).sum(-1) for score in scores]
    squares = [logits.logsumexp(-1).square() for logits in seen]
    balance = sum(2 * (score[:, :2].sum(-1)).mean() for score in scores)
    assert (values["expert_load_max"], values["expert_load_mean"], values["expert_load_min"]) == (2.0, 2.0, 0.0)
    assert values["tokens_moved"] == pytest.approx(float(torch.cat(moved).float().mean()), abs=1e-6)
    assert values["router_entropy"] == pytest.approx(float(torch.cat(entropies).mean()), abs=1e-6)
    assert 0 < values["router_entropy"] <= math.log(4)
    expected = 0.02 * float(balance) + 0.5 * sum(float(square.mean()) for square in squares)
    assert values["router_loss"] == pytest.approx(expected, abs=1e-5)
    assert lines.events == [{"event": "expert_load", "step": 7, "blocks": [1, 2], "loads": [[2.0, 2.0, 0.0, 0.0]] * 2}]


def test_loads_are_recorded_ever_less_often_and_at_the_end(log: RouterLog, model: GPT, lines: Lines) -> None:
    for step in (1, *range(10, 501, 10)):
        model.routing = torch.cat((torch.full((2, 4), 20.0), torch.ones(2, 4)), 1)
        log.read(step)
    steps = [event["step"] for event in lines.events]
    assert steps[:4] == [1, 10, 20, 30]
    assert steps[-2:] == [480, 500]
    assert len(steps) < 20
    assert not lines.reported


def test_a_collapsed_router_is_named_once(log: RouterLog, model: GPT, lines: Lines) -> None:
    for step in range(10, 300, 10):
        loads = torch.tensor(EVEN)
        if step >= 50:
            loads[1] = torch.tensor([40.0, 40.0, 0.0, 0.0])
        model.routing = torch.cat((loads, torch.ones(2, 4)), 1).float()
        log.read(step)
    assert lines.reported == [
        "WARNING: step 150: the router of block 2 has collapsed: less than 0.001 of the mean load has gone "
        "to experts 2, 3 of 4 since step 50. "
        "Raise router_bias_speed (now 0), give router_z_loss 1e-3, lower the learning rate or lengthen the warm-up, "
        "from a checkpoint before that"
    ]
    [event] = [event for event in lines.events if event["event"] == "collapsed_router"]
    assert (event["step"], event["blocks"], event["experts"], event["since"]) == (150, [2], [2, 3], 50)


@pytest.mark.parametrize("every", [1, 60])
def test_a_collapse_lasts_and_is_seen_often(every: int) -> None:
    detector, one_full = CollapseDetector(2, 4), EVEN.copy()
    one_full[0] = [39, 20, 11, 10]
    for number in range(1, 1000):
        collapse = detector.add(number * every, one_full, 40)
        if collapse is not None:
            break
    assert collapse == ([0], [0], "over 95% of the tokens have gone to", every)
    assert number * every - every >= PATIENCE_STEPS
    assert number >= MIN_READINGS


def test_experts_with_a_few_of_many_tokens_are_unused() -> None:
    detector, loads = CollapseDetector(1, 64), np.ones((1, 64))
    loads[0, :4] = 500_000 - 15
    findings = [detector.add(step, loads, 500_000) for step in range(PATIENCE_STEPS + 1)]
    assert findings[:-1] == [None] * PATIENCE_STEPS
    assert findings[-1] is not None
    assert findings[-1][1] == list(range(4, 64))


def test_no_expert_is_overloaded_where_most_are_chosen() -> None:
    detector, loads = CollapseDetector(1, 16), np.full((1, 16), 960.0)
    loads[0, :8] = 915.0
    assert all(detector.add(step, loads, 1000) is None for step in range(400))


@pytest.mark.parametrize(
    "loads",
    [
        pytest.param([EVEN, [[0, 40, 20, 20]] * 2], id="an expert without tokens now and then"),
        pytest.param([[[0, 4, 2, 2]] * 2], id="few tokens"),
        pytest.param([np.full((2, 4), 40.0)], id="every token takes all experts"),
    ],
)
def test_chance_is_no_collapse(loads: list) -> None:
    detector = CollapseDetector(2, 4)
    tokens = 4 if len(loads) == 1 and np.max(loads[0]) == 4 else 40
    for step in range(400):
        assert detector.add(step, np.array(loads[step % len(loads)], dtype=float), tokens) is None
