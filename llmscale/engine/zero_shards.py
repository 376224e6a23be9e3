"""What ZeRO's shards hold, master weights and optimizer states, as live views to save and to fill, on NVMe as well.

Where they lie is zero_layout.py's; together the two are all that knows DeepSpeed's internals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmscale.engine.zero_layout import ParameterShard, ShardView, inner_optimizer, parameter_shards, piece_of
from llmscale.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

MASTER = "master"


def state_views(engine: DeepSpeedEngine) -> dict[str, ShardView]:
    """Views of everything this rank owns: '<state>/<parameter>', 'frozen/<parameter>', 'buffer/<buffer>'.

    <state> is `master` (fp32 weights) or the optimizer's own name of a tensor that has an element per weight
    (`exp_avg`, ...). A state of another shape (Adafactor's row and column sums, stage 0 only) is kept whole. The views
    are live, but for what lies on NVMe, which is copied into host memory: hand those to write_back after changing them.
    """
    views: dict[str, ShardView] = {}
    for places in _places_by_flat(engine):
        with _in_memory(engine, places[0].flat, write=False) as was_on_nvme:
            for key, view in _views_of(engine, places):
                views[key] = ShardView(view.local.clone(), view.start, view.total) if was_on_nvme else view
    return views | _frozen_views(engine) | _buffer_views(engine)


def write_back(engine: DeepSpeedEngine, views: Mapping[str, ShardView]) -> None:
    """Store views that state_views gave out and the caller has filled; only what lies on NVMe needs it."""
    for places in _places_by_flat(engine):
        if not _is_on_nvme(engine, places[0].flat):
            continue
        with _in_memory(engine, places[0].flat, write=True):
            for key, view in _views_of(engine, places):
                if key in views:
                    view.local.copy_(views[key].local)


def weights_to_fill(engine: DeepSpeedEngine) -> Iterator[dict[str, ShardView]]:
    """Live views of this rank's weights by parameter, one flat tensor at a time: of what lies on NVMe no more than that
    is in memory while the caller fills it, and it goes back there when the next one is asked for."""
    for places in _places_by_flat(engine):
        with _in_memory(engine, places[0].flat, write=True):
            yield {place.name: place.view(place.flat) for place in places}
    yield {key.partition("/")[2]: view for key, view in _frozen_views(engine).items()}


def group_scalars(engine: DeepSpeedEngine) -> dict[str, dict[str, float]]:
    """Per optimizer group, the states that are one number (Adam's `step`)."""
    scalars: dict[str, dict[str, float]] = {}
    for places in _places_by_flat(engine):
        flat, group = places[0].flat, places[0].group
        if group in scalars:
            continue
        with _in_memory(engine, flat, write=False):
            state = inner_optimizer(engine).state.get(flat, {})
            scalars[group] = {key: float(value) for key, value in state.items() if not _has_elements(value, flat)}
    return {group: values for group, values in scalars.items() if values}


def set_group_scalars(engine: DeepSpeedEngine, scalars: Mapping[str, Mapping[str, float]]) -> None:
    """The inverse of group_scalars; groups that are not in `scalars` are left alone."""
    for places in _places_by_flat(engine):
        flat = places[0].flat
        with _in_memory(engine, flat, write=True):
            state = inner_optimizer(engine).state.get(flat, {})
            for key, number in scalars.get(places[0].group, {}).items():
                if isinstance(state.get(key), Tensor):
                    state[key].fill_(number)
                else:
                    state[key] = type(state.get(key, number))(number)


def materialise_optimizer_state(engine: DeepSpeedEngine) -> None:
    """Let the optimizer create its states, which it does at its first step, so that they can be loaded into.

    One step with gradients of zero and a learning rate of zero changes no weight.
    """
    optimizer = inner_optimizer(engine)
    for places in _places_by_flat(engine):
        flat = places[0].flat
        if optimizer.state.get(flat):
            continue
        with _in_memory(engine, flat, write=True), _only(optimizer, places[0].group, flat):
            optimizer.step()


@contextmanager
def _only(optimizer: torch.optim.Optimizer, group_name: str, flat: Tensor) -> Iterator[None]:
    """For the time being the optimizer has one tensor, with a gradient of zero and a learning rate of zero."""
    kept = [(group, group["params"], group["lr"]) for group in optimizer.param_groups]
    gradient = flat.grad
    for group in optimizer.param_groups:
        group["params"] = [flat] if group["name"] == group_name else []
        group["lr"] = 0.0
    flat.grad = torch.zeros_like(flat)
    try:
        yield
    finally:
        flat.grad = gradient
        for group, params, lr in kept:
            group["params"], group["lr"] = params, lr


def reset_step_counts(engine: DeepSpeedEngine) -> None:
    """Undo what DeepSpeed's dummy step at start-up (stage 0 in 16 bit) did to Adam's bias correction."""
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
                if low is None:  # the parameters lie on NVMe
                    zero._partitioned_params_swap_out(index)
                else:
                    low.data.copy_(master.data)
        _let_go_of_whole_parameters(engine)
        invalidate_hpz_copies(engine)
    elif hasattr(zero, "update_lp_params"):  # stages 1 and 2
        zero.update_lp_params()
    elif hasattr(zero, "fp16_groups"):  # stage 0 in 16 bit
        for lows, masters in zip(zero.fp16_groups, zero.fp32_groups, strict=True):
            for low, master in zip(lows, masters, strict=True):
                low.data.copy_(master.data)


def _let_go_of_whole_parameters(engine: DeepSpeedEngine) -> None:
    """Stage 3 after its first step: small parameters stay gathered on every rank (stage3_param_persistence_threshold).
    The next forward pass gathers them from the shards, instead of using what they were."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for parameter in engine.optimizer.persistent_parameters:
        if parameter.ds_status is ZeroParamStatus.AVAILABLE:
            parameter.partition()


def invalidate_hpz_copies(engine: DeepSpeedEngine) -> None:
    """Stage 3 with hpZ: the next forward pass gathers from all ranks again. Else it would use copies of the weights
    that were there before; zero.Init makes them too, of the first weights."""
    if hasattr(engine.optimizer, "invalidate_secondary_tensor"):
        engine.optimizer.invalidate_secondary_tensor()


def _places_by_flat(engine: DeepSpeedEngine) -> list[list[ParameterShard]]:
    """Placements that lie in the same flat tensor, together."""
    flats: dict[int, list[ParameterShard]] = {}
    for place in parameter_shards(engine):
        flats.setdefault(id(place.flat), []).append(place)
    return list(flats.values())


def _views_of(engine: DeepSpeedEngine, places: list[ParameterShard]) -> Iterator[tuple[str, ShardView]]:
    """Master weights and optimizer states of parameters that lie in one flat tensor."""
    state = inner_optimizer(engine).state.get(places[0].flat, {})
    for place in places:
        yield f"{MASTER}/{place.name}", place.view(place.flat)
        for key, value in state.items():
            if not _has_elements(value, place.flat):
                continue
            if value.numel() == place.flat.numel():
                yield f"{key}/{place.name}", place.view(value)
            elif place.flat.numel() == place.total:
                yield f"{key}/{place.name}", ShardView(value.detach().view(-1), 0, value.numel())
            else:
                raise CheckpointError(
                    f"the optimizer's '{key}' of '{place.name}' has {value.numel()} elements and its weights "
                    f"{place.flat.numel()} on this rank: such a state cannot be saved or loaded where ZeRO divides it. "
                    "Use ZeRO stage 0, or another optimizer."
                )


def _has_elements(value: object, flat: Tensor) -> bool:
    """Whether an optimizer state is a tensor of elements, not one number such as Adam's `step`."""
    return isinstance(value, Tensor) and (value.numel() > 1 or value.numel() == flat.numel())


def _is_on_nvme(engine: DeepSpeedEngine, flat: Tensor) -> bool:
    zero = engine.optimizer
    return getattr(zero, "swap_optimizer", False) and zero._swappable_optimizer_subgroup(_sub_group_of(zero, flat))


def _sub_group_of(zero: DeepSpeedZeroOptimizer_Stage3, flat: Tensor) -> int:
    return next(index for index, other in enumerate(zero.fp32_partitioned_groups_flat) if other is flat)


@contextmanager
def _in_memory(engine: DeepSpeedEngine, flat: Tensor, *, write: bool) -> Iterator[bool]:
    """Have a flat tensor and its optimizer states in memory; gives whether they lay on NVMe, and goes back there."""
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
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            continue
        if hasattr(param, "ds_id"):
            start, length, total = piece_of(param)
            views[f"frozen/{name}"] = ShardView(param.ds_tensor.detach().view(-1).narrow(0, 0, length), start, total)
        else:
            views[f"frozen/{name}"] = ShardView(param.detach().view(-1), 0, param.numel())
    return views


def _buffer_views(engine: DeepSpeedEngine) -> dict[str, ShardView]:
    return {
        f"buffer/{name}": ShardView(buffer.detach().view(-1), 0, buffer.numel())
        for name, buffer in engine.module.named_buffers()
    }
