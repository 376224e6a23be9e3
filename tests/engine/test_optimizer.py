from __future__ import annotations

import pytest
import torch
from torch import nn

from llmscale.architecture.shape import GPTShape
from llmscale.engine.optimizer import build_optimizer, build_parameter_groups
from llmscale.errors import ConfigError
from llmscale.model.gpt import GPT

SETTINGS = {"lr": 0.1, "weight_decay": 0.25, "betas": (0.9, 0.95), "eps": 1e-8}


def tiny_gpt() -> GPT:
    return GPT(GPTShape(1, 2, 8, 16, 4), seed=0)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = tiny_gpt()
    groups = {group["name"]: group for group in build_parameter_groups(model.named_parameters(), 0.25)}
    assert set(groups) == {"decay", "no_decay"}
    assert (groups["decay"]["weight_decay"], groups["no_decay"]["weight_decay"]) == (0.25, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[id(parameter)] for parameter in groups["decay"]["params"]}
    assert decayed == {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    assert any("bias" in names[id(parameter)] for parameter in groups["no_decay"]["params"])
    assert sum(len(group["params"]) for group in groups.values()) == len(names), "every parameter is in one group"


def test_a_parameter_that_zero3_flattened_keeps_its_own_dimensions() -> None:
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_shape = torch.Size([8, 8])  # type: ignore[attr-defined]
    assert [group["name"] for group in build_parameter_groups([("w", parameter)], 0.1)] == ["decay"]


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    frozen, vector = nn.Parameter(torch.ones(2, 2), requires_grad=False), nn.Parameter(torch.ones(2))
    groups = build_parameter_groups([("frozen", frozen), ("vector", vector)], 0.1)
    assert [group["name"] for group in groups] == ["no_decay"]
    assert groups[0]["params"][0] is vector


def test_adamw_is_fused_and_its_first_step_is_the_textbook_s() -> None:
    linear = nn.Linear(3, 2)
    nn.init.ones_(linear.weight)
    nn.init.ones_(linear.bias)
    optimizer = build_optimizer(linear, name="adamw", zero_stage=2, **SETTINGS)
    assert optimizer.defaults["fused"] is True
    for parameter in linear.parameters():
        parameter.grad = torch.full_like(parameter, -4.0)
    optimizer.step()
    # Adam's first step is lr in the gradient's direction; decoupled decay took lr x 0.25 of the matrix before.
    torch.testing.assert_close(linear.weight.detach(), torch.full((2, 3), 1 - 0.1 * 0.25 + 0.1))
    torch.testing.assert_close(linear.bias.detach(), torch.full((2,), 1 + 0.1))


def test_adafactor_factors_its_second_moment_at_stage_0() -> None:
    model = tiny_gpt()
    optimizer = build_optimizer(model, name="adafactor", zero_stage=0, **SETTINGS)
    model(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)).backward()
    optimizer.step()
    matrix = next(parameter for parameter in model.parameters() if parameter.ndim == 2)
    stored = sum(value.numel() for value in optimizer.state[matrix].values())
    assert stored <= sum(matrix.shape) + 1, "a row and a column, not a second matrix"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adafactor_is_refused_under_zero_and_told_what_to_use(stage: int) -> None:
    with pytest.raises(ConfigError) as raised:
        build_optimizer(tiny_gpt(), name="adafactor", zero_stage=stage, **SETTINGS)
    text = str(raised.value)
    assert f"'adafactor' cannot run at ZeRO stage {stage}" in text
    assert "--optimizer adamw" in text
    assert "ds_configs/zero0.json" in text
