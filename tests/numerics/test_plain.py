"""The plain model and optimizers: what they compute is all that a run may have, and is not torch's own class."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from llmscale.architecture.shape import GPTShape
from llmscale.config.loss_settings import DEFAULT_LOSS, LossSettings
from llmscale.config.optimizers import OptimizerName
from llmscale.config.presets import get_preset
from llmscale.config.run_config import RunConfig
from llmscale.errors import ConfigError
from llmscale.numerics.plain import (
    LOSS_SETTINGS,
    OPTIMIZERS,
    SHAPE_VALUES,
    Rule,
    check_is_plain,
    rule_of,
    step_adafactor,
)

SHAPE = get_preset("tiny-1m").shape(300, 32)
WRITE_IT = "write it in llmscale/numerics/plain.py (docs/development.md, What to touch)"


def choices(kind: object) -> set[object]:
    """Return the words of every Literal within a type, and None if that is a member."""
    if get_origin(kind) is Literal:
        return set(get_args(kind))
    inner = [choices(part) for part in get_args(kind)]
    found = set().union(*inner) if inner else set()
    return found | ({None} if found and type(None) in get_args(kind) else set())


def test_every_optimizer_has_a_plain_step() -> None:
    missing = sorted(set(get_args(OptimizerName)) - set(OPTIMIZERS))
    assert not missing, f"no plain step of optimizer {missing}: {WRITE_IT}"


def test_every_choice_of_a_shape_is_computed_plainly() -> None:
    hints = get_type_hints(GPTShape)
    missing = [
        f"{entry.name} {value!r}"
        for entry in fields(GPTShape)
        for value in sorted(choices(hints[entry.name]), key=str)
        if value not in SHAPE_VALUES.get(entry.name, ())
    ]
    assert not missing, f"no plain {missing}: {WRITE_IT}"
    assert choices(hints["activation"]) == set(SHAPE_VALUES["activation"])


def test_every_setting_of_the_loss_is_computed_plainly() -> None:
    missing = sorted({entry.name for entry in fields(LossSettings)} - set(LOSS_SETTINGS))
    assert not missing, f"no plain setting of the loss {missing}: {WRITE_IT}"


def test_what_is_not_plain_is_one_sentence() -> None:
    @dataclass(frozen=True)
    class MoreLoss(LossSettings):
        focal: float = 0.0

    check_is_plain("adamw", SHAPE, DEFAULT_LOSS)
    check_is_plain("adamw", SHAPE, MoreLoss())
    shape = replace(SHAPE)
    object.__setattr__(shape, "activation", "mish")
    with pytest.raises(ConfigError) as error:
        check_is_plain("lion", shape, MoreLoss(focal=2.0))
    with pytest.raises(ConfigError, match="cannot judge optimizer 'lion': "):
        rule_of(RunConfig().model_copy(update={"optimizer": "lion"}), "wte.weight", 2)
    assert "cannot judge optimizer 'lion', activation 'mish', focal 2.0: llmscale/numerics/plain.py" in str(error.value)


@pytest.mark.parametrize("shape", [(6, 4), (2, 6, 4), (5,)])
def test_adafactor_is_torchs(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    value = 0.02 * torch.randn(shape, generator=generator, dtype=torch.float64)
    parameter = torch.nn.Parameter(value.clone())
    eps = (torch.finfo(torch.float32).eps, 1e-3)
    optimizer = torch.optim.Adafactor([parameter], lr=0.05, weight_decay=0.01, eps=eps)
    states: dict[str, torch.Tensor] = {}
    for count in (1, 2, 3):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        value, states = step_adafactor(Rule(1.0, 0.01, "adafactor"), 0.05, count, value, gradient, states)
        assert torch.allclose(value, parameter.detach(), rtol=1e-12, atol=1e-15)
    for key, moment in states.items():
        assert torch.allclose(moment, optimizer.state[parameter][key], rtol=1e-12)
