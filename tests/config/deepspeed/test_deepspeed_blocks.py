"""What an optimizer or scheduler block says is DeepSpeed's: its defaults, its learning rates."""

from __future__ import annotations

import inspect
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine

from llmscale.config.deepspeed.foreign import BLOCKS
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.describe_defaults import describe_schedule
from llmscale.config.resolve import SetFacts, resolve_run, with_ds_keys
from llmscale.config.run_arguments import parse_run_config
from llmscale.config.run_config import RunConfig
from llmscale.config.schedule import Schedule

STEPS = 20
PEAK = 3e-3
#: Schedulers, each with other values than its defaults.
PARAMS: dict[str, dict[str, object]] = {
    "WarmupLR": {"warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3, "warmup_num_steps": 6, "warmup_type": "linear"},
    "WarmupDecayLR": {
        "total_num_steps": 16,
        "warmup_min_lr": 1e-4,
        "warmup_max_lr": 2e-3,
        "warmup_num_steps": 6,
        "warmup_type": "linear",
    },
    "WarmupCosineLR": {
        "total_num_steps": 16,
        "warmup_min_ratio": 0.2,
        "warmup_num_steps": 6,
        "cos_min_ratio": 0.1,
        "warmup_type": "linear",
    },
}
CASES = [
    (kind, frozenset(left_out))
    for kind, params in PARAMS.items()
    for count in (0, 1, 2, len(params) - 1)
    for left_out in combinations([name for name in params if name != "total_num_steps"], count)
]


def read(file: dict[str, object], *flags: str, steps: int = STEPS) -> tuple[RunConfig, Schedule]:
    ds = parse_ds_config(file, "my.json")
    config = with_ds_keys(parse_run_config(["--model", "tiny-1m", "--steps", str(steps), *flags]), ds)
    return config, resolve_run(config, ds, SetFacts(4096, 128, 100_000, 0), 1).schedule


def deepspeed_rates(kind: str, params: dict[str, object]) -> list[float]:
    """Return the rates with which DeepSpeed's engine takes its steps: it sets the next one after a step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [6, 1])
@pytest.mark.parametrize(("kind", "left_out"), CASES)
def test_learning_rates_are_deepspeeds(kind: str, left_out: frozenset[str], warmup: int) -> None:
    params = {name: value for name, value in PARAMS[kind].items() if name not in left_out}
    if "warmup_num_steps" in params:
        params["warmup_num_steps"] = warmup
    optimizer = {"type": "AdamW", "params": {"lr": PEAK}}
    schedule = read({"optimizer": optimizer, "scheduler": {"type": kind, "params": params}})[1]
    rates = [schedule.learning_rate(step) for step in range(STEPS)]
    assert rates == pytest.approx(deepspeed_rates(kind, params), rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("kind", PARAMS)
def test_defaults_of_schedulers_are_those_of_deepspeeds_signatures(kind: str) -> None:
    signature = inspect.signature(getattr(lr_schedules, kind)).parameters
    own = {name: one.default for name, one in signature.items() if name not in ("optimizer", "last_batch_iteration")}
    block = BLOCKS["scheduler"][kind.lower()]
    assert block.defaults == {
        name: value for name, value in own.items() if value not in (None, inspect.Parameter.empty)
    }
    assert list(block.required) == [name for name, value in own.items() if value is inspect.Parameter.empty]
    assert own.keys() <= block.names.keys()
    assert set(BLOCKS["scheduler"]) == {name.lower() for name in PARAMS}


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize("torch_adam", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_defaults_of_optimizers_are_those_of_the_classes_that_deepspeed_builds(
    kind: str, torch_adam: bool, offload: bool
) -> None:
    engine = SimpleNamespace(zero_use_cpu_optimizer=lambda: offload, zenflow=False, bf16_optimizer_states=lambda: False)
    built, _ = DeepSpeedEngine.get_optimizer_configuration(engine, {"torch_adam": torch_adam}, True)
    signature = inspect.signature(built).parameters
    config, _ = read({"optimizer": {"type": kind, "params": {"torch_adam": torch_adam}}})
    got = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    assert got == {name: signature[name].default for name in got}


def test_the_start_says_each_default() -> None:
    file = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 12, "warmup_num_steps": 2}},
    }
    text = " ".join(parse_ds_config(file, "my.json").warnings)
    assert 'DeepSpeed\'s default: warmup_min_ratio 0.0, cos_min_ratio 0.0001, warmup_type "log".' in text
    assert "DeepSpeed's default: betas [0.9, 0.999], eps 1e-08, weight_decay 0.0." in text
    named = parse_ds_config({"scheduler": {"type": "WarmupDecayLR"}}, "my.json").warnings[0]
    assert "total_num_steps, for which DeepSpeed has no default, is the steps of the run." in named


def test_an_empty_block_is_its_type() -> None:
    config, schedule = read({"scheduler": {"type": "WarmupLR", "params": {}}})
    assert (config.schedule, schedule.warmup_steps) == ("WarmupLR", 1000)
    assert describe_schedule(schedule) == "1,000 warm-up steps (log, from 0), constant (WarmupLR)"
    assert schedule.learning_rate(5000) == schedule.learning_rate(50_000) == schedule.lr
    # All "auto" is llmscale's own values in a schedule of the named type.
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    config, schedule = read({"scheduler": {"type": "WarmupLR", "params": params}}, steps=500)
    assert (config.schedule, schedule.warmup_steps, config.warmup_type) == ("WarmupLR", 5, "log")


def test_flags_go_before_deepspeeds_defaults() -> None:
    file = {
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 40}},
    }
    assert read(file)[1].lr == 1e-3, "the scheduler's own default, as in DeepSpeed"
    config, schedule = read(file, "--lr", "1e-4", "--weight-decay", "0.2", "--warmup-steps", "3")
    assert (schedule.lr, config.weight_decay, schedule.warmup_steps, config.beta2) == (1e-4, 0.2, 3, 0.999)
    # Another schedule takes what is written alone: a warm-up of 1,000 steps is not.
    config, schedule = read(file, "--schedule", "cosine")
    assert (config.schedule, schedule.warmup_steps, schedule.decay_steps, schedule.lr) == ("cosine", 0, 40, 2e-3)
    assert (config.warmup_type, config.warmup_min_lr) == (None, None)
    # A floor that a flag gives goes before warmup_min_lr.
    _, schedule = read(file, "--min-lr-frac", "0.5", "--warmup-steps", "3")
    assert schedule.learning_rate(10_000) == pytest.approx(0.5 * schedule.lr)
    config, schedule = read(file, "--optimizer", "muon")
    assert (config.lr, config.schedule) == (None, "WarmupDecayLR")
