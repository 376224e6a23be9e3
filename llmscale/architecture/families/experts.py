"""Families with experts, in Llama's entries and names: Mixtral, Qwen 3 MoE, OLMoE, FlexOlmo, dots.llm1.

Entries follow `transformers.models.<family>.configuration_<family>` and `modeling_<family>` (4.57). All compute the
router in fp32; noise and losses of their training are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llmscale.architecture.families.family import Family, Keys
from llmscale.architecture.families.llama import (
    ExpertNames,
    has_null_window,
    list_tensors,
    read_attention_bias,
    read_shared,
    read_windows,
    write_shared,
    write_windows,
)
from llmscale.architecture.shape import GPTShape
from llmscale.errors import ConfigError

_NAMES = ExpertNames()


def _read_mixtral(keys: Keys) -> dict[str, object]:
    shape = read_shared(keys, positions=131_072, eps=1e-5, kv_heads=8, theta=1e6)
    window = {"sliding_window": keys.count("sliding_window")} if keys.has("sliding_window") else {}
    return {**shape, **window, **_read_experts(keys, 8, 2, name="num_local_experts", normalize=True)}


def _read_experts(
    keys: Keys, count: int, chosen: int, *, name: str, normalize: bool | None = None
) -> dict[str, object]:
    """Read experts as wide as the MLP. Arguments are a family's defaults; `normalize`: what it always does."""
    return {
        "num_experts": keys.experts(name, keys.layers("num_hidden_layers"), count),
        "experts_per_token": keys.count("num_experts_per_tok", chosen),
        "expert_width": keys.count("intermediate_size"),
        "normalize_router": keys.flag("norm_topk_prob", False) if normalize is None else normalize,
    }


def _write_mixtral(shape: GPTShape) -> dict[str, object]:
    return {
        **write_shared(shape),
        "intermediate_size": shape.expert_width,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "sliding_window": shape.sliding_window or None,
    }


def _read_qwen3_moe(keys: Keys) -> dict[str, object]:
    has_window = keys.flag("use_sliding_window", False) and not has_null_window(keys)
    return {
        **read_shared(keys, positions=32_768, kv_heads=4),
        "qk_norm": "head",
        "attention_bias": read_attention_bias(keys),
        **({"sliding_window": keys.count("sliding_window", 4096)} if has_window else {}),
        **_read_experts(keys, 128, 8, name="num_experts"),
        **_read_places(keys),
        "expert_width": keys.count("moe_intermediate_size", 768),
    }


def _read_places(keys: Keys) -> dict[str, object]:
    """Read which blocks have experts: leading ones without, then every n-th."""
    layers, step = keys.layers("num_hidden_layers"), keys.count("decoder_sparse_step", 1)
    sparse = sorted({*range(step - 1, layers, step)}.difference(keys.counts("mlp_only_layers")))
    if not sparse:
        raise ConfigError(f"{keys.source}: mlp_only_layers and decoder_sparse_step leave no block with experts.")
    # A single block with experts has no distance to the next: it is the last one, or the next would be after the end.
    interval = sparse[1] - sparse[0] if len(sparse) > 1 else layers - sparse[0]
    leading = sparse[0] + 1 - interval
    if leading < 0 or sparse != list(range(sparse[0], layers, interval)):
        raise ConfigError(
            f"{keys.source}: mlp_only_layers and decoder_sparse_step give experts to the blocks "
            f"{', '.join(map(str, sparse[:8]))}{', ...' if len(sparse) > 8 else ''} of {layers}; llmscale has blocks "
            "without experts first, and then experts in every n-th block."
        )
    return {"dense_layers": leading, "expert_interval": interval}


def _write_qwen3_moe(shape: GPTShape) -> dict[str, object]:
    return {
        **write_shared(shape),
        "attention_bias": shape.attention_bias == "all",
        "use_sliding_window": bool(shape.sliding_window),
        **({"sliding_window": shape.sliding_window} if shape.sliding_window else {}),
        "moe_intermediate_size": shape.expert_width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [block for block in range(shape.n_layer) if not shape.is_sparse(block)],
        **_write_experts(shape),
    }


