"""`hf:FOLDER` or `hf:NAME`: a published model as the keys of a run. No torch.

Its config.json becomes explicit keys at the start of a run. The run folder and every checkpoint keep them, so that a
resumed run does not need the published model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmscale.architecture.families.family import HFTensor
from llmscale.architecture.hf_config import CONFIG_NAME, find_config, get_family, read_shape, without_rope_scaling
from llmscale.architecture.shape import SHAPE_KEYS, GPTShape, build_shape
from llmscale.config.presets import PRESETS, get_preset, nearest_preset
from llmscale.config.run_config import KEYS, RunConfig, build_run_config
from llmscale.config.user_paths import check_path, checked
from llmscale.errors import ConfigError
from llmscale.untrusted.hub import without_prefix

PREFIX = "hf:"
#: Keys of a run that config.json sets.
PUBLISHED_KEYS = (*(key for key, behaviour in SHAPE_KEYS.items() if behaviour.of_model != "training"), "vocab_size")
_ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class PublishedModel:
    """A folder of transformers, or a name on the Hub, as its config.json describes it."""

    source: str
    """The flag and its value, for messages."""
    name: str
    """FOLDER, NAME or NAME@REVISION."""
    hub_name: str | None
    """NAME@COMMIT on the Hub; None for a folder of the user's."""
    folder: Path | None
    """Folder with config.json. For a model on the Hub, its cache, which may lack files; None without one."""
    architecture: str
    """Name of the model class in config.json; empty if it has none."""
    tensors: tuple[HFTensor, ...]
    """Tensors that the files should contain."""
    shape: GPTShape
    """Shape of the model, with its full context."""
    entries: Mapping[str, object]
    """Contents of its config.json."""

    @property
    def keys(self) -> dict[str, object]:
        """Keys of a run that the model sets."""
        return _keys_of(self.shape)


def is_published(name: str | None) -> bool:
    """Return whether a value of --model or --init-from names a published model."""
    return name is not None and name.startswith(PREFIX)


def read_published_model(flag: str, value: str, config: RunConfig | None = None) -> PublishedModel:
    """Return the model that `FLAG hf:FOLDER|NAME` names. Raises ConfigError if llmscale cannot train it.

    A rope_scaling of the run's `config` replaces that of the model, which may then be of any kind.
    """
    # No shell expands the ~ in hf:~/models.
    source = f"{flag} {value}"
    name = os.path.expanduser(without_prefix(source, value, ConfigError))
    path = checked(check_path, name, source)
    if ((path.parent if path.is_file() else path) / _ADAPTER_CONFIG).exists():
        raise ConfigError(
            f"{source} holds {_ADAPTER_CONFIG}: an adapter, not a model. Merge it into its model (peft: "
            "merge_and_unload, then save_pretrained) and name that folder."
        )
    files = find_config(name, source)
    is_replaced = config is not None and getattr(config, "rope_scaling", None) is not None
    if is_replaced:
        entries = without_rope_scaling(files.entries)
    else:
        entries = files.entries
    shape = read_shape(entries, source)
    tensors = tuple(get_family(entries, source).tensors(shape))
    # For messages only, so an odd value does not matter.
    classes = files.entries.get("architectures")
    if isinstance(classes, list) and classes and isinstance(classes[0], str):
        class_name = classes[0][:80]
    else:
        class_name = ""
    return PublishedModel(source, name, files.hub_name, files.folder, class_name, tensors, shape, entries)


def with_published_shape(
    config: RunConfig, weights: PublishedModel | None, named: PublishedModel | None = None
) -> RunConfig:
    """Return a run's configuration with the shape of its published model in explicit keys.

    Initial `weights` determine the shape, which the user's keys must not contradict; but they may add experts to it.
    Without weights, `--model hf:` gives a shape that other flags may change, like a preset. `named` is a model
    that is read already, perhaps that one. Raises ConfigError.
    """
    given = _given_keys(config)
    if is_published(config.model):
        is_read = named is not None and named.source == f"--model {config.model}"
        if named and is_read:
            model = named
        else:
            model = read_published_model("--model", config.model, config)
        wanted = _keys_of(model.shape.changed(given))
        whose = f"--model {config.model}"
    elif weights is not None and "model" in config.model_fields_set:
        shape = get_preset(config.model).shape(weights.shape.vocab_size, weights.shape.seq_len)
        wanted = _keys_of(shape.changed(given))
        whose = f"--model {config.model}"
    else:
        wanted = given
        whose = "the run"
    if weights is None:
        if is_published(config.model):
            return _with_keys(config, config.model, wanted)
        return config
    added = _added_experts(weights, given)
    wanted = {key: value for key, value in wanted.items() if key not in added}
    _check_same(wanted, weights.keys, whose, f"{weights.source} ({CONFIG_NAME})", given)
    if "model" in config.model_fields_set:
        model_name = config.model
    else:
        model_name = PREFIX + weights.name
    return _with_keys(config, model_name, {**weights.keys, **_free(given), **added})


