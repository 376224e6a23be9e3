"""Llama and the families with its entries and names: Mistral, Qwen 2, Qwen 3, OLMo 2; with experts Mixtral, Qwen 3 MoE,
OLMoE, FlexOlmo, dots.llm1.

Entries follow `transformers.models.<family>.configuration_<family>` and `modeling_<family>` (4.57). All compute the
router in fp32; noise and losses of their training are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from llmscale.architecture.families.family import Entry, Family, Fields, HFTensor, Keys, stacked
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

#: Entries of YaRN that transformers reads and llmscale's model does not compute with, each with its neutral value.
_YARN_KEYS: dict[str, object] = {
    "beta_fast": YARN_FAST,
    "beta_slow": YARN_SLOW,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
}
#: Values of layer_types.
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_BIAS = Entry("attention_bias", "attention_bias", False)
_NORMALIZE = Entry("norm_topk_prob", "normalize_router", False)
#: Experts as wide as the MLP.
_EXPERT_WIDTH = Entry("intermediate_size", "expert_width")
_OWN_WIDTH = Entry("moe_intermediate_size", "expert_width", 768)
_OF_DOTS1 = (
    Entry("moe_intermediate_size", "expert_width", 1408),
    Entry("first_k_dense_replace", "dense_layers", 0),
    Entry("routed_scaling_factor", "router_scale", 1.0),
)
_QK_NORM = {"qk_norm": "head"}
_OLMO = {"qk_norm": "width", "norm_placement": "post"}


@dataclass(frozen=True)
class ExpertNames:
    """Names of the tensors of experts in the files of a family."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    has_bias: bool = False
    """True when every router has a bias for the choice of experts."""


def _read_rotary(keys: Keys, usual: _Usual) -> Fields:
    """Read base and scaling: top-level entries up to transformers 4, entries of `rope_parameters` from 5 on."""
    section = keys.section("rope_parameters")
    theta = (section or keys).number("rope_theta", keys.number("rope_theta", usual.theta))
    section = section or keys.section("rope_scaling")
    if section is None:
        scaling = "none"
    else:
        scaling = _read_scaling(section, keys.count("max_position_embeddings", usual.positions))
    return {"rope_theta": theta, "rope_scaling": scaling}


def _read_scaling(section: Keys, seq_len: int) -> str:
    # Each kind of layer may have its own rotations; transformers ignores other entries that it does not know.
    section.require_flat()
    section.require("partial_rotary_factor", 1.0)
    name = "rope_type" if section.has("rope_type") or not section.has("type") else "type"
    kind = section.choice(name, _ROPE_TYPES, "default", " --rope-scaling none takes the model without it.")
    if kind == "none":
        return kind
    factor = section.number("factor", 1.0)
    if kind == "linear":
        return str(LinearScaling(factor))
    if kind == "yarn":
        for entry, neutral in _YARN_KEYS.items():
            section.require(entry, neutral)
        # Without the entry transformers takes the extended context.
        return str(YarnScaling(factor, section.count("original_max_position_embeddings", seq_len)))
    low, high = (section.number(f"{which}_freq_factor", 1.0) for which in ("low", "high"))
    return str(Llama3Scaling(factor, low, high, section.count("original_max_position_embeddings")))


def _write_rotary(shape: GPTShape) -> dict[str, object]:
    scaling = parse_rope_scaling(shape.rope_scaling)
    written: dict[str, object] | None = None
    if isinstance(scaling, LinearScaling):
        written = {"rope_type": "linear", "factor": scaling.factor}
    elif scaling is not None:
        kind = "llama3" if isinstance(scaling, Llama3Scaling) else "yarn"
        written = {"rope_type": kind, "original_max_position_embeddings": scaling.original_seq_len, **vars(scaling)}
        del written["original_seq_len"]
    return {"rope_theta": shape.rope_theta, "rope_scaling": written}


