from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from llmscale.model.gpt import Linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dims", [(5, 8), (2, 5, 8), (2, 3, 5, 8)])
def test_linear_is_a_product_over_the_last_dimension(dims: tuple[int, ...], bias: bool) -> None:
    layer = Linear(8, 6, torch.Generator().manual_seed(0), bias=bias)
    if bias:
        torch.nn.init.normal_(layer.bias)
    x = torch.randn(dims)
    assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-6)
