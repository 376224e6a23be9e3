"""Logits and gradients of every family equal transformers', both ways: from our shape and from their config.json."""

from __future__ import annotations

import json

import pytest
import torch

from llmscale.architecture.hf_config import FAMILIES, family_of, read_shape
from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.evaluate.transformers_package import import_transformers
from llmscale.model.gpt import GPT
from tests.architecture.families.parity import TOLERANCE, differences, randomise, to_ours
from tests.transformers_models import hf_config, to_hf_state_dict

pytest.importorskip("transformers")
transformers = import_transformers()

LLAMA = {"norm": "rmsnorm", "bias": False, "positions": "rotary", "activation": "silu", "gated_mlp": True}
QWEN2, QWEN3 = {**LLAMA, "attention_bias": "qkv"}, {**LLAMA, "qk_norm": "head"}
OLMO2 = {**LLAMA, "qk_norm": "width", "norm_placement": "post"}
EXPERTS = {**LLAMA, "num_experts": 4}
MANY = {**EXPERTS, "qk_norm": "head", "num_experts": 8, "experts_per_token": 3, "expert_width": 16, "n_kv_head": 2}
DOTS = {**MANY, "router_score": "sigmoid", "router_bias": True, "shared_expert_width": 32}
FLEX = {**EXPERTS, **OLMO2}
SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 24, "vocab_size": 61, "seq_len": 40}

#: Family -> three shapes: what differs from SIZES.
SHAPES: dict[str, list[dict]] = {
    "gpt2": [
        {"activation": "gelu_tanh"},
        {"activation": "gelu", "bias": False, "n_head": 3, "n_embd": 21, "vocab_size": 128},
        {
            "activation": "relu",
            "attention_bias": "qkv",
            "mlp_bias": False,
            "norm_eps": 1e-3,
            "tied": False,
            "mlp_width": 37,
        },
    ],
    "opt": [
        {"activation": "relu", "mlp_bias": False, "attention_bias": "none"},
        {"activation": "relu", "mlp_bias": False, "attention_bias": "none", "tied": False, "n_head": 3, "n_embd": 21},
        {"activation": "gelu_tanh", "mlp_bias": False, "attention_bias": "none", "n_head": 1, "n_embd": 5},
    ],
    "llama": [
        {**LLAMA, "n_kv_head": 2, "mlp_width": 37, "tied": False, "rope_scaling": "llama3:8,1,4,16"},
        {**LLAMA, "head_dim": 10, "mlp_width": 5, "rope_scaling": "linear:4.5", "attention_bias": "all"},
        {**LLAMA, "n_kv_head": 1, "mlp_bias": True, "head_dim": 16, "rope_theta": 5e5, "rope_scaling": "yarn:4,512"},
    ],
    "mistral": [
        {**LLAMA, "n_kv_head": 2, "sliding_window": 7},
        {**LLAMA, "n_kv_head": 1, "sliding_window": 1, "head_dim": 10, "tied": False},
        {**LLAMA, "n_head": 3, "n_embd": 18, "n_kv_head": 3, "sliding_window": 5000, "rope_theta": 1e6},
    ],
    "qwen2": [
        {**QWEN2, "n_kv_head": 2, "mlp_width": 37},
        {**QWEN2, "n_kv_head": 1, "sliding_window": 9, "tied": False},
        {**QWEN2, "n_head": 6, "n_kv_head": 2, "n_layer": 3, "vocab_size": 256, "rope_scaling": "llama3:8,1,4,16"},
    ],
    "qwen3": [
        {**QWEN3, "n_kv_head": 1, "norm_eps": 1e-3, "tied": False, "rope_theta": 1e3, "rope_scaling": "yarn:8,10"},
        {**QWEN3, "n_head": 3, "n_embd": 17, "head_dim": 6, "attention_bias": "all"},
        {**QWEN3, "n_kv_head": 2, "sliding_window": 11, "head_dim": 2, "n_layer": 3, "window_pattern": "LLG"},
    ],
    "olmo2": [
        {**OLMO2, "tied": False, "rope_theta": 500_000.0, "norm_eps": 1e-6},
        {**OLMO2, "n_head": 3, "n_embd": 18, "n_kv_head": 1, "attention_bias": "all"},
        {**OLMO2, "head_dim": 10, "rope_scaling": "linear:2.5", "activation": "gelu"},
    ],
    "mixtral": [
        {**EXPERTS, "experts_per_token": 1, "head_dim": 10, "sliding_window": 9},
        {**EXPERTS, "num_experts": 1, "experts_per_token": 1, "activation": "gelu", "rope_scaling": "linear:2"},
        {**EXPERTS, "num_experts": 9, "n_head": 3, "n_embd": 18, "expert_width": 7, "rope_scaling": "yarn:4,10"},
    ],
    "qwen3_moe": [
        {**MANY, "n_layer": 3, "dense_layers": 1, "tied": False, "normalize_router": False, "attention_bias": "all"},
        {**MANY, "n_layer": 5, "expert_interval": 2, "sliding_window": 11},
        {**MANY, "n_layer": 6, "dense_layers": 1, "expert_interval": 3, "rope_scaling": "llama3:8,1,4,16"},
    ],
    "olmoe": [
        {**EXPERTS, "qk_norm": "width", "normalize_router": False, "tied": False},
        {**EXPERTS, "qk_norm": "width", "n_kv_head": 2, "num_experts": 8, "experts_per_token": 8},
        {**EXPERTS, "qk_norm": "width", "attention_bias": "all", "mlp_width": 37, "normalize_router": False},
    ],
    "flex_olmo": [
        {**FLEX, "normalize_router": False, "tied": False, "norm_eps": 1e-6},
        {**FLEX, "n_kv_head": 2, "num_experts": 7, "experts_per_token": 5},
        {**FLEX, "n_head": 3, "n_embd": 18, "head_dim": 10, "rope_theta": 5e5},
    ],
    "dots1": [
        {**DOTS, "dense_layers": 1, "router_scale": 2.5, "tied": False},
        {**DOTS, "router_bias": False, "n_layer": 4, "dense_layers": 3, "mlp_width": 37},
        {**DOTS, "sliding_window": 9, "window_pattern": "GL", "head_dim": 10, "rope_theta": 1e7},
    ],
}
CASES = [
    pytest.param(family, change, id=f"{family}-{i}") for family in SHAPES for i, change in enumerate(SHAPES[family])
]