def _added_experts(weights: PublishedModel, given: Mapping[str, object]) -> dict[str, object]:
    """Return the keys that give experts to a dense model, each a copy of its MLP. Raises ConfigError."""
    if weights.shape.num_experts or not given.get("num_experts"):
        return {}
    width = weights.shape.mlp_width
    if weights.shape.mlp_bias:
        raise ConfigError(
            f"{weights.source}: the MLP has biases and experts have none, so it cannot become num_experts "
            f"{given['num_experts']}. Name a model without them (Llama, Mistral, Qwen, OLMo 2), or drop --num-experts."
        )
    for key, only in (("expert_width", width), ("shared_expert_width", 0)):
        if given.get(key, 0) not in (0, only):
            raise ConfigError(
                f"{key} is {given[key]}, and experts of {weights.source} begin as copies of its MLP, {width} wide, "
                f"and have no shared expert. Drop --{key.replace('_', '-')}."
            )
    of_experts = [key for key, behaviour in SHAPE_KEYS.items() if behaviour.of_model == "experts"]
    return {key: given[key] for key in ("num_experts", *of_experts) if key in given}


def with_saved_shape(config: RunConfig, saved: Mapping[str, object], source: str) -> RunConfig | None:
    """Return the configuration of a run that begins with a checkpoint, with the model of the checkpoint's run.

    Return None if the user names a model, unless it is the published one that the run started with. `saved` is the
    configuration in the checkpoint `source`. Raises ConfigError for shape keys that contradict a published model.
    """
    model = saved.get("model")
    names_model = "model" in config.model_fields_set
    if not isinstance(model, str) or (names_model and not (is_published(model) and config.model == model)):
        return None
    keys = {key: saved.get(key) for key in PUBLISHED_KEYS}
    given = _given_keys(config)
    if not is_published(model):
        return _with_keys(config, model, {**{key: value for key, value in keys.items() if value is not None}, **given})
    _check_same(given, keys, "the run", source, given)
    return _with_keys(config, model, {**keys, **_free(given)})


def default_preset(config: RunConfig) -> str:
    """Return the preset with the default learning rate and batch; for a published model, the nearest in size."""
    if not is_published(config.model):
        return config.model
    return nearest_preset(build_shape({**_given_keys(config), "seq_len": 1}))


def rate_preset(config: RunConfig) -> str:
    """Return the preset with the default learning rate: the nearest in size if the model's is for another optimizer."""
    name = default_preset(config)
    preset = PRESETS[name]
    if preset.run.get("optimizer", config.optimizer) == config.optimizer:
        return name
    # Those with an optimizer of their own are tiny, and their names count the blocks alone.
    return nearest_preset(preset.shape(vocab_size=1))


def _given_keys(config: RunConfig) -> dict[str, object]:
    """Return the keys that a config.json also sets, where the configuration has a value."""
    return {key: value for key in PUBLISHED_KEYS if (value := getattr(config, key)) is not None}


def _free(given: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in given.items() if KEYS[key].may_contradict}


def _keys_of(shape: GPTShape) -> dict[str, object]:
    return {key: getattr(shape, key) for key in PUBLISHED_KEYS}


def _with_keys(config: RunConfig, model: str, keys: Mapping[str, object]) -> RunConfig:
    """Return the configuration with `keys`, validated."""
    return build_run_config({**config.model_dump(exclude_unset=True), **keys, "model": model})


def _check_same(
    wanted: Mapping[str, object], keys: Mapping[str, object], other: str, source: str, given: Mapping[str, object]
) -> None:
    """Raise ConfigError for the first key that contradicts what `source` says."""
    for key, value in wanted.items():
        if value != keys[key] and not (KEYS[key].may_contradict and key in given):
            flag = f"--{key.replace('_', '-')}"
            whose, remedy = (flag, f"Drop {flag}") if key in given else (other, f"Drop {other.split()[0]}")
            raise ConfigError(
                f"{key} is {value} by {whose} and {keys[key]} by {source}: the weights fit one shape. {remedy}."
            )
