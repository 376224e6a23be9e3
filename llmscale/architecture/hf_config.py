"""A transformers `config.json`: where it is found, the family and shape that it describes, its parameters. No torch.

Families that llmscale trains are in architecture/families. `estimate --hf` simulates others (dry_run/hf_module.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmscale.architecture.families.family import Family, Keys
from llmscale.architecture.families.gpt2 import GPT2, OPT
from llmscale.architecture.families.llama import LLAMA_LIKE
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
class FoundConfig:
    """A config.json and its origin."""

    entries: dict[str, object]
    folder: Path | None
    """Folder of the file, which may hold the model's other files; None for one on the Hub without a writable cache."""
    hub_name: str | None
    """NAME@COMMIT on the Hub; None for the user's own folder or file."""


def check_is_trained(config: Mapping[str, object], source: str) -> None:
    """Raise ConfigError, with the reason, for a model that llmscale does not train.

    Not for a kind of rotations that it lacks, because --rope-scaling may replace it.
    """
    read_shape(without_rope_scaling(config), source)


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