def _list_tensors(shape: GPTShape, expert_names: ExpertNames = ExpertNames()) -> Iterator[HFTensor]:
    """Yield the tensors, with `expert_names` those of blocks with experts."""
    h = shape.n_embd
    d = shape.head_dim
    queries = shape.n_head * d
    keys = shape.n_kv_head * d
    if shape.norm_placement == "pre":
        after_attention = "input_layernorm"
        after_mlp = "post_attention_layernorm"
    else:
        after_attention = "post_attention_layernorm"
        after_mlp = "post_feedforward_layernorm"
    of_norms = {"none": (), "head": (d, d), "width": (queries, keys)}[shape.qk_norm]
    yield HFTensor("model.embed_tokens.weight", "wte.weight", (shape.vocab_size, h))
    for block in range(shape.n_layer):
        ours = f"blocks.{block}"
        theirs = f"model.layers.{block}"
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
    h = shape.n_embd
    m = shape.expert_width
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


def _has_null_window(keys: Keys) -> bool:
    """Return whether sliding_window is null: no window. A missing entry means the window of Mistral 7B v0.1."""
    return keys.mentions("sliding_window") and not keys.has("sliding_window")


def _read_mistral(keys: Keys, _: Fields) -> Fields:
    return {"sliding_window": 0 if _has_null_window(keys) else keys.count("sliding_window", 4096)}


def _read_mixtral(keys: Keys, _: Fields) -> Fields:
    if keys.has("sliding_window"):
        return {"sliding_window": keys.count("sliding_window")}
    return {}


def _write_window(shape: GPTShape) -> dict[str, object]:
    return {"sliding_window": shape.sliding_window or None}


def _read_windows(keys: Keys, full_layers: int, *, has_window: bool) -> Fields:
    """Read the windows of layers, if `has_window`. `full_layers`: the family's max_window_layers."""
    types = keys.items("layer_types", str)
    for name in {*types} - {_FULL, _SLIDING}:
        raise ConfigError(f"{keys.source}: layer_types has '{name[:80]}'; llmscale has {_FULL} and {_SLIDING}.")
    if _has_null_window(keys) or not has_window:
        return {}
    layers = keys.layers()
    if not types:
        # The first max_window_layers see everything.
        first = keys.count("max_window_layers", full_layers, least=0)
        types = [_FULL if layer < first else _SLIDING for layer in range(layers)]
    if len(types) != layers:
        raise ConfigError(f"{keys.source}: layer_types has {len(types)} entries for {layers} layers.")
    if _SLIDING not in types:
        return {}
    pattern = "".join("L" if name == _SLIDING else "G" for name in types)
    return {"sliding_window": keys.count("sliding_window", 4096), "window_pattern": pattern}


def _write_windows(shape: GPTShape) -> dict[str, object]:
    if not shape.sliding_window:
        return {"max_window_layers": shape.n_layer}
    types = [_SLIDING if shape.is_local(block) else _FULL for block in range(shape.n_layer)]
    first = types.index(_SLIDING)
    return {"sliding_window": shape.sliding_window, "max_window_layers": first, "layer_types": types}


def _read_qwen(keys: Keys, _: Fields) -> Fields:
    return _read_windows(keys, 28, has_window=keys.flag("use_sliding_window", False))


def _write_qwen(shape: GPTShape) -> dict[str, object]:
    return {"use_sliding_window": bool(shape.sliding_window), **_write_windows(shape)}


def _check_olmo2(keys: Keys, fields: Fields) -> Fields:
    if kind := re.match("(llama3|yarn):", str(fields["rope_scaling"])):
        raise ConfigError(f"{keys.source}: transformers' OLMo 2 has no {kind[1]} rope_scaling; it has linear alone.")
    return {}


def _write_olmo2(shape: GPTShape) -> dict[str, object]:
    scaling = parse_rope_scaling(shape.rope_scaling)
    if isinstance(scaling, LinearScaling):
        linear = {"type": "linear", "factor": scaling.factor}
    else:
        linear = None
    return {"rope_scaling": linear, **_write_no_padding(shape)}


