"""Plain values with which an engine of any module continues: settings, schedule, counters, names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmscale.engine.zero_layout import grouped_parameters, inner_optimizer, named_parameters, plain_name
from llmscale.engine.zero_shards import stored_buffers
from llmscale.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

#: Keys of an optimizer's group beside its settings.
_NOT_SETTINGS = ("params", "param_names", "name", "undivided", "divided_from", "moe")
#: Settings that a learning-rate scheduler changes, and therefore restores.
OF_SCHEDULER = ("lr", "initial_lr")


def check_engine(engine: DeepSpeedEngine) -> None:
    """Raise ConfigError for an engine whose state cannot be saved and continued at another stage."""
    from deepspeed.moe.utils import is_moe_param

    optimizer = inner_optimizer(engine)
    if not isinstance(optimizer, torch.optim.Optimizer):
        if optimizer is None:
            kind = "none"
        else:
            kind = type(optimizer).__name__
        raise ConfigError(f"the engine's optimizer is {kind}. Checkpoints need a torch.optim.Optimizer.")
    if engine.fp16_enabled() and engine.zero_optimization_stage() == 0:
        raise ConfigError(
            "fp16 at ZeRO stage 0: DeepSpeed 0.19 divides gradients by a loss scale that it never applied, so its "
            "steps are wrong. Use stage 1, 2 or 3, or bf16."
        )
    if getattr(engine, "pipeline_parallelism", False):
        raise ConfigError("the engine divides its module into pipeline stages, which checkpoints here do not know.")
    experts = (name for name, param in named_parameters(engine) if is_moe_param(param))
    if expert := next(experts, None):
        raise ConfigError(f"'{expert}' is of experts that DeepSpeed divides over ranks, which checkpoints do not know.")


def check_between_steps(engine: DeepSpeedEngine) -> None:
    """Raise CheckpointError within a step: a checkpoint does not hold the gradients of its micro-batches."""
    # Under accelerate and transformers the count of micro-batches stands still: they set the step's end themselves.
    sets_end = getattr(engine, "_is_gradient_accumulation_boundary", None) is not None
    needed = engine.gradient_accumulation_steps()
    done = 0 if sets_end else engine.micro_steps % needed
    if done:
        raise CheckpointError(
            f"{done} of {needed} micro-batches of a step are done, and a checkpoint does not hold their gradients. "
            "Save and load between steps."
        )


def precision_of(engine: DeepSpeedEngine) -> str:
    """Return the type of the module's arithmetic: bf16, fp16 or fp32."""
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else "fp32"


def tensor_shapes(engine: DeepSpeedEngine) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, whole at stage 3 too, and of every buffer; tied ones once."""
    tensors = {**dict(named_parameters(engine)), **stored_buffers(engine)}
    return {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in tensors.items()}


def tied_names(engine: DeepSpeedEngine) -> dict[str, str]:
    """Return the further names of tied parameters and buffers, each with the first one's, which is stored."""
    module = engine.module
    first: dict[int, str] = {}
    aliases = {}
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in every:
        known = first.setdefault(id(tensor), plain_name(name))
        if known != plain_name(name):
            aliases[plain_name(name)] = known
    stored = stored_buffers(engine).keys() | {name for name, _ in named_parameters(engine)}
    return {alias: name for alias, name in aliases.items() if name in stored}


def group_parameters(engine: DeepSpeedEngine) -> list[tuple[str, ...]]:
    """Return the names of the parameters of each of the optimizer's groups, in its order."""
    names = {id(param): name for name, param in named_parameters(engine)}
    return [tuple(names[id(param)] for param in group) for group in grouped_parameters(engine)]


def group_settings(engine: DeepSpeedEngine) -> list[dict[str, object]]:
    """Return the settings of each of the optimizer's groups: what is neither a parameter nor a name."""
    return [
        {key: _as_number(value) for key, value in group.items() if key not in _NOT_SETTINGS}
        for group in inner_optimizer(engine).param_groups
    ]


def set_group_settings(engine: DeepSpeedEngine, number: int, settings: Mapping[str, object]) -> None:
    """Set settings of one of the optimizer's groups."""
    group = inner_optimizer(engine).param_groups[number]
    for key, value in settings.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _as_number(value: object) -> object:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value


def scheduler_state(engine: DeepSpeedEngine) -> dict[str, object] | None:
    """Return the state of the engine's learning-rate scheduler, None without one."""
    scheduler = engine.lr_scheduler
    if hasattr(scheduler, "state_dict"):
        return dict(scheduler.state_dict())
    return None


def set_counters(engine: DeepSpeedEngine, *, steps: int, samples: int, skipped_steps: int) -> None:
    """Set DeepSpeed's counts between two steps."""
    engine.global_steps = steps
    engine.global_samples = samples
    engine.skipped_steps = skipped_steps
    engine.micro_steps = 0