def make_shape(change: dict) -> GPTShape:
    return build_shape({**SIZES, **change})


def make_theirs(config):
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.float()


def test_every_family_has_three_shapes() -> None:
    assert {family: len(shapes) for family, shapes in SHAPES.items()} == dict.fromkeys(FAMILIES, 3)


@pytest.mark.parametrize(("family", "change"), CASES)
def test_our_model_is_theirs(family: str, change: dict) -> None:
    shape = make_shape(change)
    assert family_of(shape).model_type == family
    ours = GPT(shape, seed=0)
    randomise(ours)
    theirs = make_theirs(hf_config(shape, 0, torch.float32))
    missing, surplus = theirs.load_state_dict(to_hf_state_dict(ours), strict=False)
    assert (missing, surplus) == (["lm_head.weight"] if shape.tied else [], [])
    logits, gradients = differences(ours, theirs, FAMILIES[family])
    assert logits < TOLERANCE
    assert gradients < TOLERANCE


@pytest.mark.parametrize(("family", "change"), CASES)
def test_their_model_is_ours(family: str, change: dict) -> None:
    """Their own configuration class says what config.json says, be it in full or, as save_pretrained writes it, where
    it differs from the class's defaults."""
    shape = make_shape(change)
    theirs = make_theirs(transformers.AutoConfig.for_model(family, **FAMILIES[family].write(shape)))
    randomise(theirs)
    theirs.tie_weights()
    texts = [theirs.config.to_json_string(use_diff=use_diff) for use_diff in (True, False)]
    read = [read_shape(json.loads(text), "config.json") for text in texts]
    assert read[0] == read[1]
    ours = GPT(read[0], seed=0)
    ours.load_state_dict(to_ours(read[0], theirs.state_dict(), FAMILIES[family]))
    logits, gradients = differences(ours, theirs, FAMILIES[family])
    assert logits < TOLERANCE
    assert gradients < TOLERANCE
