"""Whatever a config.json holds, the answer is a shape or one line that names the entry."""

from __future__ import annotations

import math

import pytest

from llmscale.architecture.hf_config import FAMILIES, family_of, get_family, read_shape, without_rope_scaling
from llmscale.architecture.shape import GPTShape
from llmscale.errors import ConfigError
from tests.architecture.families.test_published import CONFIGS as PUBLISHED
from tests.architecture.families.test_published import read

CONFIGS = {config["model_type"]: config for name, config in PUBLISHED.items() if name != "OPT 350M"}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 100,
    "intermediate_size": 176,
}
MOE = {"model_type": "qwen3_moe", "moe_intermediate_size": 32}
DOTS = {**MOE, "model_type": "dots1", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 8}
NOISE = [None, -1, 0, 1, 3, 0.5, 1e400, math.nan, -math.inf, 1e-320, 10**400, -(10**30), True, False, "", "x" * 10**5]
NOISE += ["none", "\x1b[2J", [], [[]], ["full_attention"], {}, {"factor": {}}, {"rope_type": []}, {"a": {"b": 1}}]


def refusal(config: dict) -> str:
    with pytest.raises(ConfigError) as raised:
        read_shape(config, "config.json")
    return str(raised.value)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_any_value_of_any_entry_gives_a_shape_or_one_line(model_type: str, every: int) -> None:
    """Also in the rotary section, and with an entry left out. Families share the values if not `every` one is tried."""
    noises = NOISE[sorted(FAMILIES).index(model_type) % every :: every]
    config = {**CONFIGS[model_type]}
    # Each candidate's tensors are listed, and there are three for each expert of each block.
    config |= {key: 8 for key in config.keys() & {"num_experts", "num_local_experts", "n_routed_experts"}}
    section = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    section |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5, "partial_rotary_factor": 1.0, "type": "x"}
    more = ("head_dim", "layer_types", "use_sliding_window", "max_window_layers", "rope_parameters", "enable_bias")
    keys = {*config, *more, "n_inner", "auto_map", "quantization_config", "partial_rotary_factor", "sliding_window"}
    changed = [{**config, key: noise} for key in sorted(keys) for noise in noises]
    changed += [{key: value for key, value in config.items() if key != left_out} for left_out in config]
    for place in ("rope_parameters", "rope_scaling"):
        changed += [{**config, place: {**section, key: noise}} for key in section for noise in noises]
    changed += [
        {**config, "use_sliding_window": True, "max_window_layers": 0, "layer_types": noise} for noise in noises
    ]
    shapes = 0
    for candidate in changed:
        try:
            shape = read_shape(candidate, "config.json")
        except ConfigError as error:
            assert str(error).startswith("config.json: ")
            assert len(str(error)) < 1000
            assert "\x1b" not in str(error)
            continue
        shapes += 1
        assert shape.num_parameters > 0
        assert len(list(get_family(candidate, "config.json").tensors(shape))) > 0
        try:
            family_of(shape)
        except ConfigError as error:
            assert "no family of transformers has this model" in str(error)
    assert len(changed) > shapes > 100 // every


