"""Published config.json files: the shape that is read, and the number of parameters that their models are known for."""

from __future__ import annotations

import pytest

from llmscale.architecture.hf_config import family_of, get_family, read_shape
from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.config.presets import PRESETS
from llmscale.errors import ConfigError

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA_31_8B = {
    **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096},
    **{"initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False},
    **{"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8},
    **{"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, **LLAMA3_SCALING}},
    **{"rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True},
    **{"transformers_version": "4.43.0.dev0", "vocab_size": 128256},
}
LLAMA_31_8B["rope_scaling"]["rope_type"] = "llama3"
LLAMA_32_1B = {
    **LLAMA_31_8B,
    **{"head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"rope_scaling": {"factor": 32.0, **LLAMA3_SCALING, "rope_type": "llama3"}, "tie_word_embeddings": True},
}
MISTRAL_V01 = {
    **{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu"},
    **{"hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "model_type": "mistral"},
    **{"max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "use_cache": True},
    **{"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096},
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0"},
    **{"vocab_size": 32000},
}
MISTRAL_V03 = {**MISTRAL_V01, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768}
QWEN25_7B = {
    **{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "hidden_act": "silu"},
    **{"eos_token_id": 151643, "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944},
    **{"max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28},
    **{"num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0},
    **{"sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_mrope": False},
    **{"transformers_version": "4.40.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064},
}
QWEN3_06B = {
    **{"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128},
    **{"bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 1024},
    **{"initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960},
    **{"max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28},
    **{"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000},
    **{"sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True},
    **{"transformers_version": "4.51.0", "use_sliding_window": False, "vocab_size": 151936},
}
QWEN3_8B = {
    **QWEN3_06B,
    **{"hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36, "num_attention_heads": 32},
    **{"num_hidden_layers": 36, "tie_word_embeddings": False},
}
SMOLLM2_135M = {
    **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0},
    **{"eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664},
    **{"intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama"},
    **{"num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1},
    **{"rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000},
    **{"tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 49152},
}
TINYLLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu"},
    **{"hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 2048},
    **{"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4},
    **{"rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float32"},
    **{"vocab_size": 32000},
}
OLMO2_7B = {
    **{"architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"},
    **{"eos_token_id": 100257, "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008},
    **{"max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32},
    **{"num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None},
    **{"rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": 100352},
}
MIXTRAL_8X7B = {
    **{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    **{"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336},
    **{"max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2},
    **{"num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False},
    **{"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None},
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000},
}
QWEN3_30B_A3B = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048},
    **{"intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": []},
    **{"model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32},
    **{"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4},
    **{"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001},
    **{"sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936},
}
OLMOE_1B_7B = {
    **{"architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None},
    **{"eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024},
    **{"max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16},
    **{"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16},
    **{"pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0},
    **{"router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "vocab_size": 50304},
}
FLEX_OLMO = {
    **OLMO2_7B,
    **{"architectures": ["FlexOlmoForCausalLM"], "model_type": "flex_olmo", "norm_topk_prob": False},
    **{"num_experts": 7, "num_experts_per_tok": 5},
}
DOTS_LLM1 = {
    **{"architectures": ["Dots1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944},
    **{"max_position_embeddings": 32768, "max_window_layers": 62, "model_type": "dots1"},
    **{"moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 128, "n_shared_experts": 2},
    **{"norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 62},
    **{"num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000},
    **{"routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "sliding_window": None, "tie_word_embeddings": False},
    **{"vocab_size": 152064, "n_group": 1, "topk_group": 1},
}
OPT_125M = {
    **{"_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu"},
    **{"architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 2},
    **{"do_layer_norm_before": True, "dropout": 0.1, "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02},
    **{"layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 12},
    **{"num_hidden_layers": 12, "pad_token_id": 1, "prefix": "</s>", "vocab_size": 50272, "word_embed_proj_dim": 768},
}
OPT_350M = {
    **OPT_125M,
    **{"do_layer_norm_before": False, "ffn_dim": 4096, "hidden_size": 1024, "num_attention_heads": 16},
    **{"num_hidden_layers": 24, "word_embed_proj_dim": 512},
}
GPT2 = {
    **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1},
    **{"bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02},
    **{"layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12},
    **{"n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1},
    **{"summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257},
    **{"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
}

#: config.json, parameters without our padding rows, and some fields of the shape.
PUBLISHED: dict[str, tuple[dict, int, dict]] = {
    "Llama 3.1 8B": (
        *(LLAMA_31_8B, 8_030_261_248),
        {"n_kv_head": 8, "head_dim": 128, "rope_scaling": "llama3:8,1,4,8192", "tied": False, "seq_len": 131072},
    ),
    "Llama 3.2 1B": (
        *(LLAMA_32_1B, 1_235_814_400),
        {"head_dim": 64, "rope_scaling": "llama3:32,1,4,8192", "tied": True, "rope_theta": 500_000.0},
    ),
    "Mistral 7B v0.1": (MISTRAL_V01, 7_241_732_096, {"sliding_window": 4096, "rope_theta": 10_000.0}),
    "Mistral 7B v0.3": (MISTRAL_V03, 7_248_023_552, {"sliding_window": 0, "rope_theta": 1_000_000.0}),
    "Qwen 2.5 7B": (QWEN25_7B, 7_615_616_512, {"attention_bias": "qkv", "norm_eps": 1e-6, "sliding_window": 0}),
    "Qwen 3 0.6B": (QWEN3_06B, 596_049_920, {"qk_norm": "head", "head_dim": 128, "tied": True}),
    "Qwen 3 8B": (QWEN3_8B, 8_190_735_360, {"qk_norm": "head", "head_dim": 128, "tied": False}),
    "SmolLM2 135M": (SMOLLM2_135M, 134_515_008, {"n_kv_head": 3, "rope_theta": 100_000.0, "tied": True}),
    "TinyLlama": (TINYLLAMA, 1_100_048_384, {"n_kv_head": 4, "mlp_width": 5632, "rope_theta": 10_000.0}),
    "OLMo 2 7B": (OLMO2_7B, 7_298_617_344, {"qk_norm": "width", "norm_placement": "post", "bias": False}),
    "Mixtral 8x7B": (MIXTRAL_8X7B, 46_702_792_704, {"num_experts": 8, "experts_per_token": 2, "expert_width": 14336}),
    "Qwen 3 30B A3B": (
        *(QWEN3_30B_A3B, 30_532_122_624),
        {"num_experts": 128, "expert_width": 768, "head_dim": 128, "normalize_router": True},
    ),
    "OLMoE 1B 7B": (OLMOE_1B_7B, 6_919_161_856, {"num_experts": 64, "normalize_router": False, "qk_norm": "width"}),
    "FlexOlmo": (FLEX_OLMO, 33_270_665_216, {"num_experts": 7, "norm_placement": "post"}),
    "dots.llm1": (
        *(DOTS_LLM1, 142_774_381_696),
        {"shared_expert_width": 2816, "dense_layers": 1, "router_scale": 2.5, "router_bias": True},
    ),
    "OPT 125M": (OPT_125M, 125_239_296, {"activation": "relu", "positions": "learned", "bias": True}),
    "GPT-2": (GPT2, 124_439_808, {"activation": "gelu_tanh", "mlp_width": 3072, "tied": True}),
}


def read(config: dict) -> GPTShape:
    return build_shape(read_shape(config, "config.json"))


def unpadded_parameters(shape: GPTShape) -> int:
    tables = 1 if shape.tied else 2
    return shape.num_parameters - tables * (shape.padded_vocab_size - shape.vocab_size) * shape.n_embd


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_and_number_of_parameters(name: str) -> None:
    config, parameters, fields = PUBLISHED[name]
    shape = read(config)
    # OPT's first two positions, which no token uses, count there; and routers' biases, which are buffers here.
    others = 2 * shape.n_embd if config["model_type"] == "opt" else 0
    others += shape.num_experts * (shape.n_layer - shape.dense_layers) if shape.router_bias else 0
    assert unpadded_parameters(shape) + others == parameters
    assert {key: getattr(shape, key) for key in fields} == fields


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_is_in_the_files_once(name: str) -> None:
    config, parameters, _ = PUBLISHED[name]
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
    shape = read(PUBLISHED[name][0])
    family = family_of(shape)
    written = {**family.write(shape), "model_type": family.model_type}
    assert read(written) == shape


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        *[("llama3-1b", "Llama 3.2 1B"), ("llama3-8b", "Llama 3.1 8B"), ("qwen3-0.6b", "Qwen 3 0.6B")],
        *[("qwen3-8b", "Qwen 3 8B"), ("smollm2-135m", "SmolLM2 135M"), ("gpt2-124m", "GPT-2")],
        *[("mixtral-8x7b", "Mixtral 8x7B"), ("qwen3-30b-a3b", "Qwen 3 30B A3B"), ("olmoe-1b-7b", "OLMoE 1B 7B")],
    ],
)
def test_presets_are_the_published_models_but_for_the_context(preset: str, name: str) -> None:
    context = {"rope_scaling": "none", "rope_theta": 1.0}
    published = read(PUBLISHED[name][0])
    ours = PRESETS[preset].shape(published.vocab_size, published.seq_len)
    assert ours.changed(context) == published.changed(context)


def test_opt_350m_has_what_ours_has_not() -> None:
    with pytest.raises(ConfigError, match=r"config.json: word_embed_proj_dim is 512; llmscale's model has 1024 alone"):
        read(OPT_350M)
    with pytest.raises(ConfigError, match=r"do_layer_norm_before is False; llmscale's model has True alone"):
        read({**OPT_350M, "word_embed_proj_dim": 1024})


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "Mistral 7B v0.1", "Qwen 3 0.6B", "TinyLlama", "OLMo 2 7B"])
def test_transformers_5_writes_rotary_parameters_in_one_place(name: str) -> None:
    config = dict(PUBLISHED[name][0])
    theta, scaling = config.pop("rope_theta", 10_000.0), config.pop("rope_scaling", None) or {"rope_type": "default"}
    config["dtype"] = config.pop("torch_dtype")
    assert read({**config, "rope_parameters": {"rope_theta": theta, **scaling}}) == read(PUBLISHED[name][0])
