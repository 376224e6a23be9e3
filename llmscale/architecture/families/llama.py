"""Llama and the families with the same config.json entries: Mistral, Qwen 2, Qwen 3, OLMo 2."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmscale.architecture.families.family import ACTIVATIONS, Family, HFTensor, Keys, stacked
from llmscale.architecture.rope_scaling import (
    YARN_FAST,
    YARN_SLOW,
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
    parse_rope_scaling,
)
from llmscale.architecture.shape import GPTShape
from llmscale.errors import ConfigError

_THEIR_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "relu": "relu", "gelu_tanh": "gelu_pytorch_tanh"}
#: Entries of YaRN that transformers reads and llmscale's model does not compute with, each with its neutral value.
_YARN_KEYS: dict[str, object] = {
    "beta_fast": YARN_FAST,
    "beta_slow": YARN_SLOW,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
}


@dataclass(frozen=True)
class ExpertNames:
    """Names of the tensors of experts in the files of a family."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    has_bias: bool = False
    """True when every router has a bias for the choice of experts."""


#: Values of layer_types.
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}


def read_shared(
    keys: Keys, *, positions: int, eps: float = 1e-6, kv_heads: int | None = None, theta: float = 10_000.0
) -> dict[str, object]:
    """Read the shared entries. Arguments are a family's defaults: `positions` of max_position_embeddings, `eps` of
    rms_norm_eps, `kv_heads` of num_key_value_heads (None: as many as query heads), `theta` of rope_theta."""
    n_embd, n_head = keys.heads()
    kv_heads = kv_heads or n_head
    keys.require("partial_rotary_factor", 1.0)
    theta, scaling = _read_rotary(keys, positions, theta)
    return {
        "n_layer": keys.layers("num_hidden_layers"),
        "n_head": n_head,
        "n_embd": n_embd,
        "vocab_size": keys.count("vocab_size"),
        "seq_len": keys.count("max_position_embeddings", positions),
        # null means all of them, and no entry the family's default.
        "n_kv_head": keys.count("num_key_value_heads", n_head if keys.mentions("num_key_value_heads") else kv_heads),
        "head_dim": keys.count("head_dim", n_embd // n_head),
        "mlp_width": keys.count("intermediate_size"),
        "gated_mlp": True,
        "activation": keys.choice("hidden_act", ACTIVATIONS, "silu"),
        "norm": "rmsnorm",
        "norm_eps": keys.number("rms_norm_eps", eps),
        "bias": False,
        "positions": "rotary",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tied": keys.flag("tie_word_embeddings", False),
    }


def _read_rotary(keys: Keys, positions: int, default: float) -> tuple[float, str]:
    """Return base and scaling: top-level entries up to transformers 4, entries of `rope_parameters` from 5 on."""
    section = keys.section("rope_parameters")
    theta = (section or keys).number("rope_theta", keys.number("rope_theta", default))
    section = section or keys.section("rope_scaling")
    if section is None:
        return theta, "none"
    # Each kind of layer may have its own rotations; transformers ignores other entries that it does not know.
    section.require_flat()
    section.require("partial_rotary_factor", 1.0)
    name = "rope_type" if section.has("rope_type") or not section.has("type") else "type"
    kind = section.choice(name, _ROPE_TYPES, "default", " --rope-scaling none takes the model without it.")
    if kind == "none":
        return theta, kind
    factor = section.number("factor", 1.0)
    if kind == "linear":
        return theta, str(LinearScaling(factor))
    if kind == "yarn":
        for entry, neutral in _YARN_KEYS.items():
            section.require(entry, neutral)
        # Without the entry transformers takes the extended context.
        length = section.count("original_max_position_embeddings", keys.count("max_position_embeddings", positions))
        return theta, str(YarnScaling(factor, length))
    low, high = (section.number(f"{which}_freq_factor", 1.0) for which in ("low", "high"))
    return theta, str(Llama3Scaling(factor, low, high, section.count("original_max_position_embeddings")))


def write_shared(shape: GPTShape) -> dict[str, object]:
    return {
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.seq_len,
        "hidden_size": shape.n_embd,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.n_kv_head,
        "head_dim": shape.head_dim,
        "hidden_act": _THEIR_ACTIVATIONS[shape.activation],
        "rms_norm_eps": shape.norm_eps,
        "attention_dropout": shape.dropout,
        "rope_theta": shape.rope_theta,
        "rope_scaling": _write_scaling(shape.rope_scaling),
        "tie_word_embeddings": shape.tied,
    }


def _write_scaling(text: str) -> dict[str, object] | None:
    scaling = parse_rope_scaling(text)
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, Llama3Scaling):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_seq_len,
        }
    if isinstance(scaling, YarnScaling):
        original = {"original_max_position_embeddings": scaling.original_seq_len}
        return {"rope_type": "yarn", "factor": scaling.factor, **original}
    return None


