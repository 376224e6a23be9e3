from __future__ import annotations

from types import FunctionType

import pytest
import torch
from torch import Tensor, nn

from llmscale.config.optimizers import MUON
from llmscale.engine.optimizers import Muon, build_optimizer, newton_schulz, orthogonalise

SETTINGS = {"lr": 0.1, "weight_decay": 0.25, "betas": (0.9, 0.95), "eps": 1e-8}


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_singular_values_end_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    result = newton_schulz(matrix.clone(), torch.float32)
    values = (left.T @ result @ right.T).diagonal()
    assert values.min() > 0.5
    assert values.max() < 1.3


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_in_bf16_it_is_torchs_own(shape: tuple[int, int]) -> None:
    from torch.optim import _muon

    iterate: FunctionType = _muon._zeropower_via_newtonschulz
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    kept = matrix.clone()
    result = newton_schulz(matrix, torch.bfloat16)
    assert torch.equal(matrix, kept)
    assert torch.equal(result, iterate(kept, (3.4445, -4.7750, 2.0315), 5, 1e-7))


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
