"""The layers of transformers' decoder families, from their config.json alone. No torch.

Layers have the names of llmscale's own that do the same. Each description follows the modules of
`transformers.models.<family>.modeling_<family>` (4.57); the tests compare every tensor with a model that transformers
builds on torch's meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmscale.architecture.description import Architecture
from llmscale.architecture.families.config_keys import Keys
from llmscale.architecture.families.gpt2 import GPT2
from llmscale.architecture.layers import (
    Layer,
    attention,
    elementwise,
    embedding,
    head,
    layer_norm,
    linear,
    rms_norm,
    together,
)
from llmscale.architecture.shape import build_shape, describe_gpt
from llmscale.errors import ConfigError, did_you_mean

_QKV = ("q_proj", "k_proj", "v_proj")


def _gpt2(keys: Keys) -> Architecture:
    # transformers' Conv1D stores [inputs, outputs]; a transposed matrix is as large.
    shape = build_shape(GPT2.read(keys))
    return describe_gpt(shape, shape.vocab_size)


def _opt(keys: Keys) -> Architecture:
    h, n_head = keys.heads()
    vocab, table, bias = keys.count("vocab_size"), keys.count("word_embed_proj_dim", h), keys.flag("enable_bias", True)
    tied, inner = keys.flag("tie_word_embeddings", True), keys.count("ffn_dim")
    affine = keys.flag("layer_norm_elementwise_affine", True)
    has_final_norm = keys.flag("do_layer_norm_before", True) and not keys.flag("_remove_final_layer_norm", False)
    # Two positions more than the model has: OPT's ids begin at 2.
    positions = embedding("embed_positions", keys.count("max_position_embeddings", 2048) + 2, h)
    final = layer_norm("final_layer_norm", h, affine=affine and has_final_norm)
    # A narrower token embedding is projected in and out.
    project_in = [linear("project_in", table, h, bias=False)] if table != h else []
    project_out = [linear("project_out", h, table, bias=False)] if table != h else []
    return Architecture(
        before_blocks=(embedding("wte", vocab, table), together("wpe", positions, *project_in)),
        block=(
            layer_norm("ln_1", h, affine=affine),
            together("attn.qkv", *(linear(name, h, h, bias=bias) for name in _QKV)),
            attention(n_head, h // n_head),
            linear("attn.proj", h, h, bias=bias),
            elementwise(h),
            layer_norm("ln_2", h, affine=affine),
            linear("mlp.up", h, inner, bias=bias),
            elementwise(inner),
            linear("mlp.down", inner, h, bias=bias),
            elementwise(h),
        ),
        n_layer=keys.layers("num_hidden_layers"),
        after_blocks=(together("ln_f", final, *project_out), _head(tied, vocab, table)),
        made_order=("attn.qkv", "attn.proj", "ln_1", "mlp.up", "mlp.down", "ln_2"),
    )


def _gpt_neox(keys: Keys) -> Architecture:
    h, n_head = keys.heads()
    vocab, inner = keys.count("vocab_size"), keys.count("intermediate_size")
    bias, tied = keys.flag("attention_bias", True), keys.flag("tie_word_embeddings", False)
    return Architecture(
        before_blocks=(embedding("wte", vocab, h),),
        block=(
            layer_norm("ln_1", h),
            linear("attn.qkv", h, 3 * h, bias=bias),
            attention(n_head, h // n_head),
            linear("attn.proj", h, h, bias=bias),
            layer_norm("ln_2", h),
            linear("mlp.up", h, inner, bias=True),
            elementwise(inner),
            linear("mlp.down", inner, h, bias=True),
            elementwise(2 * h),
        ),
        n_layer=keys.layers("num_hidden_layers"),
        after_blocks=(layer_norm("ln_f", h), _head(tied, vocab, h)),
        made_order=("ln_1", "ln_2", "attn.qkv", "attn.proj", "mlp.up", "mlp.down"),
    )


def _head(tied: bool, rows: int, width: int) -> Layer:
    return head("head", rows, width, tied_to="wte" if tied else "")


def _llama_like(keys: Keys, *, qkv_bias: bool, output_bias: bool, mlp_bias: bool, head_norms: bool) -> Architecture:
    """RMS norms, rotary positions, grouped keys and values, gated MLP."""
    h, n_head = keys.heads()
    vocab, inner = keys.count("vocab_size"), keys.count("intermediate_size")
    head_dim, kv_heads = keys.count("head_dim", h // n_head), keys.count("num_key_value_heads", n_head)
    widths = dict(zip(_QKV, (n_head * head_dim, kv_heads * head_dim, kv_heads * head_dim), strict=True))
    norms = [rms_norm(name, head_dim) for name in ("q_norm", "k_norm")] if head_norms else []
    return Architecture(
        before_blocks=(embedding("wte", vocab, h),),
        block=(
            rms_norm("ln_1", h),
            together("attn.qkv", *(linear(name, h, width, bias=qkv_bias) for name, width in widths.items()), *norms),
            attention(n_head, head_dim),
            linear("attn.proj", n_head * head_dim, h, bias=output_bias),
            elementwise(h),
            rms_norm("ln_2", h),
            together("mlp.up", *(linear(name, h, inner, bias=mlp_bias) for name in ("gate_proj", "up_proj"))),
            elementwise(2 * inner),
            linear("mlp.down", inner, h, bias=mlp_bias),
            elementwise(h),
        ),
        n_layer=keys.layers("num_hidden_layers"),
        after_blocks=(rms_norm("ln_f", h), _head(keys.flag("tie_word_embeddings", False), vocab, h)),
        made_order=("attn.qkv", "attn.proj", "mlp.up", "mlp.down", "ln_1", "ln_2"),
    )


def _llama(keys: Keys) -> Architecture:
    attention = keys.flag("attention_bias", False)
    mlp = keys.flag("mlp_bias", False)
    return _llama_like(keys, qkv_bias=attention, output_bias=attention, mlp_bias=mlp, head_norms=False)


def _mistral(keys: Keys) -> Architecture:
    return _llama_like(keys, qkv_bias=False, output_bias=False, mlp_bias=False, head_norms=False)


def _qwen2(keys: Keys) -> Architecture:
    return _llama_like(keys, qkv_bias=True, output_bias=False, mlp_bias=False, head_norms=False)


def _qwen3(keys: Keys) -> Architecture:
    attention = keys.flag("attention_bias", False)
    return _llama_like(keys, qkv_bias=attention, output_bias=attention, mlp_bias=False, head_norms=True)


#: model_type of config.json -> its layers.
FAMILIES: dict[str, Callable[[Keys], Architecture]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def describe_hf_model(config: Mapping[str, object], source: str) -> Architecture:
    """The model that a config.json describes. Raises ConfigError for a family that is not known."""
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ConfigError(f"{source}: model_type is missing; is this a transformers config.json?")
    if family not in FAMILIES:
        hint = did_you_mean(family, FAMILIES)
        raise ConfigError(f"{source}: model_type {family[:80]!r} is not known.{hint} Known: {', '.join(FAMILIES)}.")
    return FAMILIES[family](Keys(config, source))
