"""The parameters of transformers' decoder families, tensor by tensor, from their config.json alone. No torch.

Each builder follows the modules of `transformers.models.<family>.modeling_<family>` (4.57); the tests compare every
tensor with a model that transformers builds on torch's meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmscale.architecture.parameter_list import Layer
from llmscale.errors import ConfigError, did_you_mean

TensorShape = tuple[int, ...]
Shapes = tuple[TensorShape, ...]
#: Shapes by the layer of llmscale.model.gpt that does the same: what DeepSpeed gathers at once, and in which order
#: gradients come.
Layers = tuple[tuple[Layer, Shapes], ...]


@dataclass(frozen=True)
class Tensors:
    """Shapes of a decoder's parameters in the order of the forward pass; a tied head is the embedding's tensor."""

    before_blocks: Layers
    block: Layers
    """Of one block; all blocks are alike."""
    n_layer: int
    after_blocks: Layers
    tied: bool
    """The output head is the token table."""


#: Widths and vocabularies; layers.
_MOST, _MOST_LAYERS = 1 << 30, 10_000


class Keys:
    """A config.json's entries, typed; ConfigError names the entry that is missing or wrong."""

    def __init__(self, config: Mapping[str, object], source: str) -> None:
        self._config, self._source = config, source

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer. null counts as absent."""
        value = self._config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "is missing" if value is None else f"is {value!r}"
            raise ConfigError(f"{self._source}: {name} {found}; a positive integer is needed to count parameters.")
        if value > _MOST:
            raise ConfigError(f"{self._source}: {name} is {value}, more than the {_MOST:,} of any model.")
        return value

    def layers(self, name: str) -> int:
        """A number of layers: every one of them is looked at."""
        value = self.count(name)
        if value > _MOST_LAYERS:
            raise ConfigError(f"{self._source}: {name} is {value}, more than the {_MOST_LAYERS:,} of any model.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"{self._source}: {name} is {value!r}, not true or false.")
        return value

    def heads(self, width: str = "hidden_size", heads: str = "num_attention_heads") -> tuple[int, int]:
        """Width of the residual stream and number of query heads, which must divide it unless head_dim is given."""
        n_embd, n_head = self.count(width), self.count(heads)
        if self._config.get("head_dim") is None and n_embd % n_head:
            raise ConfigError(f"{self._source}: {width} {n_embd} is not divisible by {heads} {n_head}.")
        return n_embd, n_head


def _linear(inputs: int, outputs: int, bias: bool) -> Shapes:
    return ((outputs, inputs), (outputs,)) if bias else ((outputs, inputs),)


def _layer_norm(width: int) -> Shapes:
    return ((width,), (width,))


def _gpt2(keys: Keys) -> Tensors:
    h, _ = keys.heads("n_embd", "n_head")
    vocab, inner = keys.count("vocab_size"), keys.count("n_inner", 4 * h)
    tied = keys.flag("tie_word_embeddings", True)
    # transformers' Conv1D stores [inputs, outputs]; a transposed matrix is as large.
    return Tensors(
        before_blocks=(("wte", ((vocab, h),)), ("wpe", ((keys.count("n_positions", 1024), h),))),
        block=(
            ("ln_1", _layer_norm(h)),
            ("qkv", _linear(h, 3 * h, True)),
            ("proj", _linear(h, h, True)),
            ("ln_2", _layer_norm(h)),
            ("up", _linear(h, inner, True)),
            ("down", _linear(inner, h, True)),
        ),
        n_layer=keys.layers("n_layer"),
        after_blocks=(("ln_f", _layer_norm(h)), _head(tied, vocab, h)),
        tied=tied,
    )


def _opt(keys: Keys) -> Tensors:
    h, _ = keys.heads()
    vocab, table, bias = keys.count("vocab_size"), keys.count("word_embed_proj_dim", h), keys.flag("enable_bias", True)
    tied, inner = keys.flag("tie_word_embeddings", True), keys.count("ffn_dim")
    norm = _layer_norm(h) if keys.flag("layer_norm_elementwise_affine", True) else ()
    # Two positions more than the model has: OPT's ids begin at 2. A narrower table is projected in and out.
    positions: Shapes = ((keys.count("max_position_embeddings", 2048) + 2, h),)
    has_final_norm = keys.flag("do_layer_norm_before", True) and not keys.flag("_remove_final_layer_norm", False)
    final = norm if has_final_norm else ()
    if table != h:
        positions += ((h, table),)
        final += ((table, h),)
    return Tensors(
        before_blocks=(("wte", ((vocab, table),)), ("wpe", positions)),
        block=(
            ("qkv", 3 * _linear(h, h, bias)),
            ("proj", _linear(h, h, bias)),
            ("ln_1", norm),
            ("up", _linear(h, inner, bias)),
            ("down", _linear(inner, h, bias)),
            ("ln_2", norm),
        ),
        n_layer=keys.layers("num_hidden_layers"),
        after_blocks=(("ln_f", final), _head(tied, vocab, table)),
        tied=tied,
    )


def _gpt_neox(keys: Keys) -> Tensors:
    h, _ = keys.heads()
    vocab, inner = keys.count("vocab_size"), keys.count("intermediate_size")
    bias, tied = keys.flag("attention_bias", True), keys.flag("tie_word_embeddings", False)
    return Tensors(
        before_blocks=(("wte", ((vocab, h),)),),
        block=(
            ("ln_1", _layer_norm(h)),
            ("ln_2", _layer_norm(h)),
            ("qkv", _linear(h, 3 * h, bias)),
            ("proj", _linear(h, h, bias)),
            ("up", _linear(h, inner, True)),
            ("down", _linear(inner, h, True)),
        ),
        n_layer=keys.layers("num_hidden_layers"),
        after_blocks=(("ln_f", _layer_norm(h)), _head(tied, vocab, h)),
        tied=tied,
    )


def _head(tied: bool, vocab: int, width: int) -> tuple[Layer, Shapes]:
    return "head", () if tied else ((vocab, width),)


def _llama_like(keys: Keys, *, qkv_bias: bool, output_bias: bool, mlp_bias: bool, head_norms: bool) -> Tensors:
    """RMS norms, rotary positions, grouped keys and values, gated MLP."""
    h, n_head = keys.heads()
    vocab, inner = keys.count("vocab_size"), keys.count("intermediate_size")
    head_dim, kv_heads = keys.count("head_dim", h // n_head), keys.count("num_key_value_heads", n_head)
    tied = keys.flag("tie_word_embeddings", False)
    queries, keys_values = n_head * head_dim, kv_heads * head_dim
    norms: Shapes = ((head_dim,), (head_dim,)) if head_norms else ()
    return Tensors(
        before_blocks=(("wte", ((vocab, h),)),),
        block=(
            ("qkv", _linear(h, queries, qkv_bias) + 2 * _linear(h, keys_values, qkv_bias) + norms),
            ("proj", _linear(queries, h, output_bias)),
            ("up", 2 * _linear(h, inner, mlp_bias)),
            ("down", _linear(inner, h, mlp_bias)),
            ("ln_1", ((h,),)),
            ("ln_2", ((h,),)),
        ),
        n_layer=keys.layers("num_hidden_layers"),
        after_blocks=(("ln_f", ((h,),)), _head(tied, vocab, h)),
        tied=tied,
    )


def _llama(keys: Keys) -> Tensors:
    attention = keys.flag("attention_bias", False)
    mlp = keys.flag("mlp_bias", False)
    return _llama_like(keys, qkv_bias=attention, output_bias=attention, mlp_bias=mlp, head_norms=False)


def _mistral(keys: Keys) -> Tensors:
    return _llama_like(keys, qkv_bias=False, output_bias=False, mlp_bias=False, head_norms=False)


def _qwen2(keys: Keys) -> Tensors:
    return _llama_like(keys, qkv_bias=True, output_bias=False, mlp_bias=False, head_norms=False)


def _qwen3(keys: Keys) -> Tensors:
    attention = keys.flag("attention_bias", False)
    return _llama_like(keys, qkv_bias=attention, output_bias=attention, mlp_bias=False, head_norms=True)


#: model_type of config.json -> its parameters.
FAMILIES: dict[str, Callable[[Keys], Tensors]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def build_tensors(config: Mapping[str, object], source: str) -> Tensors:
    """The parameters that a config.json describes. Raises ConfigError for a family that is not known."""
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ConfigError(f"{source}: model_type is missing; is this a transformers config.json?")
    if family not in FAMILIES:
        hint = did_you_mean(family, FAMILIES)
        raise ConfigError(f"{source}: model_type '{family}' is not known.{hint} Known: {', '.join(FAMILIES)}.")
    return FAMILIES[family](Keys(config, source))