def list_tensors(shape: GPTShape, expert_names: ExpertNames = ExpertNames()) -> Iterator[HFTensor]:
    """Yield the tensors, with `expert_names` those of blocks with experts."""
    h, d = shape.n_embd, shape.head_dim
    queries, keys = shape.n_head * d, shape.n_kv_head * d
    after_attention = "input_layernorm" if shape.norm_placement == "pre" else "post_attention_layernorm"
    after_mlp = "post_attention_layernorm" if shape.norm_placement == "pre" else "post_feedforward_layernorm"
    of_norms = {"none": (), "head": (d, d), "width": (queries, keys)}[shape.qk_norm]
    yield HFTensor("model.embed_tokens.weight", "wte.weight", (shape.vocab_size, h))
    for block in range(shape.n_layer):
        ours, theirs = f"blocks.{block}", f"model.layers.{block}"
        yield HFTensor(f"{theirs}.{after_attention}.weight", f"{ours}.ln_1.weight", (h,))
        parts = dict(zip((f"{theirs}.self_attn.{name}_proj" for name in "qkv"), (queries, keys, keys), strict=True))
        yield from stacked(parts, f"{ours}.attn.qkv", h, bias=shape.attention_bias != "none")
        for name, width in zip(("q_norm", "k_norm"), of_norms, strict=False):
            yield HFTensor(f"{theirs}.self_attn.{name}.weight", f"{ours}.attn.{name}.weight", (width,))
        output = {f"{theirs}.self_attn.o_proj": h}
        yield from stacked(output, f"{ours}.attn.proj", queries, bias=shape.attention_bias == "all")
        yield HFTensor(f"{theirs}.{after_mlp}.weight", f"{ours}.ln_2.weight", (h,))
        if shape.is_sparse(block):
            yield from _expert_tensors(shape, theirs, f"{ours}.mlp", expert_names)
        else:
            yield from _mlp_tensors(shape, f"{theirs}.mlp", f"{ours}.mlp", shape.mlp_width)
    yield HFTensor("model.norm.weight", "ln_f.weight", (h,))
    if not shape.tied:
        yield HFTensor("lm_head.weight", "head.weight", (shape.vocab_size, h))


def _mlp_tensors(shape: GPTShape, theirs: str, ours: str, width: int) -> Iterator[HFTensor]:
    bias = bool(shape.mlp_bias)
    parts = {f"{theirs}.{name}_proj": width for name in ("gate", "up")}
    yield from stacked(parts, f"{ours}.up", shape.n_embd, bias=bias)
    yield from stacked({f"{theirs}.down_proj": shape.n_embd}, f"{ours}.down", width, bias=bias)


def _expert_tensors(shape: GPTShape, theirs: str, ours: str, names: ExpertNames) -> Iterator[HFTensor]:
    """Yield router, experts and shared expert. Ours has the rows of all experts in one parameter: [E, 2m, h] and
    [E, h, m]."""
    h, m = shape.n_embd, shape.expert_width
    place = f"{theirs}.{names.module}"
    yield HFTensor(f"{place}.gate.weight", f"{ours}.router.weight", (shape.num_experts, h))
    if names.has_bias:
        bias = f"{ours}.router.bias" if shape.router_bias else ""
        yield HFTensor(f"{place}.gate.e_score_correction_bias", bias, (shape.num_experts,), is_fp32=True)
    for expert in range(shape.num_experts):
        for number, name in enumerate((names.gate, names.up), start=2 * expert):
            yield HFTensor(f"{place}.experts.{expert}.{name}.weight", f"{ours}.experts.up", (m, h), number * m)
        yield HFTensor(f"{place}.experts.{expert}.{names.down}.weight", f"{ours}.experts.down", (h, m), expert * h)
    if shape.shared_expert_width:
        yield from _mlp_tensors(shape, f"{place}.shared_experts", f"{ours}.shared", shape.shared_expert_width)


def read_attention_bias(keys: Keys) -> str:
    """Return `all` or `none` for `attention_bias`."""
    return "all" if keys.flag("attention_bias", False) else "none"


def has_null_window(keys: Keys) -> bool:
    """Return whether sliding_window is null: no window. A missing entry means the window of Mistral 7B v0.1."""
    return keys.mentions("sliding_window") and not keys.has("sliding_window")


def _read_llama(keys: Keys) -> dict[str, object]:
    return {
        **read_shared(keys, positions=2048),
        "attention_bias": read_attention_bias(keys),
        "mlp_bias": keys.flag("mlp_bias", False),
    }


