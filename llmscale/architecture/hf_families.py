"""The layers of transformers' decoders that llmscale's own model cannot be, from their config.json alone. No torch.

What it can be is read by llmscale.architecture.families. Layers have the names of llmscale's own that do the same. Each
description follows the modules of `transformers.models.<family>.modeling_<family>` (4.57); the tests compare every
tensor with a model that transformers builds on torch's meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmscale.architecture.description import Architecture
from llmscale.architecture.families.config_keys import Keys
from llmscale.architecture.layers import (
    Layer,
    attention,
    elementwise,
    embedding,
    head,
    layer_norm,
    linear,
    together,
)

_QKV = ("q_proj", "k_proj", "v_proj")


def _opt(keys: Keys) -> Architecture:
    """With projections around a narrower token embedding, norms behind, or norms without weights."""
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


#: model_type of config.json -> its layers.
FAMILIES: dict[str, Callable[[Keys], Architecture]] = {
    "opt": _opt,
    "gpt_neox": _gpt_neox,
}


def is_described(config: Mapping[str, object]) -> bool:
    """Whether there is a description of this config.json's family here."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in FAMILIES


def describe_hf_model(config: Mapping[str, object], source: str) -> Architecture:
    """The model that a config.json of such a family describes. Raises ConfigError."""
    return FAMILIES[str(config["model_type"])](Keys(config, source))
