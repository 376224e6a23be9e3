from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmscale.architecture.layers import is_adapter
from llmscale.architecture.shape import GPTShape
from llmscale.errors import ConfigError
from llmscale.model.gpt import GPT
from llmscale.model.layers import Adapter, Linear

ROTARY = {"norm": "rmsnorm", "positions": "rotary", "gated_mlp": True, "bias": False, "n_kv_head": 2}
SHAPE = GPTShape(2, 4, 32, 200, 16, lora_rank=3)
WITHOUT = {"lora_rank": 0, "lora_alpha": 0.0, "lora_targets": ""}


@pytest.mark.parametrize("kind", [{}, ROTARY, {"mlp_tile_tokens": 8}, {**ROTARY, "lora_targets": "attn.qkv,mlp.down"}])
def test_adapters_begin_as_nothing_and_are_as_described(kind: dict) -> None:
    shape = replace(SHAPE, **kind)
    model, base = GPT(shape, seed=0), GPT(replace(shape, **WITHOUT), seed=0)
    described = {tensor.name: tensor.parameter.shape for tensor in shape.tensors.all}
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == described
    assert base.load_state_dict(model.state_dict(), strict=False).missing_keys == []
    tokens = torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(tokens), base(tokens))


def test_stacked_layers_have_adapters_of_their_own() -> None:
    layer = Linear(8, 10, torch.Generator().manual_seed(0), bias=True, adapter=Adapter(2, 0.5, (6, 4)))
    with torch.no_grad():
        layer.lora_B.normal_()
    x = torch.randn(3, 5, 8)
    (a_first, a_last), (b_first, b_last) = layer.lora_A.split(2), layer.lora_B.split((6, 4))
    added = 0.5 * torch.cat((b_first @ a_first, b_last @ a_last))
    expected = torch.nn.functional.linear(x, layer.weight + added, layer.bias)
    torch.testing.assert_close(layer(x), expected)
    assert layer.lora_A.abs().max() <= 8**-0.5 < 2 * layer.lora_A.abs().max()


def test_one_selection_of_layers_has_one_name() -> None:
    assert replace(SHAPE, lora_targets="mlp.down,attention,mlp.up").lora_targets == SHAPE.lora_targets == "all"
    assert replace(SHAPE, lora_targets="attn.proj,attn.qkv").lora_targets == "attention"
    assert (SHAPE.lora_alpha, replace(SHAPE, lora_alpha=16).lora_alpha) == (6, 16)
    assert GPTShape(2, 4, 32, 200, 16, num_experts=2, bias=False, lora_rank=3).lora_targets == "attention"


@pytest.mark.parametrize(
    "wrong",
    [{"lora_targets": "q_proj"}, {"lora_rank": 0}, {"num_experts": 2, "bias": False, "mlp_bias": None}],
)
def test_adapters_that_cannot_be_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="lora_"):
        replace(SHAPE, **wrong)


def test_frozen_weights_cost_no_gradients() -> None:
    base, own = replace(SHAPE, **WITHOUT), sum(t.elements for t in SHAPE.tensors.all if is_adapter(t.name))
    attention = 12 * SHAPE.n_layer * SHAPE.n_embd * SHAPE.seq_len
    assert SHAPE.flops_per_token - attention == 2 * (base.flops_per_token - attention) // 3 + 6 * own