def _write_llama(shape: GPTShape) -> dict[str, object]:
    return {**write_shared(shape), "attention_bias": shape.attention_bias == "all", "mlp_bias": bool(shape.mlp_bias)}


def _read_mistral(keys: Keys) -> dict[str, object]:
    window = 0 if has_null_window(keys) else keys.count("sliding_window", 4096)
    return {**read_shared(keys, positions=131_072, kv_heads=8), "sliding_window": window}


def _write_mistral(shape: GPTShape) -> dict[str, object]:
    return {**write_shared(shape), "sliding_window": shape.sliding_window or None}


def _read_qwen(keys: Keys) -> dict[str, object]:
    has_window = keys.flag("use_sliding_window", False)
    return {**read_shared(keys, positions=32_768, kv_heads=32), **read_windows(keys, 28, has_window=has_window)}


def read_windows(keys: Keys, full_layers: int, *, has_window: bool) -> dict[str, object]:
    """Read the windows of layers, if `has_window`. `full_layers`: the family's max_window_layers."""
    types = keys.texts("layer_types")
    for name in {*types} - {_FULL, _SLIDING}:
        raise ConfigError(f"{keys.source}: layer_types has '{name[:80]}'; llmscale has {_FULL} and {_SLIDING}.")
    if has_null_window(keys) or not has_window:
        return {}
    layers = keys.layers("num_hidden_layers")
    if not types:
        # The first max_window_layers see everything.
        first = keys.count_from_0("max_window_layers", full_layers)
        types = [_FULL if layer < first else _SLIDING for layer in range(layers)]
    if len(types) != layers:
        raise ConfigError(f"{keys.source}: layer_types has {len(types)} entries for {layers} layers.")
    if _SLIDING not in types:
        return {}
    pattern = "".join("L" if name == _SLIDING else "G" for name in types)
    return {"sliding_window": keys.count("sliding_window", 4096), "window_pattern": pattern}


def _write_qwen(shape: GPTShape) -> dict[str, object]:
    return {**write_shared(shape), "use_sliding_window": bool(shape.sliding_window), **write_windows(shape)}


def write_windows(shape: GPTShape) -> dict[str, object]:
    """Return the entries of the windows of layers."""
    if not shape.sliding_window:
        return {"max_window_layers": shape.n_layer}
    types = [_SLIDING if shape.is_local(block) else _FULL for block in range(shape.n_layer)]
    first = types.index(_SLIDING)
    return {"sliding_window": shape.sliding_window, "max_window_layers": first, "layer_types": types}


def _read_qwen2(keys: Keys) -> dict[str, object]:
    return {**_read_qwen(keys), "attention_bias": "qkv"}


def _read_qwen3(keys: Keys) -> dict[str, object]:
    shape = _read_qwen(keys)
    # transformers' own default, whatever the width.
    head_dim = shape["head_dim"] if keys.has("head_dim") else 128
    return {**shape, "qk_norm": "head", "head_dim": head_dim, "attention_bias": read_attention_bias(keys)}


def _write_qwen3(shape: GPTShape) -> dict[str, object]:
    return {**_write_qwen(shape), "attention_bias": shape.attention_bias == "all"}


def _read_olmo2(keys: Keys) -> dict[str, object]:
    shape = read_shared(keys, positions=2048, eps=1e-5)
    if kind := re.match("(llama3|yarn):", str(shape["rope_scaling"])):
        raise ConfigError(f"{keys.source}: transformers' OLMo 2 has no {kind[1]} rope_scaling; it has linear alone.")
    return {**shape, "qk_norm": "width", "norm_placement": "post", "attention_bias": read_attention_bias(keys)}


def _write_olmo2(shape: GPTShape) -> dict[str, object]:
    scaling = parse_rope_scaling(shape.rope_scaling)
    return {
        **write_shared(shape),
        "attention_bias": shape.attention_bias == "all",
        "rope_scaling": {"type": "linear", "factor": scaling.factor} if isinstance(scaling, LinearScaling) else None,
        # By default token 1, whose embedding transformers then leaves untrained.
        "pad_token_id": None,
    }


def _family(
    model_type: str,
    architecture: str,
    read: Callable[[Keys], dict[str, object]],
    write: Callable[[GPTShape], dict[str, object]],
) -> Family:
    return Family(model_type, f"{architecture}ForCausalLM", read, write, list_tensors)


#: Ordered: the first family that can express a shape writes it.
LLAMA_LIKE = (
    _family("llama", "Llama", _read_llama, _write_llama),
    _family("mistral", "Mistral", _read_mistral, _write_mistral),
    _family("qwen2", "Qwen2", _read_qwen2, _write_qwen),
    _family("qwen3", "Qwen3", _read_qwen3, _write_qwen3),
    _family("olmo2", "Olmo2", _read_olmo2, _write_olmo2),
)
