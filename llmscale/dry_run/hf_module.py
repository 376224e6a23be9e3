"""transformers' own model of a config.json as a module to simulate, for families that llmscale does not train.

Only code of transformers itself runs: `auto_map` of a config.json is never followed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import no_init_weights

from llmscale import limits
from llmscale.dry_run.module import OwnModule
from llmscale.dry_run.module_rows import Blocks
from llmscale.errors import ConfigError

#: Entries with the experts of a block, and with those of a token.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: Modules that a simulation builds at most: one of more than a hundred thousand takes many minutes.
_MOST_EXPERTS = 100_000


@dataclass(frozen=True)
class HFModule:
    """A model of transformers and a micro-batch, to simulate."""

    module: OwnModule
    blocks: Blocks | None
    """None where no blocks repeat."""
    recomputing: OwnModule | None
    """The model with gradient checkpointing; None for one without."""
    recomputing_blocks: Blocks | None
    model_type: str
    num_parameters: int
    seq_len: int


def read_hf_module(
    entries: Mapping[str, object], source: str, *, micro_batch_size: int, seq_len: int | None, default_seq_len: int
) -> HFModule:
    """Return the model of a config.json's entries. Raises ConfigError for one that transformers cannot build.

    Without `seq_len`, sequences have `default_seq_len` tokens, or as many as the model has positions.
    """
    config = _read_config(entries, source)
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if seq_len is None:
        if isinstance(positions, int):
            seq_len = min(default_seq_len, positions)
        else:
            seq_len = default_seq_len
    tokens = torch.zeros((micro_batch_size, seq_len), dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    skeleton = _build_skeleton(config, source)
    module = OwnModule(
        partial(_build, config),
        batch,
        experts=_experts(text),
        expert_rows=tokens.numel() * getattr(text, "num_experts_per_tok", 0),
        name=source,
    )
    recomputing = None
    if getattr(skeleton, "supports_gradient_checkpointing", False):
        recomputing = replace(module, build=partial(_build, config, recomputes=True))
    repetition = _find_repetition(skeleton, text.num_hidden_layers)
    return HFModule(
        module=module,
        blocks=_blocks(config, module, repetition, recomputes=False),
        recomputing=recomputing,
        recomputing_blocks=_blocks(config, module, repetition, recomputes=True),
        model_type=config.model_type,
        num_parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        seq_len=seq_len,
    )


def knows(model_type: object) -> bool:
    """Return whether transformers itself has models of a type."""
    return isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING


def _read_config(entries: Mapping[str, object], source: str) -> PretrainedConfig:
    model_type = str(entries["model_type"])
    if entries.get("quantization_config") is not None:
        raise ConfigError(f"{source}: the weights are quantised. Give the folder of the unquantised model.")
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(dict(entries))
        text = config.get_text_config()
        layers = text.num_hidden_layers
    except Exception as error:
        raise ConfigError(f"{source}: transformers refuses this config.json: {_one_line(error)}") from None
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{source}: transformers has no causal language model of type {model_type!r}.")
    if not isinstance(layers, int) or not 0 < layers <= limits.MAX_LAYERS:
        raise ConfigError(f"{source}: {layers!r:.80} layers; legal are 1 to {limits.MAX_LAYERS:,}.")
    if layers * _experts(text) > _MOST_EXPERTS:
        raise ConfigError(f"{source}: {layers:,} layers of {_experts(text):,} experts are too many to simulate.")
    for part in (config, text):
        part.use_cache = False
    return config


def _experts(text: PretrainedConfig) -> int:
    numbers = [getattr(text, name, None) for name in _EXPERTS]
    return max([1, *(number for number in numbers if isinstance(number, int))])


def _build(config: PretrainedConfig, *, recomputes: bool = False) -> nn.Module:
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # The type that fp32 weights begin with is DeepSpeed's matter.
    with no_init_weights():
        model: transformers.PreTrainedModel = model_class._from_config(copy.deepcopy(config), torch_dtype=torch.float32)
        model.tie_weights()
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _build_skeleton(config: PretrainedConfig, source: str) -> nn.Module:
    """Build the model without storage. Raises ConfigError."""
    try:
        with torch.device("meta"):
            return _build(config)
    except Exception as error:
        raise ConfigError(f"{source}: transformers cannot build this model: {_one_line(error)}") from None


def _blocks(
    config: PretrainedConfig, module: OwnModule, repetition: tuple[int, int] | None, *, recomputes: bool
) -> Blocks | None:
    if repetition is None:
        return None

    def cut(blocks: int) -> OwnModule:
        return replace(module, build=partial(_build, _with_layers(config, blocks), recomputes=recomputes))

    return Blocks(config.get_text_config().num_hidden_layers, *repetition, cut)


def _find_repetition(skeleton: nn.Module, count: int) -> tuple[int, int] | None:
    """Return (unlike blocks at the beginning, blocks of a group), by parameters; None where they repeat nowhere."""
    lists = [part for part in skeleton.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    if not lists:
        return None
    return _find_period([tuple(parameter.shape for parameter in block.parameters()) for block in lists[0]])


def _find_period(kinds: list[tuple[torch.Size, ...]]) -> tuple[int, int] | None:
    """Return (unlike blocks at the beginning, blocks of a group), the fewest together; None without two groups."""
    count = len(kinds)
    for together in range(1, count):
        for period in range(1, together + 1):
            first = together - period
            if first + 2 * period <= count and kinds[first + period :] == kinds[first : count - period]:
                return first, period
    return None


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return a config with fewer layers, and as many elements of what it has for each layer."""
    changed = copy.deepcopy(config)
    text: Any = changed.get_text_config()
    count = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return changed


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
