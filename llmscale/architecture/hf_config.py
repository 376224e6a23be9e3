"""A transformers `config.json`: where it is found, the family and shape that it describes, its parameters. No torch.

Families that llmscale trains are in architecture/families. More (`_DECODERS`) are only
described by their parameters, following `transformers.models.<family>.modeling_<family>` (4.57), to estimate model
states. The tests compare every tensor with a model that transformers builds on torch's meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from llmscale.architecture.families.family import Family, Keys
from llmscale.architecture.families.gpt2 import GPT2, OPT
from llmscale.architecture.families.llama import LLAMA_LIKE
from llmscale.architecture.layers import (
    Architecture,
    Layer,
    Parameter,
    combined_layer,
    embedding,
    head,
    layer_norm,
    linear,
    rms_norm,
)
from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.errors import ConfigError
from llmscale.untrusted.documents import CONFIG_MAX_BYTES, Rules, parse_json
from llmscale.untrusted.hub import is_hub_name, read_hub_files
from llmscale.untrusted.paths import read_regular, unreadable_as
from llmscale.untrusted.strangers import describe_stranger

CONFIG_NAME = "config.json"
FAMILIES: dict[str, Family] = {family.model_type: family for family in (GPT2, OPT, *LLAMA_LIKE)}

_PARALLEL = "attention and MLP side by side"
_ALIBI = "ALiBi positions"
_PART = "rotations of a part of a head"
#: Other families that people may try: the nearest of ours, and the features that it lacks.
_OTHERS: dict[str, tuple[str, str]] = {
    "ministral": ("mistral", "layers with and without a window"),
    "qwen2_moe": ("qwen3_moe", "shared experts with a gate"),
    "qwen3_next": ("qwen3_moe", "linear attention"),
    "llama4": ("mixtral", "scores that multiply the inputs of experts, and layers without positions"),
    "llama4_text": ("mixtral", "scores that multiply the inputs of experts, and layers without positions"),
    "olmo": ("olmo2", "norms without weights"),
    "olmo3": ("olmo2", "layers with and without a window"),
    "gpt_oss": ("mixtral", "attention sinks, biases of experts and routers, and clamped activations"),
    "deepseek_v2": ("dots1", "latent attention (MLA) and softmax scores with shared experts"),
    "deepseek_v3": ("dots1", "latent attention (MLA) and groups of experts"),
    "kimi_k2": ("dots1", "latent attention (MLA)"),
    "glm4_moe": ("dots1", _PART),
    "gemma": ("llama", "scaled embeddings and norms that multiply by 1 + weight"),
    "gemma2": ("llama", "soft-capped logits, four norms a block, and layers with and without a window"),
    "gemma3": ("qwen3", "four norms a block, and layers with and without a window"),
    "gemma3_text": ("qwen3", "four norms a block, and layers with and without a window"),
    "phi": ("llama", f"{_PARALLEL} and {_PART}"),
    "phi3": ("llama", "matrices in one piece for q, k, v and for gate and up, and longrope"),
    "granite": ("llama", "multipliers of embeddings, attention, residuals and logits"),
    "cohere": ("llama", f"{_PARALLEL} and scaled logits"),
    "smollm3": ("llama", "layers without positions"),
    "stablelm": ("llama", _PART),
    "gpt_neox": ("gpt2", f"{_PARALLEL} and {_PART}"),
    "gptj": ("gpt2", f"{_PARALLEL} and {_PART}"),
    "gpt_neo": ("gpt2", "layers with and without a window"),
    "gpt_bigcode": ("gpt2", "one key-value head"),
    "starcoder2": ("mistral", "layer norms and an MLP without a gate"),
    "falcon": ("gpt2", f"{_PARALLEL} and rotations"),
    "bloom": ("gpt2", _ALIBI),
    "mpt": ("gpt2", _ALIBI),
}


def get_family(config: Mapping[str, object], source: str) -> Family:
    """Return the family of a config.json. Raises ConfigError with the nearest and all supported families."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{source}: model_type is missing or not a text; is this a transformers config.json?")
    if model_type not in FAMILIES:
        nearest, lacks = _OTHERS.get(model_type, ("", ""))
        hint = f" The nearest is {nearest}, which has no {lacks}." if nearest else ""
        raise ConfigError(
            f"{source}: llmscale has no model of type {model_type[:80]!r}.{hint} Supported: {', '.join(FAMILIES)}."
        )
    return FAMILIES[model_type]


