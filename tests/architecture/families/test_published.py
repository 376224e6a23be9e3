"""Published config.json files: the shape that is read, and the number of parameters that their models are known for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmscale.architecture.hf_config import family_of, get_family, read_shape
from llmscale.architecture.shape import GPTShape
from llmscale.config.presets import PRESETS
from llmscale.errors import ConfigError

#: config.json of published models.
CONFIGS: dict[str, dict] = json.loads(Path(__file__).with_name("published_configs.json").read_text())
#: Parameters without our padding rows, and some fields of the shape.
PUBLISHED: dict[str, tuple[int, dict]] = {
    "Llama 3.1 8B": (
        8030261248,
        {"n_kv_head": 8, "head_dim": 128, "rope_scaling": "llama3:8,1,4,8192", "tied": False, "seq_len": 131072},
    ),
    "Llama 3.2 1B": (
        1235814400,
        {"head_dim": 64, "rope_scaling": "llama3:32,1,4,8192", "tied": True, "rope_theta": 500000.0},
    ),
    "Mistral 7B v0.1": (7241732096, {"sliding_window": 4096, "rope_theta": 10000.0}),
    "Mistral 7B v0.3": (7248023552, {"sliding_window": 0, "rope_theta": 1000000.0}),
    "Qwen 2.5 7B": (7615616512, {"attention_bias": "qkv", "norm_eps": 1e-06, "sliding_window": 0}),
    "Qwen 3 0.6B": (596049920, {"qk_norm": "head", "head_dim": 128, "tied": True}),
    "Qwen 3 8B": (8190735360, {"qk_norm": "head", "head_dim": 128, "tied": False}),
    "SmolLM2 135M": (134515008, {"n_kv_head": 3, "rope_theta": 100000.0, "tied": True}),
    "TinyLlama": (1100048384, {"n_kv_head": 4, "mlp_width": 5632, "rope_theta": 10000.0}),
    "OLMo 2 7B": (7298617344, {"qk_norm": "width", "norm_placement": "post", "bias": False}),
    "Mixtral 8x7B": (46702792704, {"num_experts": 8, "experts_per_token": 2, "expert_width": 14336}),
    "Qwen 3 30B A3B": (
        30532122624,
        {"num_experts": 128, "expert_width": 768, "head_dim": 128, "normalize_router": True},
    ),
    "OLMoE 1B 7B": (6919161856, {"num_experts": 64, "normalize_router": False, "qk_norm": "width"}),
    "FlexOlmo": (33270665216, {"num_experts": 7, "norm_placement": "post"}),
    "dots.llm1": (
        142774381696,
        {"shared_expert_width": 2816, "dense_layers": 1, "router_scale": 2.5, "router_bias": True},
    ),
    "OPT 125M": (125239296, {"activation": "relu", "positions": "learned", "bias": True}),
    "GPT-2": (124439808, {"activation": "gelu_tanh", "mlp_width": 3072, "tied": True}),
}


def read(config: dict) -> GPTShape:
    return read_shape(config, "config.json")


def unpadded_parameters(shape: GPTShape) -> int:
    tables = 1 if shape.tied else 2
    return shape.num_parameters - tables * (shape.padded_vocab_size - shape.vocab_size) * shape.n_embd


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_and_number_of_parameters(name: str) -> None:
    config, (parameters, fields) = CONFIGS[name], PUBLISHED[name]
    shape = read(config)
    # OPT's first two positions, which no token uses, count there; and routers' biases, which are buffers here.
    others = 2 * shape.n_embd if config["model_type"] == "opt" else 0
    others += shape.num_experts * (shape.n_layer - shape.dense_layers) if shape.router_bias else 0
    assert unpadded_parameters(shape) + others == parameters
    assert {key: getattr(shape, key) for key in fields} == fields


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_is_in_the_files_once(name: str) -> None:
    config, (parameters, _) = CONFIGS[name], PUBLISHED[name]
    family = get_family(config, "config.json")
    tensors = list(family.tensors(read(config)))
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    count = 0
    for tensor in tensors:
        rows, columns = (*tensor.shape, 1)[:2]
        count += rows * columns
    assert count == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_reads_as_the_same_shape(name: str) -> None:
    shape = read(CONFIGS[name])
    family = family_of(shape)
    written = {**family.write(shape), "model_type": family.model_type}
    assert read(written) == shape


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("llama3-1b", "Llama 3.2 1B"),
        ("llama3-8b", "Llama 3.1 8B"),
        ("qwen3-0.6b", "Qwen 3 0.6B"),
        ("qwen3-8b", "Qwen 3 8B"),
        ("smollm2-135m", "SmolLM2 135M"),
        ("gpt2-124m", "GPT-2"),
        ("mixtral-8x7b", "Mixtral 8x7B"),
        ("qwen3-30b-a3b", "Qwen 3 30B A3B"),
        ("olmoe-1b-7b", "OLMoE 1B 7B"),
    ],
)
def test_presets_are_the_published_models_but_for_the_context(preset: str, name: str) -> None:
    context = {"rope_scaling": "none", "rope_theta": 1.0}
    published = read(CONFIGS[name])
    ours = PRESETS[preset].shape(published.vocab_size, published.seq_len)
    assert ours.changed(context) == published.changed(context)
    assert PRESETS[preset].vocab_size == published.vocab_size


def test_opt_350m_has_what_ours_has_not() -> None:
    with pytest.raises(ConfigError, match=r"config.json: word_embed_proj_dim is 512; llmscale's model has 1024 alone"):
        read(CONFIGS["OPT 350M"])
    with pytest.raises(ConfigError, match=r"do_layer_norm_before is False; llmscale's model has True alone"):
        read({**CONFIGS["OPT 350M"], "word_embed_proj_dim": 1024})


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "Mistral 7B v0.1", "Qwen 3 0.6B", "TinyLlama", "OLMo 2 7B"])
def test_transformers_5_writes_rotary_parameters_in_one_place(name: str) -> None:
    config = dict(CONFIGS[name])
    theta, scaling = config.pop("rope_theta", 10_000.0), config.pop("rope_scaling", None) or {"rope_type": "default"}
    config["dtype"] = config.pop("torch_dtype")
    assert read({**config, "rope_parameters": {"rope_theta": theta, **scaling}}) == read(CONFIGS[name])


@pytest.mark.parametrize(("preset", "name"), [("gpt2-124m", "gelu_new"), ("llama3-1b", "gelu_pytorch_tanh")])
def test_gelu_by_tanh_is_written_by_the_name_that_rounds_as_the_family_does(preset: str, name: str) -> None:
    shape = PRESETS[preset].shape(64, 64).changed({"activation": "gelu_tanh"})
    assert name in family_of(shape).write(shape).values()
