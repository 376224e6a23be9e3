"""Views of ZeRO's shards (master weights, optimizer states) for saving and loading, also from NVMe.

zero_layout.py finds their places. Only these two files know DeepSpeed's internals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from llmscale.engine.zero_layout import (
    ParameterShard,
    ShardView,
    count_names,
    group_name,
    held_range,
    inner_optimizer,
    is_stepped,
    named_parameters,
    parameter_shards,
    piece_of,
    plain_name,
)
from llmscale.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

MASTER = "master"


def state_views(engine: DeepSpeedEngine, *, with_frozen: bool = True) -> dict[str, ShardView]:
    """Return views of everything this rank owns: '<state>/<parameter>', 'frozen/<parameter>', 'buffer/<buffer>'.

    Frozen are all parameters that the optimizer does not change, whether or not they have gradients.

    <state> is `master` (the weights that the optimizer steps) or the optimizer's name of a tensor with an element per
    weight (`exp_avg`, ...). A state of another shape (Adafactor's row and column sums, stage 0 only) is one view. Views
    are live, except those of tensors on NVMe, which are copies in host memory: pass these to write_back after changing
    them.
    """
    views: dict[str, ShardView] = {}
    for shards in _shards_by_flat(engine):
        with _in_memory(engine, shards[0].flat, write=False) as was_on_nvme:
            for key, view in _views_of(engine, shards):
                views[key] = ShardView(view.local.clone(), view.start, view.total) if was_on_nvme else view
    if with_frozen:
        frozen = _frozen_views(engine)
    else:
        frozen = {}
    return views | frozen | _buffer_views(engine)


def write_back(engine: DeepSpeedEngine, views: Mapping[str, ShardView]) -> None:
    """Write filled views from state_views back to NVMe; other tensors are already changed."""
    for shards in _shards_by_flat(engine):
        if not _is_on_nvme(engine, shards[0].flat):
            continue
        with _in_memory(engine, shards[0].flat, write=True):
            for key, view in _views_of(engine, shards):
                if key in views:
                    view.local.copy_(views[key].local)


def weights_to_fill(engine: DeepSpeedEngine) -> Iterator[dict[str, ShardView]]:
    """Yield live views of this rank's weights by parameter, one flat tensor at a time, and of buffers.

    A flat tensor on NVMe is in memory while the caller fills it, and is written back when the next one is requested.
    """
    for shards in _shards_by_flat(engine):
        with _in_memory(engine, shards[0].flat, write=True):
            yield {shard.name: shard.view(shard.flat) for shard in shards}
    others = _frozen_views(engine) | _buffer_views(engine)
    yield {key.partition("/")[2]: view for key, view in others.items()}


def group_scalars(engine: DeepSpeedEngine) -> dict[str, dict[str, float]]:
    """Return the scalar optimizer states (Adam's `step`) of each optimizer group, before patterns divide it.

    They are those of the group's first parameter that has any: at stage 0 one without gradients has no states. Raises
    CheckpointError for a state that is neither a tensor nor a number.
    """
    names = count_names(engine)
    scalars: dict[str, dict[str, float]] = {}
    for shards in _shards_by_flat(engine):
        flat = shards[0].flat
        group = names[shards[0].group]
        if group in scalars:
            continue
        with _in_memory(engine, flat, write=False):
            values = _scalars_of(inner_optimizer(engine).state.get(flat, {}), flat)
        if values:
            scalars[group] = values
    return scalars


def _scalars_of(state: Mapping[str, object], flat: Tensor) -> dict[str, float]:
    """Return the states of one tensor that are numbers."""
    scalars = {}
    for key, value in state.items():
        if value is None or _has_elements(key, value, flat):
            continue
        if not isinstance(value, Tensor | int | float):
            raise CheckpointError(
                f"the optimizer's state '{key}' is a {type(value).__name__}. A checkpoint holds tensors and numbers."
            )
        scalars[key] = float(value)
    return scalars


def set_group_scalars(engine: DeepSpeedEngine, scalars: Mapping[str, Mapping[str, float]]) -> None:
    """Set scalar optimizer states, as group_scalars returns them, in the groups that `scalars` names."""
    names = count_names(engine)
    for shards in _shards_by_flat(engine):
        flat = shards[0].flat
        with _in_memory(engine, flat, write=True):
            state = inner_optimizer(engine).state.get(flat, {})
            for key, number in scalars.get(names[shards[0].group], {}).items():
                if isinstance(state.get(key), Tensor):
                    state[key].fill_(number)
                else:
                    state[key] = type(state.get(key, number))(number)


def materialise_optimizer_state(engine: DeepSpeedEngine) -> None:
    """Make the optimizer create its states, so that they can be loaded into.

    It creates them at its first step; one with zero gradients and a learning rate of 0 changes no weight.
    """
    optimizer = inner_optimizer(engine)
    for shards in _shards_by_flat(engine):
        flat = shards[0].flat
        if optimizer.state.get(flat):
            continue
        with _in_memory(engine, flat, write=True), _only(optimizer, shards[0].group, flat):
            optimizer.step()


@contextmanager
def _only(optimizer: torch.optim.Optimizer, name: str, flat: Tensor) -> Iterator[None]:
    """Reduce the optimizer to one tensor with a zero gradient and a learning rate of 0; restore it at the end."""
    before = [(group, group["params"], group["lr"]) for group in optimizer.param_groups]
    gradient = flat.grad
    for group in optimizer.param_groups:
        group["params"] = []
        group["lr"] = 0.0
    # The first of two with the name, if ranks divide experts: both have the same hyperparameters.
    next(group for group in optimizer.param_groups if group_name(group) == name)["params"] = [flat]
    flat.grad = torch.zeros_like(flat)
    try:
        yield
    finally:
        flat.grad = gradient
        for group, params, lr in before:
            group["params"] = params
            group["lr"] = lr


def reset_step_counts(engine: DeepSpeedEngine) -> None:
    """Undo the effect of DeepSpeed's dummy step at start-up (stage 0 in 16 bit) on Adam's bias correction."""
    for state in inner_optimizer(engine).state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()


def refresh_low_precision_weights(engine: DeepSpeedEngine) -> None:
    """Copy the master weights into the weights that the forward pass uses. Collective."""
    zero = engine.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        for index, master in enumerate(zero.fp32_partitioned_groups_flat):
            low = zero.fp16_partitioned_groups_flat[index]
            with _in_memory(engine, master, write=False):
                if low is None:  # the parameters are on NVMe
                    zero._partitioned_params_swap_out(index)
                else:
                    low.data.copy_(master.data)
        _partition_persistent_parameters(engine)
        invalidate_hpz_copies(engine)
    elif hasattr(zero, "update_lp_params"):  # stages 1 and 2
        zero.update_lp_params()
    elif hasattr(zero, "fp32_groups_flat"):  # FusedAdam at stage 0 in 16 bit
        for low, master in zip(zero.fp16_groups_flat, zero.fp32_groups_flat, strict=True):
            low.data.copy_(master.data)
    elif hasattr(zero, "fp16_groups"):  # stage 0 in 16 bit
        for lows, masters in zip(zero.fp16_groups, zero.fp32_groups, strict=True):
            for low, master in zip(lows, masters, strict=True):
                low.data.copy_(master.data)


def _partition_persistent_parameters(engine: DeepSpeedEngine) -> None:
    """Make the next forward pass gather small parameters again, which stage 3 keeps gathered after its first step
    (stage3_param_persistence_threshold)."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for parameter in engine.optimizer.persistent_parameters:
        if parameter.ds_status is ZeroParamStatus.AVAILABLE:
            parameter.partition()


def invalidate_hpz_copies(engine: DeepSpeedEngine) -> None:
    """Make the next forward pass of stage 3 with hpZ gather from all ranks again, not from old secondary copies.

    zero.Init makes such copies too, of the first weights. DeepSpeed's own function leaves out frozen weights.
    """
    for parameter in engine.module.parameters():
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None


def _shards_by_flat(engine: DeepSpeedEngine) -> list[list[ParameterShard]]:
    """Return this rank's shards, grouped by their flat tensor."""
    flats: dict[int, list[ParameterShard]] = {}
    for shard in parameter_shards(engine):
        flats.setdefault(id(shard.flat), []).append(shard)
    return list(flats.values())


def _views_of(engine: DeepSpeedEngine, shards: list[ParameterShard]) -> Iterator[tuple[str, ShardView]]:
    """Yield master weights and optimizer states of the shards of one flat tensor."""
    state = inner_optimizer(engine).state.get(shards[0].flat, {})
    for shard in shards:
        yield f"{MASTER}/{shard.name}", shard.view(shard.flat)
        for key, value in state.items():
            if not _has_elements(key, value, shard.flat):
                continue
            if value.numel() == shard.flat.numel():
                yield f"{key}/{shard.name}", shard.view(value)
            elif shard.flat.numel() == shard.total:
                yield f"{key}/{shard.name}", ShardView(_flatten(value, f"{key}/{shard.name}"), 0, value.numel())
            else:
                raise CheckpointError(
                    f"the optimizer's '{key}' of '{shard.name}' has {value.numel()} elements and its weights "
                    f"{shard.flat.numel()} on this rank: such a state cannot be saved or loaded where ZeRO divides it. "
                    "Use ZeRO stage 0, or another optimizer."
                )


def _has_elements(key: str, value: object, flat: Tensor) -> bool:
    """Return whether an optimizer state is a tensor of elements, not a scalar such as Adam's `step`.

    Of a parameter with one element, every state has one: a scalar is known by its shape, and `step` by its name.
    """
    return isinstance(value, Tensor) and (value.numel() > 1 or (value.shape == flat.shape and key != "step"))


def _flatten(tensor: Tensor, key: str) -> Tensor:
    """Return a tensor as a flat view. Raises CheckpointError for one whose elements do not follow each other."""
    try:
        return tensor.detach().view(-1)
    except RuntimeError:
        raise CheckpointError(
            f"'{key}' is not contiguous in memory, and only contiguous tensors can be saved and loaded. Call "
            ".contiguous() on it before the engine is built."
        ) from None


def _is_on_nvme(engine: DeepSpeedEngine, flat: Tensor) -> bool:
    zero = engine.optimizer
    return getattr(zero, "swap_optimizer", False) and zero._swappable_optimizer_subgroup(_sub_group_of(zero, flat))


def _sub_group_of(zero: DeepSpeedZeroOptimizer_Stage3, flat: Tensor) -> int:
    return next(index for index, other in enumerate(zero.fp32_partitioned_groups_flat) if other is flat)


@contextmanager
def _in_memory(engine: DeepSpeedEngine, flat: Tensor, *, write: bool) -> Iterator[bool]:
    """Swap a flat tensor and its optimizer states in from NVMe, and out again; yields whether they are on NVMe."""
    if not _is_on_nvme(engine, flat):
        yield False
        return
    zero = engine.optimizer
    index = _sub_group_of(zero, flat)
    zero._optimizer_states_and_gradient_swap_in(index)
    yield True
    if write:
        zero._optimizer_states_and_gradient_swap_out(index)
    else:
        zero._release_swap_buffers(index)


def _frozen_views(engine: DeepSpeedEngine) -> dict[str, ShardView]:
    views: dict[str, ShardView] = {}
    stepped = is_stepped(engine)
    for name, param in named_parameters(engine):
        if stepped(param):
            continue
        if hasattr(param, "ds_id"):
            start, length, total = piece_of(param)
            piece = cast("Any", param).ds_tensor.detach().view(-1)  # DeepSpeed sets it
            views[f"frozen/{name}"] = ShardView(piece.narrow(0, 0, length), start, total)
        else:
            first, _, total = held_range(param)
            views[f"frozen/{name}"] = ShardView(_flatten(param, f"frozen/{name}"), first, total)
    return views


def _buffer_views(engine: DeepSpeedEngine) -> dict[str, ShardView]:
    return {
        f"buffer/{name}": ShardView(_flatten(buffer, f"buffer/{name}"), 0, buffer.numel())
        for name, buffer in stored_buffers(engine).items()
    }


def stored_buffers(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Return the buffers that a state dict has. Others, such as rotary tables, follow from the configuration."""
    derived = {
        f"{path}.{name}".lstrip(".")
        for path, module in engine.module.named_modules()
        for name in module._non_persistent_buffers_set
    }
    buffers = engine.module.named_buffers()
    return {plain_name(name): buffer for name, buffer in buffers if name not in derived}