def _write_experts(shape: GPTShape) -> dict[str, object]:
    return {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "norm_topk_prob": shape.normalize_router,
    }


def _read_olmoe(keys: Keys) -> dict[str, object]:
    shape = read_shared(keys, positions=4096, eps=1e-5)
    keys.require("clip_qkv", None)
    n_embd, n_head = keys.heads()
    # transformers' class does not read head_dim.
    more = {"qk_norm": "width", "attention_bias": read_attention_bias(keys), "head_dim": n_embd // n_head}
    return {**shape, **_read_experts(keys, 64, 8, name="num_experts"), **more}


def _read_flex_olmo(keys: Keys) -> dict[str, object]:
    shape = read_shared(keys, positions=4096, theta=5e5)
    more = {"qk_norm": "width", "norm_placement": "post", "attention_bias": read_attention_bias(keys)}
    return {**shape, **_read_experts(keys, 7, 5, name="num_experts"), **more}


def _write_olmo(shape: GPTShape) -> dict[str, object]:
    return {
        **write_shared(shape),
        "intermediate_size": shape.expert_width,
        "attention_bias": shape.attention_bias == "all",
        # By default a token whose embedding transformers then leaves untrained.
        "pad_token_id": None,
        **_write_experts(shape),
    }


def _read_dots1(keys: Keys) -> dict[str, object]:
    # Groups of experts, of which DeepSeek V3 chooses some first.
    keys.require("n_group", 1)
    keys.require("topk_group", 1)
    width = keys.count("moe_intermediate_size", 1408)
    return {
        **read_shared(keys, positions=2048, kv_heads=32),
        "qk_norm": "head",
        "attention_bias": read_attention_bias(keys),
        **read_windows(keys, 62, has_window=True),
        "num_experts": keys.experts("n_routed_experts", keys.layers("num_hidden_layers")),
        "experts_per_token": keys.count("num_experts_per_tok"),
        "expert_width": width,
        "shared_expert_width": width * keys.count("n_shared_experts"),
        "dense_layers": keys.count_from_0("first_k_dense_replace", 0),
        "router_score": "sigmoid",
        "normalize_router": keys.flag("norm_topk_prob", False),
        "router_scale": keys.number("routed_scaling_factor", 1.0),
        "router_bias": True,
    }


def _write_dots1(shape: GPTShape) -> dict[str, object]:
    return {
        **write_shared(shape),
        "attention_bias": shape.attention_bias == "all",
        "sliding_window": None,
        **write_windows(shape),
        "n_routed_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_width,
        "n_shared_experts": shape.shared_expert_width // max(1, shape.expert_width),
        "first_k_dense_replace": shape.dense_layers,
        "norm_topk_prob": shape.normalize_router,
        "routed_scaling_factor": shape.router_scale,
        "n_group": 1,
        "topk_group": 1,
    }


def _family(
    model_type: str,
    architecture: str,
    read: Callable[[Keys], dict[str, object]],
    write: Callable[[GPTShape], dict[str, object]],
    names: ExpertNames = _NAMES,
) -> Family:
    tensors, adds = partial(list_tensors, expert_names=names), "router_bias" if names.has_bias else ""
    return Family(model_type, f"{architecture}ForCausalLM", read, write, tensors, adds)


#: Ordered: the first family that can express a shape writes it.
WITH_EXPERTS = (
    _family("mixtral", "Mixtral", _read_mixtral, _write_mixtral, ExpertNames("block_sparse_moe", "w1", "w3", "w2")),
    _family("qwen3_moe", "Qwen3Moe", _read_qwen3_moe, _write_qwen3_moe),
    _family("olmoe", "Olmoe", _read_olmoe, _write_olmo),
    _family("flex_olmo", "FlexOlmo", _read_flex_olmo, _write_olmo),
    _family("dots1", "Dots1", _read_dots1, _write_dots1, ExpertNames(has_bias=True)),
)
