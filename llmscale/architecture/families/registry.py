"""All families by the model_type of their config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from llmscale.architecture.families.config_keys import Keys
from llmscale.architecture.families.family import Family
from llmscale.architecture.families.gpt2 import GPT2
from llmscale.architecture.families.llama import LLAMA_LIKE
from llmscale.architecture.families.opt import OPT
from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.errors import ConfigError
from llmscale.suggestions import did_you_mean

FAMILIES: dict[str, Family] = {family.model_type: family for family in (GPT2, OPT, *LLAMA_LIKE)}

_EXPERTS, _PARALLEL, _ALIBI = "experts", "attention and MLP side by side", "ALiBi positions"
#: Families of transformers that people may try: the nearest of ours, and what that lacks.
_OTHERS: dict[str, tuple[str, str]] = {
    "mixtral": ("mistral", _EXPERTS),
    "ministral": ("mistral", "layers with and without a window"),
    "qwen2_moe": ("qwen2", _EXPERTS),
    "qwen3_moe": ("qwen3", _EXPERTS),
    "qwen3_next": ("qwen3", f"linear attention and {_EXPERTS}"),
    "llama4": ("llama", _EXPERTS),
    "llama4_text": ("llama", _EXPERTS),
    "olmo": ("olmo2", "norms without weights"),
    "olmo3": ("olmo2", "layers with and without a window"),
    "olmoe": ("olmo2", _EXPERTS),
    "gpt_oss": ("llama", f"{_EXPERTS} and attention sinks"),
    "deepseek_v2": ("llama", f"latent attention and {_EXPERTS}"),
    "deepseek_v3": ("llama", f"latent attention and {_EXPERTS}"),
    "gemma": ("llama", "scaled embeddings and norms that multiply by 1 + weight"),
    "gemma2": ("llama", "soft-capped logits, four norms a block, and layers with and without a window"),
    "gemma3": ("qwen3", "four norms a block, and layers with and without a window"),
    "gemma3_text": ("qwen3", "four norms a block, and layers with and without a window"),
    "phi": ("llama", f"{_PARALLEL} and rotations of a part of a head"),
    "phi3": ("llama", "matrices in one piece for q, k, v and for gate and up, and longrope"),
    "granite": ("llama", "multipliers of embeddings, attention, residuals and logits"),
    "cohere": ("llama", f"{_PARALLEL} and scaled logits"),
    "smollm3": ("llama", "layers without positions"),
    "stablelm": ("llama", "rotations of a part of a head"),
    "gpt_neox": ("gpt2", f"{_PARALLEL} and rotations of a part of a head"),
    "gptj": ("gpt2", f"{_PARALLEL} and rotations of a part of a head"),
    "gpt_neo": ("gpt2", "layers with and without a window"),
    "gpt_bigcode": ("gpt2", "one key-value head"),
    "starcoder2": ("mistral", "layer norms and an MLP without a gate"),
    "falcon": ("gpt2", f"{_PARALLEL} and rotations"),
    "bloom": ("gpt2", _ALIBI),
    "mpt": ("gpt2", _ALIBI),
}


def get_family(config: Mapping[str, object], source: str) -> Family:
    """The family of a config.json; raises ConfigError with the nearest and all that there are."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{source}: model_type is missing or no text; is this a transformers config.json?")
    if model_type not in FAMILIES:
        nearest, lacks = _OTHERS.get(model_type, ("", ""))
        hint = f" The nearest is {nearest}, which has no {lacks}." if nearest else did_you_mean(model_type, FAMILIES)
        raise ConfigError(
            f"{source}: llmscale has no model of type {model_type[:80]!r}.{hint} Supported: {', '.join(FAMILIES)}."
        )
    return FAMILIES[model_type]


def read_shape(config: Mapping[str, object], source: str) -> dict[str, object]:
    """Fields of GPTShape that a config.json decides, vocab_size and seq_len (its positions) among them.

    Raises ConfigError for another architecture and for what llmscale's model does not compute.
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
        build_shape(values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return values


def family_of(shape: GPTShape) -> Family:
    """The first family that can express a shape, one without added biases before others. Raises ConfigError naming what
    none of them has."""
    lost = {family: family.lost(shape) for family in FAMILIES.values()}
    able = [family for family, fields in lost.items() if not fields]
    if able:
        return min(able, key=lambda family: family.adds_to(shape))
    nearest = min(lost, key=lambda family: len(lost[family]))
    raise ConfigError(
        f"no family of transformers has this model: {nearest.architecture}, the nearest, lacks "
        f"{', '.join(lost[nearest])}. Families: {', '.join(FAMILIES)}."
    )
