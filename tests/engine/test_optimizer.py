from __future__ import annotations

import torch
from torch import nn

from llmscale.architecture.layers import ParameterKind, ParameterTensors
from llmscale.architecture.shape import GPTShape
from llmscale.config.optimizers import ADAFACTOR, ADAMW
from llmscale.engine.optimizers import build_optimizer, build_parameter_groups
from llmscale.model.gpt import GPT

SETTINGS = {"lr": 0.1, "weight_decay": 0.25, "betas": (0.9, 0.95), "eps": 1e-8}
KINDS: dict[str, ParameterKind] = {"w": "matrix", "b": "vector"}


def tiny_gpt() -> GPT:
    return GPT(GPTShape(1, 2, 8, 16, 4), seed=0)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = tiny_gpt()
    kinds = ParameterTensors(model.shape.architecture).kinds
    groups = {group["name"]: group for group in build_parameter_groups(model.named_parameters(), kinds, ADAMW, 0.25)}
    assert set(groups) == {"decay", "no_decay"}
    assert (groups["decay"]["weight_decay"], groups["no_decay"]["weight_decay"]) == (0.25, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[id(parameter)] for parameter in groups["decay"]["params"]}
    assert decayed == {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    assert any("bias" in names[id(parameter)] for parameter in groups["no_decay"]["params"])
    assert sum(len(group["params"]) for group in groups.values()) == len(names), "every parameter is in one group"


def test_an_untied_head_decays_as_the_embedding_does_and_norms_of_queries_do_not() -> None:
    shape = GPTShape(1, 2, 8, 16, 4, norm="rmsnorm", bias=False, qk_norm="head", tied=False, gated_mlp=True)
    model, kinds = GPT(shape, seed=0), shape.tensors.kinds
    assert kinds["head.weight"] == kinds["wte.weight"] == "embedding"
    groups = {group["name"]: group for group in build_parameter_groups(model.named_parameters(), kinds, ADAMW, 0.25)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    undecayed = {names[id(parameter)] for parameter in groups["no_decay"]["params"]}
    norms = ("ln_1", "ln_2", "attn.q_norm", "attn.k_norm")
    assert undecayed == {"ln_f.weight", *(f"blocks.0.{norm}.weight" for norm in norms)}
    assert "head.weight" in {names[id(parameter)] for parameter in groups["decay"]["params"]}


def test_a_parameter_that_zero3_flattened_keeps_its_group() -> None:
    parameter = nn.Parameter(torch.empty(0))
    assert [group["name"] for group in build_parameter_groups([("w", parameter)], KINDS, ADAMW, 0.1)] == ["decay"]


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    frozen, vector = nn.Parameter(torch.ones(2, 2), requires_grad=False), nn.Parameter(torch.ones(2))
    groups = build_parameter_groups([("frozen", frozen), ("b", vector)], KINDS, ADAMW, 0.1)
    assert [group["name"] for group in groups] == ["no_decay"]
    assert groups[0]["params"][0] is vector


def test_adamw_is_fused_and_its_first_step_is_the_textbook_s() -> None:
    linear = nn.Linear(3, 2)
    nn.init.ones_(linear.weight)
    nn.init.ones_(linear.bias)
    optimizer = build_optimizer(linear, {"weight": "matrix", "bias": "vector"}, ADAMW, **SETTINGS)
    assert optimizer.defaults["fused"] is True
    for parameter in linear.parameters():
        parameter.grad = torch.full_like(parameter, -4.0)
    optimizer.step()
    # The tensors and numbers that memory and disk space are counted from.
    for parameter, group in zip(linear.parameters(), ADAMW.groups, strict=True):
        assert set(optimizer.state[parameter]) == {*group.states, *group.scalars}
        assert all(optimizer.state[parameter][name].shape == parameter.shape for name in group.states)
        assert all(optimizer.state[parameter][name].numel() == 1 for name in group.scalars)
    # Adam's first step is lr in the gradient's direction; decoupled decay took lr x 0.25 of the matrix before.
    torch.testing.assert_close(linear.weight.detach(), torch.full((2, 3), 1 - 0.1 * 0.25 + 0.1))
    torch.testing.assert_close(linear.bias.detach(), torch.full((2,), 1 + 0.1))


def test_adafactor_factors_its_second_moment_at_stage_0() -> None:
    model = tiny_gpt()
    optimizer = build_optimizer(model, ParameterTensors(model.shape.architecture).kinds, ADAFACTOR, **SETTINGS)
    model(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)).backward()
    optimizer.step()
    matrix = next(parameter for parameter in model.parameters() if parameter.ndim == 2)
    stored = sum(value.numel() for value in optimizer.state[matrix].values())
    assert stored <= sum(matrix.shape) + 1, "a row and a column, not a second matrix"
