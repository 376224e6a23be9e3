from __future__ import annotations

from typing import Any

import pytest
import torch

from llmscale.architecture.shape import GPTShape
from llmscale.errors import ConfigError
from llmscale.evaluate.prune import ModelWeights, check_sparse_cores, prune_linear_layers
from llmscale.model.gpt import GPT


@pytest.mark.parametrize("experts", [{}, {"num_experts": 3, "expert_width": 12, "dense_layers": 1, "bias": False}])
def test_of_every_four_weights_the_two_smallest_are_zero(experts: dict[str, Any]) -> None:
    model = GPT(GPTShape(2, 2, 16, 257, 8, **experts), seed=0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    pruned = prune_linear_layers(model, for_gpu=False)
    blocks = {name for name in before if name.startswith("blocks.") and "router" not in name}
    layers = {name for name in blocks if before[name].dim() >= 2}
    assert (pruned.num_layers, pruned.num_zeros) == (len(layers), pruned.num_weights // 2)
    assert pruned.num_weights == sum(before[name].numel() for name in layers)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, weight in before.items():
        if name not in layers:
            assert torch.equal(after[name], weight)
            continue
        groups, pruned_groups = weight.view(-1, 4), after[name].detach().view(-1, 4)
        largest = groups.abs().topk(2, dim=1).indices
        assert torch.equal(pruned_groups, torch.zeros_like(groups).scatter(1, largest, groups.gather(1, largest)))
    flat = ModelWeights(model).read("blocks.0.mlp.up.weight", 3, 8)
    assert torch.equal(flat, after["blocks.0.mlp.up.weight"].detach().flatten()[3:11])


def test_inputs_that_are_no_multiple_of_four_are_refused() -> None:
    model = GPT(GPTShape(1, 1, 16, 257, 8, mlp_width=30), seed=0)
    with pytest.raises(ConfigError, match=r"blocks\.0\.mlp\.down has 30 inputs"):
        prune_linear_layers(model, for_gpu=False)


def test_what_a_gpu_cannot_use_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--gpu v100 has compute capability 7\.0"):
        check_sparse_cores("--gpu v100", (7, 0))
    check_sparse_cores("--gpu a100", (8, 0))
    with pytest.raises(ConfigError, match=r"blocks\.0\.attn\.qkv has 16 inputs and 48 outputs"):
        prune_linear_layers(GPT(GPTShape(1, 1, 16, 257, 8), seed=0), for_gpu=True)
    pruned = prune_linear_layers(GPT(GPTShape(1, 1, 64, 257, 8), seed=0), for_gpu=True)
    assert pruned.num_zeros == pruned.num_weights // 2


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs sparse tensor cores"
)
def test_sparse_tensor_cores_compute_what_pruned_weights_do() -> None:
    model = GPT(GPTShape(1, 2, 256, 257, 64), seed=0)
    prune_linear_layers(model, for_gpu=True)
    inputs = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.") and parameter.shape[-1:] == (256,) and parameter.dim() == 2:
            weight = parameter.detach().to("cuda", torch.bfloat16)
            sparse = torch.sparse.to_sparse_semi_structured(weight)
            expected = torch.nn.functional.linear(inputs, weight)
            torch.testing.assert_close(torch.nn.functional.linear(inputs, sparse), expected, rtol=2e-2, atol=2e-2)