@pytest.mark.parametrize(
    ("entries", "scaling"),
    [
        ({"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "finetuned": True}, "yarn:16,4096"),
        ({"type": "yarn", "factor": 2.0, "truncate": True, "attention_factor": None, "mscale": None}, "yarn:2,2048"),
        ({"type": "linear", "factor": 2.0, "attention_factor": 3.0, "note": "x"}, "linear:2"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "none"),
    ],
)
def test_entries_that_transformers_ignores_are_ignored(entries: dict, scaling: str) -> None:
    shape = read_shape({**LLAMA, "max_position_embeddings": 2048, "rope_scaling": entries}, "config.json")
    assert shape.rope_scaling == scaling


@pytest.mark.parametrize(
    "entries",
    [{"rope_scaling": {"type": "dynamic"}}, {"rope_parameters": {"rope_type": "longrope", "rope_theta": 5e5}}],
)
def test_plain_rotations_replace_a_scaling_of_any_kind(entries: dict) -> None:
    with pytest.raises(ConfigError):
        read_shape({**LLAMA, **entries}, "config.json")
    shape = read_shape(without_rope_scaling({**LLAMA, **entries}), "config.json")
    assert shape.rope_scaling == "none"
    assert shape.rope_theta == (5e5 if "rope_parameters" in entries else 10_000.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling: rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, "type is 'su'; llmscale has default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 8}}, "beta_fast"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.0}},
            "attention_factor is 1.0; llmscale's model has none",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling 'linear:0.5' is not legal. Legal: none"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'full_attention' is an object of its own"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5; llmscale's model has 1.0"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25; llmscale's model has 1.0 alone"),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'; llmscale has gelu_new, "),
        ({"num_attention_heads": 7}, "hidden_size 64 is not divisible by num_attention_heads 7"),
        ({"num_key_value_heads": 3}, "n_kv_head 3 does not divide n_head 8. Legal: 1, 2, 4, 8"),
        ({"head_dim": 5}, "rotary positions turn pairs of numbers, and a head of 5"),
        ({"hidden_size": 1 << 31}, "hidden_size is 2147483648, more than the "),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', not a positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not true or false"),
        ({"auto_map": {"AutoModel": "modeling.X"}}, "auto_map names code of its own, which is never run"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantised"),
        ({"model_type": "gemma"}, "no model of type 'gemma'. The nearest is llama, which has no scaled embeddings"),
        ({"model_type": "mixtral", "num_local_experts": 10**6}, "num_local_experts is 1000000, more than the 4,096 of"),
        ({"model_type": "mixtral", "num_hidden_layers": 64, "num_local_experts": 1025}, "1025, more than the 1,024 of"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "experts_per_token 9 is more than there are experts"),
        ({**MOE, "mlp_only_layers": [0, 1]}, "mlp_only_layers and decoder_sparse_step leave no block with experts"),
        ({**MOE, "num_hidden_layers": 5, "mlp_only_layers": [1]}, "to the blocks 0, 2, 3, 4 of 5; llmscale has blocks"),
        ({**MOE, "mlp_only_layers": [True]}, "mlp_only_layers is [True], not a list of int"),
        ({**MOE, "model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is 8.0; llmscale's model has none"),
        ({**DOTS, "n_group": 8}, "n_group is 8; llmscale's model has 1 alone"),
        ({"model_type": "bert"}, "Supported: gpt2, opt, llama, mistral, qwen2, qwen3, olmo2, mixtral, qwen3_moe, "),
        ({"model_type": None}, "model_type is missing"),
    ],
)
def test_what_ours_does_not_compute_is_named(change: dict, words: str) -> None:
    assert words in refusal({**LLAMA, **change})


def test_windows_of_layers_are_read() -> None:
    mixed = {"use_sliding_window": True, "sliding_window": 16}
    for change in ({"max_window_layers": 1}, {"layer_types": ["full_attention", "sliding_attention"]}):
        assert read_shape({**QWEN2, **mixed, **change}, "config.json").window_pattern == "GL"
    short = {**QWEN2, **mixed, "layer_types": ["full_attention"]}
    assert "layer_types has 1 entries for 2 layers" in refusal(short)
    assert "layer_types has 'linear_attention'; llmscale has full_attention and sliding_attention" in refusal(
        {**PUBLISHED["Qwen 3 0.6B"], "layer_types": ["linear_attention"] * 28}
    )
    windows = [
        {"max_window_layers": 0},
        {"layer_types": ["sliding_attention"] * 2},
        {"max_window_layers": 2},
        {"use_sliding_window": False, "max_window_layers": 0},
    ]
    read = [read_shape({**QWEN2, **mixed, **change}, "config.json") for change in windows]
    assert [shape.sliding_window for shape in read] == [16, 16, 0, 0]


def test_no_entry_and_null_mean_what_they_mean_in_transformers() -> None:
    mistral = {**LLAMA, "model_type": "mistral"}
    assert (read_shape(mistral, "x").n_kv_head, read_shape(mistral, "x").sliding_window) == (8, 4096)
    nulls = {**mistral, "num_attention_heads": 16, "num_key_value_heads": None, "sliding_window": None}
    assert (read_shape(nulls, "x").n_kv_head, read_shape(nulls, "x").sliding_window) == (16, 0)


def test_what_no_family_has_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"no family .* has this model: GPT2LMHeadModel, the nearest, lacks qk_norm width\."
    ):
        family_of(GPTShape(2, 4, 32, 100, 16, qk_norm="width"))
    with pytest.raises(ConfigError, match="Olmo2ForCausalLM, the nearest, lacks rope_scaling llama3:8,1,4,16"):
        family_of(read(PUBLISHED["OLMo 2 7B"]).changed({"rope_scaling": "llama3:8,1,4,16"}))


def test_a_shape_without_biases_is_written_by_the_family_that_has_none() -> None:
    """GPT-2 could hold them as zeros."""
    assert family_of(GPTShape(2, 4, 32, 100, 16, "relu")).model_type == "gpt2"
    assert family_of(GPTShape(2, 4, 32, 100, 16, "relu", attention_bias="none", mlp_bias=False)).model_type == "opt"
    assert family_of(GPTShape(2, 4, 32, 100, 16, "relu", bias=False)).model_type == "gpt2"