def _write_no_padding(_: GPTShape) -> dict[str, object]:
    # By default a token of theirs, whose embedding transformers then leaves untrained.
    return {"pad_token_id": None}


def _read_qwen3_moe(keys: Keys, _: Fields) -> Fields:
    """Read the window, and which blocks have experts: leading ones without, then every n-th."""
    has_window = keys.flag("use_sliding_window", False) and not _has_null_window(keys)
    if has_window:
        window = {"sliding_window": keys.count("sliding_window", 4096)}
    else:
        window = {}
    layers = keys.layers()
    step = keys.count("decoder_sparse_step", 1)
    sparse = sorted({*range(step - 1, layers, step)}.difference(keys.items("mlp_only_layers", int)))
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
    return {**window, "dense_layers": leading, "expert_interval": interval}


def _write_qwen3_moe(shape: GPTShape) -> dict[str, object]:
    return {
        "use_sliding_window": bool(shape.sliding_window),
        **({"sliding_window": shape.sliding_window} if shape.sliding_window else {}),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [block for block in range(shape.n_layer) if not shape.is_sparse(block)],
    }


def _read_olmoe(keys: Keys, fields: Fields) -> Fields:
    keys.require("clip_qkv", None)
    # transformers' class does not read head_dim.
    return {"head_dim": fields["n_embd"] // fields["n_head"]}  # type: ignore[operator]  # counts


def _read_dots1(keys: Keys, fields: Fields) -> Fields:
    # Groups of experts, of which DeepSeek V3 chooses some first.
    keys.require("n_group", 1)
    keys.require("topk_group", 1)
    shared = fields["expert_width"] * keys.count("n_shared_experts")  # type: ignore[operator]  # counts
    return {**_read_windows(keys, 62, has_window=True), "shared_expert_width": shared}


def _write_dots1(shape: GPTShape) -> dict[str, object]:
    shared = shape.shared_expert_width // max(1, shape.expert_width)
    groups = {"n_group": 1, "topk_group": 1}
    return {"sliding_window": None, **_write_windows(shape), "n_shared_experts": shared, **groups}


class _Usual(NamedTuple):
    """A family's defaults of shared entries."""

    positions: int
    eps: float = 1e-6
    kv_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: the width divided by the query heads."""
    theta: float = 10_000.0

    def get_kv_heads(self, keys: Keys, fields: Fields) -> object:
        # null means all of them, and no entry the family's default.
        is_given = self.kv_heads is None or keys.mentions("num_key_value_heads")
        return fields["n_head"] if is_given else self.kv_heads

    def get_head_dim(self, _: Keys, fields: Fields) -> object:
        return self.head_dim or fields["n_embd"] // fields["n_head"]  # type: ignore[operator]  # counts

    def entries(self) -> tuple[Entry, ...]:
        """Return the shared entries."""
        return (
            Entry("num_hidden_layers", "n_layer"),
            Entry("num_attention_heads", "n_head"),
            Entry("hidden_size", "n_embd"),
            Entry("vocab_size", "vocab_size"),
            Entry("max_position_embeddings", "seq_len", self.positions),
            Entry("num_key_value_heads", "n_kv_head", self.get_kv_heads),
            Entry("head_dim", "head_dim", self.get_head_dim),
            Entry("intermediate_size", "mlp_width"),
            Entry("hidden_act", "activation", "silu"),
            Entry("rms_norm_eps", "norm_eps", self.eps),
            Entry("tie_word_embeddings", "tied", False),
        )


def _family(
    model_type: str,
    architecture: str,
    usual: _Usual,
    entries: tuple[Entry, ...],
    fixed: Mapping[str, object],
    read: Callable[[Keys, Fields], Fields] = lambda keys, fields: {},
    write: Callable[[GPTShape], dict[str, object]] = lambda shape: {},
    names: ExpertNames = ExpertNames(),
) -> Family:
    """Return a family from its defaults, its own entries and its fixed fields; `read` and `write` are for the rest."""

    def read_more(keys: Keys, fields: Fields) -> Fields:
        keys.require("partial_rotary_factor", 1.0)
        rotary = _read_rotary(keys, usual)
        return rotary | read(keys, fields | rotary)

    def write_more(shape: GPTShape) -> dict[str, object]:
        return _write_rotary(shape) | write(shape)

    return Family(
        model_type,
        f"{architecture}ForCausalLM",
        usual.entries() + entries,
        partial(_list_tensors, expert_names=names),
        {"gated_mlp": True, "norm": "rmsnorm", "bias": False, "positions": "rotary", **fixed},
        read_more=read_more,
        write_more=write_more,
        adds="router_bias" if names.has_bias else "",
    )


def _experts(name: str, count: int | None, chosen: int | None) -> tuple[Entry, Entry]:
    """Return the entries of the number of experts, and of those of a token, with a family's defaults."""
    return Entry(name, "num_experts", count), Entry("num_experts_per_tok", "experts_per_token", chosen)


_MIXTRAL_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
_WITH_BIAS = ExpertNames(has_bias=True)
_QWEN = _Usual(32_768, kv_heads=32)
_QWEN3 = _Usual(32_768, kv_heads=32, head_dim=128)

#: Ordered: the first family that can express a shape writes it.
LLAMA_LIKE = (
    _family("llama", "Llama", _Usual(2048), (_BIAS, Entry("mlp_bias", "mlp_bias", False)), {}),
    _family("mistral", "Mistral", _Usual(131_072, kv_heads=8), (), {}, _read_mistral, _write_window),
    _family("qwen2", "Qwen2", _QWEN, (), {"attention_bias": "qkv"}, _read_qwen, _write_qwen),
    _family("qwen3", "Qwen3", _QWEN3, (_BIAS,), _QK_NORM, _read_qwen, _write_qwen),
    _family("olmo2", "Olmo2", _Usual(2048, 1e-5), (_BIAS,), _OLMO, _check_olmo2, _write_olmo2),
    _family(
        "mixtral",
        "Mixtral",
        _Usual(131_072, 1e-5, kv_heads=8, theta=1e6),
        (*_experts("num_local_experts", 8, 2), _EXPERT_WIDTH),
        {"normalize_router": True},
        _read_mixtral,
        _write_window,
        _MIXTRAL_NAMES,
    ),
    _family(
        "qwen3_moe",
        "Qwen3Moe",
        _Usual(32_768, kv_heads=4),
        (_BIAS, *_experts("num_experts", 128, 8), _NORMALIZE, _OWN_WIDTH),
        _QK_NORM,
        _read_qwen3_moe,
        _write_qwen3_moe,
    ),
    _family(
        "olmoe",
        "Olmoe",
        _Usual(4096, 1e-5),
        (_BIAS, *_experts("num_experts", 64, 8), _NORMALIZE, _EXPERT_WIDTH),
        {"qk_norm": "width"},
        _read_olmoe,
        _write_no_padding,
    ),
    _family(
        "flex_olmo",
        "FlexOlmo",
        _Usual(4096, theta=5e5),
        (_BIAS, *_experts("num_experts", 7, 5), _NORMALIZE, _EXPERT_WIDTH),
        _OLMO,
        write=_write_no_padding,
    ),
    _family(
        "dots1",
        "Dots1",
        _Usual(2048, kv_heads=32),
        (_BIAS, *_experts("n_routed_experts", None, None), _NORMALIZE, *_OF_DOTS1),
        {**_QK_NORM, "router_score": "sigmoid", "router_bias": True},
        _read_dots1,
        _write_dots1,
        _WITH_BIAS,
    ),
)