def read_shape(config: Mapping[str, object], source: str) -> GPTShape:
    """Return the shape in a config.json, with its vocabulary and its positions as context.

    Raises ConfigError for other architectures and for features that llmscale's model does not compute.
    """
    family = get_family(config, source)
    if "auto_map" in config:
        raise ConfigError(
            f"{source}: auto_map names code of its own, which is never run. Only transformers' own "
            f"{family.architecture} can be read."
        )
    if config.get("quantization_config") is not None:
        raise ConfigError(f"{source}: the weights are quantised. Give the folder of the unquantised model.")
    values = family.read(Keys(config, source))
    try:
        return build_shape(values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def without_rope_scaling(config: Mapping[str, object]) -> dict[str, object]:
    """Return the entries of a config.json with plain rotations, up to transformers 4 and from 5 on."""
    parameters = config.get("rope_parameters")
    plain: dict[str, object] = {"rope_scaling": None}
    if isinstance(parameters, dict):
        plain["rope_parameters"] = {"rope_theta": parameters["rope_theta"]} if "rope_theta" in parameters else None
    return {**config, **plain}


def family_of(shape: GPTShape) -> Family:
    """Return the first family that can express a shape, preferably without added biases.

    Raises ConfigError with the fields that the nearest family lacks.
    """
    lost = {family: family.lost(shape) for family in FAMILIES.values()}
    able = [family for family, fields in lost.items() if not fields]
    if able:
        return min(able, key=lambda family: family.adds_to(shape))
    nearest = min(lost, key=lambda family: len(lost[family]))
    raise ConfigError(
        f"no family of transformers has this model: {nearest.architecture}, the nearest, lacks "
        f"{', '.join(lost[nearest])}. Families: {', '.join(FAMILIES)}."
    )


@dataclass(frozen=True)
class _Decoder:
    """Entries of config.json that determine a family's parameters, and what is the same in all its models."""

    width: str = "hidden_size"
    heads: str = "num_attention_heads"
    layers: str = "num_hidden_layers"
    inner: str = "intermediate_size"
    """Width of the MLP, four times the model's if there is no such entry; empty if there never is."""
    has_kv_heads: bool = False
    is_fused: bool = False
    """True if query, key and value are one matrix."""
    biases: tuple[bool | str, bool | str, bool | str] = (True, True, True)
    """Biases of query, key and value; of the attention's output; of the MLP. A text is the entry that decides."""
    bias_default: bool = True
    tied: bool = True
    norms: int = 2
    norm: Callable[[str, int], Layer] = layer_norm
    up: int = 1
    """Rows of the MLP's first matrix, as a multiple of its width."""
    head_bias: bool = False
    required: Mapping[str, bool] = field(default_factory=dict)
    """The only legal values of other entries."""
    order: tuple[str, ...] = ("ln_1", "ln_2", "attn.qkv", "attn.proj", "mlp.up", "mlp.down")
    """Layers of a block in the order of the file's parameters."""
    skipped_positions: int = 0
    """Rows of the position table that no token uses."""
    positions: int = 0
    """Default of max_position_embeddings; 0 without a position table."""


#: Families that are described only by their parameters, by model_type.
_DECODERS: dict[str, _Decoder] = {
    "opt": _Decoder(
        inner="ffn_dim", biases=("enable_bias", "enable_bias", "enable_bias"), positions=2048, skipped_positions=2
    ),
    "gpt_neox": _Decoder(is_fused=True, biases=("attention_bias", "attention_bias", True), tied=False),
    "falcon": _Decoder(inner="ffn_hidden_size", is_fused=True, biases=("bias",) * 3, bias_default=False),
    "bloom": _Decoder(width="n_embed", heads="n_head", layers="n_layer", inner="", is_fused=True),
    "mpt": _Decoder(
        width="d_model",
        heads="n_heads",
        layers="n_layers",
        inner="",
        is_fused=True,
        biases=(False,) * 3,
        norm=rms_norm,
        required={"no_bias": True},
    ),
    "gptj": _Decoder(
        width="n_embd",
        heads="n_head",
        layers="n_layer",
        inner="n_inner",
        biases=(False, False, True),
        tied=False,
        norms=1,
        head_bias=True,
    ),
    "gpt_neo": _Decoder(heads="num_heads", layers="num_layers", biases=(False, True, True), positions=2048),
    "phi": _Decoder(has_kv_heads=True, tied=False, norms=1, head_bias=True, required={"qk_layernorm": False}),
    "phi3": _Decoder(has_kv_heads=True, is_fused=True, biases=(False,) * 3, tied=False, norm=rms_norm, up=2),
    "starcoder2": _Decoder(has_kv_heads=True, biases=("use_bias",) * 3),
}


def _describe(family: str, keys: Keys) -> Architecture | None:
    """Return the layers of a family that llmscale does not train; None for one that it does not know either."""
    if family not in _DECODERS:
        return None
    names = _DECODERS[family]
    for entry, legal in names.required.items():
        keys.require(entry, legal)
    # transformers knows these entries by its usual names too.
    usual = _Decoder()
    width = names.width if keys.has(names.width) else usual.width
    h, n_head = keys.heads(width, names.heads if keys.has(names.heads) else usual.heads)
    n_layer = keys.layers(names.layers if keys.has(names.layers) else usual.layers)
    vocab = keys.count("vocab_size")
    table = h
    kv_heads = n_head
    norms = names.norms
    norm = names.norm
    before = list[Layer]()
    after = list[Layer]()
    final_norm = norm("ln_f", h)
    if names.positions:
        positions = keys.count("max_position_embeddings", names.positions) + names.skipped_positions
        before.append(embedding("wpe", positions, h))
    if family == "opt":
        table, norm, final_norm = _opt(keys, h)
        if table != h:
            before.append(linear("project_in", table, h, bias=False))
            after.append(linear("project_out", h, table, bias=False))
    elif family == "falcon":
        kv_heads, norms = _falcon(keys, n_head)
    elif family == "bloom":
        before.append(layer_norm("ln_embedding", h))
    elif names.has_kv_heads:
        kv_heads = keys.count("num_key_value_heads", n_head)
    if names.inner:
        inner = keys.count(names.inner, 4 * h)
    else:
        inner = 4 * h
    if family == "mpt":
        inner = int(h * keys.number("expansion_ratio", 4))
    kv = kv_heads * (h // n_head)
    rows = (h + 2 * kv,) if names.is_fused else (h, kv, kv)
    qkv_bias, out_bias, mlp_bias = (
        keys.flag(bias, names.bias_default) if isinstance(bias, str) else bias for bias in names.biases
    )
    if names.head_bias:
        after.append(Layer("head_bias", (Parameter("bias", (vocab,), "vector"),)))
    norm_layers = [norm(f"ln_{number}", h) for number in range(1, norms + 1)]
    tied_to = "wte" if keys.flag("tie_word_embeddings", names.tied) else ""
    return Architecture(
        before_blocks=(embedding("wte", vocab, table), *([combined_layer("wpe", *before)] if before else [])),
        block=(
            norm_layers[0],
            combined_layer("attn.qkv", *(linear(f"qkv{count}", h, count, bias=qkv_bias) for count in rows)),
            linear("attn.proj", h, h, bias=out_bias),
            *norm_layers[1:],
            linear("mlp.up", h, names.up * inner, bias=mlp_bias),
            linear("mlp.down", inner, h, bias=mlp_bias),
        ),
        n_layer=n_layer,
        after_blocks=(combined_layer("ln_f", final_norm, *after), head("head", vocab, table, tied_to=tied_to)),
        parameter_order=names.order,
    )


def _opt(keys: Keys, width: int) -> tuple[int, Callable[[str, int], Layer], Layer]:
    """Return the width of OPT's token embedding, its norms, which may have no weights, and its last one, if any."""
    affine = keys.flag("layer_norm_elementwise_affine", True)
    has_final_norm = keys.flag("do_layer_norm_before", True) and not keys.flag("_remove_final_layer_norm", False)
    final_norm = layer_norm("ln_f", width, affine=affine and has_final_norm)
    return keys.count("word_embed_proj_dim", width), partial(layer_norm, affine=affine), final_norm


def _falcon(keys: Keys, n_head: int) -> tuple[int, int]:
    """Return Falcon's key-value heads and norms of a block."""
    is_new = keys.flag("new_decoder_architecture", False)
    is_parallel = keys.flag("parallel_attn", True)
    kv_heads = 1 if keys.flag("multi_query", True) else n_head
    if is_new:
        kv_heads = keys.count("num_kv_heads", n_head)
    if is_parallel:
        norms = keys.count("num_ln_in_parallel_attn", 2 if is_new else 1)
    else:
        norms = 2
    return kv_heads, min(norms, 2)


@dataclass(frozen=True)
class HFModel:
    """A model of transformers, described well enough for its model states."""

    name: str
    """Path or name that the user gave."""
    family: str
    """transformers' model_type."""
    architecture: Architecture

    @property
    def num_parameters(self) -> int:
        """Result of transformers' `num_parameters()`: a tied head counts once."""
        return self.architecture.num_parameters

    @property
    def n_embd(self) -> int:
        """Width of the token embedding, from which "auto" sizes of buffers follow."""
        return self.architecture.token_embedding.shape[1]

    @property
    def unknown(self) -> str:
        """Reason why activations are not estimated, in one sentence."""
        return (
            f"activations are not estimated: llmscale does not train this kind of {self.family}, and config.json does "
            "not say which attention it will run with (eager keeps batch x heads x seq_len^2 elements a layer, flash "
            "none of them), what its code fuses or upcasts, or how its loss is computed"
        )


@dataclass(frozen=True)
class FoundConfig:
    """A config.json and its origin."""

    entries: dict[str, object]
    folder: Path | None
    """Folder of the file, which may hold the model's other files; None for one on the Hub without a writable cache."""
    hub_name: str | None
    """NAME@COMMIT on the Hub; None for the user's own folder or file."""


def load_hf_model(path_or_name: str) -> HFModel | None:
    """Load a model from a config.json, its folder, or a name on the Hugging Face Hub. Raises ConfigError.

    None for a model that llmscale itself trains, of which more than the model states is known.
    """
    source = f"--hf {path_or_name}"
    config = find_config(path_or_name, source).entries
    try:
        # For a kind that llmscale lacks, --rope-scaling may replace it.
        read_shape(without_rope_scaling(config), source)
    except ConfigError:
        family = str(config.get("model_type"))
        architecture = _describe(family, Keys(config, source))
        if architecture is None:
            raise
        return HFModel(path_or_name, family, architecture)
    return None


def find_config(path_or_name: str, source: str) -> FoundConfig:
    """Find a config.json: the file, the one of a folder, or of NAME or NAME@REVISION on the Hugging Face Hub.

    `source` names it in messages. Raises ConfigError.
    """
    path = Path(path_or_name)
    if path.is_dir():
        path = path / CONFIG_NAME
        if not path.is_file():
            raise ConfigError(f"{source}: the folder has no {CONFIG_NAME}.{describe_stranger(path.parent)}")
    if path.is_file():
        if path.suffix != ".json" and (stranger := describe_stranger(path)):
            raise ConfigError(f"{source} is not a {CONFIG_NAME} or its folder.{stranger}")
        with unreadable_as(ConfigError, source):
            return FoundConfig(_parse(read_regular(path, CONFIG_MAX_BYTES), source), path.parent, None)
    looks_like_a_path = path_or_name.endswith(".json") or path_or_name.startswith((".", "/", "~"))
    if looks_like_a_path or not is_hub_name(path_or_name):
        raise ConfigError(
            f"{source} does not exist. Give a {CONFIG_NAME}, its folder, or a name on the Hub such as gpt2 or "
            "ORGANISATION/NAME@REVISION."
        )
    files = read_hub_files(path_or_name, CONFIG_NAME, (), CONFIG_MAX_BYTES, ConfigError, source)
    return FoundConfig(_parse(files.contents[CONFIG_NAME], source), files.folder, files.name)


def _parse(contents: bytes, source: str) -> dict[str, object]:
    # Some models on the Hub have Infinity as a limit.
    return parse_json(contents, Rules(ConfigError, max_bytes=CONFIG_MAX_BYTES, not_finite=True), source)
