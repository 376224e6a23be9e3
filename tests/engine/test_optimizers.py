from __future__ import annotations

from types import FunctionType

import pytest
import torch
from torch import Tensor, nn

from llmscale.architecture.layers import ParameterKind, ParameterTensors
from llmscale.architecture.shape import GPTShape
from llmscale.config.optimizers import ADAFACTOR, ADAMW, MUON
from llmscale.engine.optimizers import Muon, build_optimizer, build_parameter_groups, newton_schulz, orthogonalise
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
    decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays["decay"] == pytest.approx(0.02 * SETTINGS["weight_decay"]), "its learning rate is 50 times AdamW's"


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_in_bf16_it_is_torchs_own(shape: tuple[int, int]) -> None:
    from torch.optim import _muon

    iterate: FunctionType = _muon._zeropower_via_newtonschulz
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    remaining = matrix.clone()
    result = newton_schulz(matrix, torch.bfloat16)
    assert torch.equal(matrix, remaining)
    assert torch.equal(result, iterate(remaining, (3.4445, -4.7750, 2.0315), 5, 1e-7))


@pytest.mark.parametrize("shape", [(64, 64), (16, 256), (256, 16)])
def test_an_update_is_as_large_as_adamws(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    orthogonalise(matrix, torch.float32)
    assert 0.15 < matrix.square().mean().sqrt() < 0.25


def test_a_matrix_of_zeros_stays_zero() -> None:
    matrix = torch.zeros(4, 6)
    orthogonalise(matrix, torch.float32)
    assert torch.equal(matrix, torch.zeros(4, 6))


def built() -> tuple[nn.Linear, Muon]:
    linear = nn.Linear(3, 2)
    optimizer = build_optimizer(linear, {"weight": "matrix", "bias": "vector"}, MUON, **SETTINGS)
    assert isinstance(optimizer, Muon)
    for parameter in linear.parameters():
        parameter.grad = torch.ones_like(parameter)
    return linear, optimizer


def test_matrices_have_momentum_and_the_rest_what_adamw_has() -> None:
    """The tensors that memory and disk space are counted from."""
    linear, optimizer = built()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    matrix, vector = MUON.group_of("matrix"), MUON.group_of("vector")
    assert set(optimizer.state[linear.weight]) == {*matrix.states, *matrix.scalars}
    assert set(optimizer.state[linear.bias]) == {*vector.states, *vector.scalars}


def test_a_step_of_length_zero_moves_the_momentum_alone() -> None:
    """So are DeepSpeed's own steps at start-up, and the first one of a warm-up."""
    linear, optimizer = built()
    before: list[Tensor] = [parameter.detach().clone() for parameter in linear.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, linear.parameters(), strict=True))
    momentum = optimizer.state[linear.weight]["momentum_buffer"]
    torch.testing.assert_close(momentum, torch.full((2, 3), 0.05))
