"""All families by the model_type of their config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from llmscale.architecture.families.config_keys import Keys
from llmscale.architecture.families.family import Family
from llmscale.architecture.families.gpt2 import GPT2
from llmscale.architecture.families.llama import LLAMA_LIKE
from llmscale.architecture.families.opt import OPT
from llmscale.architecture.shape import GPTShape, build_shape
from llmscale.errors import ConfigError, did_you_mean

FAMILIES: dict[str, Family] = {family.model_type: family for family in (GPT2, OPT, *LLAMA_LIKE)}


def get_family(config: Mapping[str, object], source: str) -> Family:
    """The family of a config.json; raises ConfigError with the nearest and all that there are."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{source}: model_type is missing; is this a transformers config.json?")
    if model_type not in FAMILIES:
        hint = did_you_mean(model_type, FAMILIES)
        raise ConfigError(
            f"{source}: llmscale has no model of type '{model_type}'.{hint} Supported: {', '.join(FAMILIES)}."
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
