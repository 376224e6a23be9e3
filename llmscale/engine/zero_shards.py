"""Where ZeRO keeps a parameter's master weights and optimizer states. The only file that knows DeepSpeed's internals.

Stage 0: whole tensors on every rank. Stages 1 and 2: the parameters of an optimizer group are laid end to end and each
of the ranks that ZeRO divides states over (ParallelLayout.shard_ranks) owns one contiguous partition, so it holds a
(possibly empty) run of each parameter. Stage 3: every parameter is cut into equal pieces, the last one padded. Here all
of them become views of flat tensors named after the parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.config.muon import Part
from llmscale.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

#: DeepSpeed releases whose layout was tested, [from, to).
TESTED_DEEPSPEED = ((0, 19, 8), (0, 20))

MASTER = "master"


@dataclass(frozen=True)
class ShardView:
    """Elements [start, start + local.numel()) of a tensor that has `total` elements when flattened."""

    local: Tensor
    """1-D; shares memory with what DeepSpeed trains."""
    start: int
    total: int


@dataclass(frozen=True)
class Placement:
    """Where this rank keeps its part of one trainable parameter."""

    name: str
    """The parameter's name in the module."""
    group: str
    """Its optimizer group."""
    flat: Tensor
    """fp32 tensor that the optimizer steps, with this part somewhere inside."""
    offset: int
    """First element of this part in `flat`."""
    start: int
    """First element of this part in the flattened parameter."""
    length: int
    """Elements of this part; 0 when this rank owns nothing of the parameter."""
    total: int
    """Elements of the parameter."""

    def view(self, tensor: Tensor) -> ShardView:
        """This part of a tensor laid out like `flat`, as a live view."""
        return ShardView(tensor.detach().view(-1).narrow(0, self.offset, self.length), self.start, self.total)


def check_deepspeed_version() -> None:
    """Refuse a DeepSpeed whose internals were not tested, before anything is trained that could not be saved."""
    import deepspeed

    oldest, too_new = TESTED_DEEPSPEED
    version = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3])
    if not oldest <= version < too_new:
        raise CheckpointError(
            f"DeepSpeed {deepspeed.__version__} is installed; checkpoints reach into its internals and were tested "
            f"with >={_dotted(oldest)},<{_dotted(too_new)}. Fix: pip install "
            f"'deepspeed>={_dotted(oldest)},<{_dotted(too_new)}'."
        )


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
        forget_second_copies(engine)
    elif hasattr(zero, "update_lp_params"):  # stages 1 and 2
        zero.update_lp_params()
    elif hasattr(zero, "fp16_groups"):  # stage 0 in 16 bit
        for lows, masters in zip(zero.fp16_groups, zero.fp32_groups, strict=True):
            for low, master in zip(lows, masters, strict=True):
                low.data.copy_(master.data)


def forget_second_copies(engine: DeepSpeedEngine) -> None:
    """Stage 3 with hpZ: the next forward pass gathers from all ranks again. Else it would use copies of the weights
    that were there before; zero.Init makes them too, of the first weights."""
    if hasattr(engine.optimizer, "invalidate_secondary_tensor"):
        engine.optimizer.invalidate_secondary_tensor()


def inner_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """The torch optimizer inside DeepSpeed's wrapper; at stage 0 in fp32 there is no wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def placements(engine: DeepSpeedEngine) -> Iterator[Placement]:
    """Where this rank keeps each trainable parameter, in the module's order."""
    zero = engine.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return _stage3_placements(engine)
    if hasattr(zero, "partition_count") or hasattr(zero, "single_partition_of_fp32_groups"):
        return _stage12_placements(engine)
    return _stage0_placements(engine)


def parts_of_all_ranks(engine: DeepSpeedEngine) -> dict[str, tuple[Part, ...]]:
    """Which rank of `shard_group` has what of each trainable parameter; nothing where every rank has all of it."""
    zero = engine.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        ranks = dist.get_world_size(shard_group(engine))
        return {name: _equal_parts(param, ranks) for name, param in _trainable(engine)}
    groups, flats = _flat_groups(engine)
    flat_of = {id(param): flat for params, flat in zip(groups, flats, strict=True) for param in params}
    ranks = dist.get_world_size(shard_group(engine)) if flats else 1
    return {
        name: _parts_of_flat(param, flat_of[id(param)], ranks)
        for name, param in _trainable(engine)
        if id(param) in flat_of
    }


def shard_group(engine: DeepSpeedEngine) -> dist.ProcessGroup | None:
    """The ranks that ZeRO divides states over; None: all of them."""
    return getattr(engine.optimizer, "dp_process_group", None)


def _equal_parts(param: torch.nn.Parameter, ranks: int) -> tuple[Part, ...]:
    """Stage 3: equal pieces, the last ones shorter or empty."""
    size, total = param.ds_tensor.ds_numel, param.ds_numel  # type: ignore[attr-defined]  # DeepSpeed sets them
    pieces = (Part(rank, rank * size, min(size, total - rank * size)) for rank in range(ranks))
    return tuple(piece for piece in pieces if piece.length > 0)


def _flat_groups(engine: DeepSpeedEngine) -> tuple[list[list[torch.nn.Parameter]], list[Tensor]]:
    """Stages 1 and 2: each group's parameters, and the flat tensor that they are views of; at other stages nothing."""
    zero = engine.optimizer
    if hasattr(zero, "bf16_groups"):  # BF16_Optimizer
        return zero.bf16_groups, zero.bf16_groups_flat
    return getattr(zero, "bit16_groups", []), getattr(zero, "bit16_groups_flat", [])


def _offset_in_flat(param: torch.nn.Parameter, flat: Tensor) -> int:
    return int(param.storage_offset()) - int(flat.storage_offset())


def _parts_of_flat(param: torch.nn.Parameter, flat: Tensor, ranks: int) -> tuple[Part, ...]:
    """Stages 1 and 2: the flat tensor, of which the parameter is a view, is cut into equal partitions."""
    begin, size = _offset_in_flat(param, flat), flat.numel() // ranks
    end = begin + param.numel()
    cuts = [begin, *range((begin // size + 1) * size, end, size), end]
    return tuple(Part(start // size, start - begin, stop - start) for start, stop in itertools.pairwise(cuts))


def _places_by_flat(engine: DeepSpeedEngine) -> list[list[Placement]]:
    """Placements that lie in the same flat tensor, together."""
    flats: dict[int, list[Placement]] = {}
    for place in placements(engine):
        flats.setdefault(id(place.flat), []).append(place)
    return list(flats.values())


def _views_of(engine: DeepSpeedEngine, places: list[Placement]) -> Iterator[tuple[str, ShardView]]:
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


def _stage0_placements(engine: DeepSpeedEngine) -> Iterator[Placement]:
    zero, optimizer = engine.optimizer, inner_optimizer(engine)
    lows = getattr(zero, "fp16_groups", None) or [group["params"] for group in optimizer.param_groups]
    masters = {
        id(low): (master, group["name"])
        for group, low_group in zip(optimizer.param_groups, lows, strict=True)
        for low, master in zip(low_group, group["params"], strict=True)
    }
    for name, param in _trainable(engine):
        flat, group_name = masters[id(param)]
        yield Placement(name, group_name, flat, 0, 0, param.numel(), param.numel())


def _stage12_placements(engine: DeepSpeedEngine) -> Iterator[Placement]:
    """Not by DeepSpeed's own `_hp_mapping`, which takes the parameters in the module's order where
    `round_robin_gradients` has laid them in another."""
    optimizer, rank = inner_optimizer(engine), dist.get_rank(shard_group(engine))
    parts = parts_of_all_ranks(engine)
    groups, flats = _flat_groups(engine)
    group_of = {id(param): index for index, params in enumerate(groups) for param in params}
    for name, param in _trainable(engine):
        index = group_of[id(param)]
        group = optimizer.param_groups[index]
        flat = group["params"][0]
        part = next((part for part in parts[name] if part.rank == rank), None)
        if part is None:
            yield Placement(name, group["name"], flat, 0, 0, 0, param.numel())
        else:
            begin = _offset_in_flat(param, flats[index]) - rank * flat.numel()
            yield Placement(name, group["name"], flat, begin + part.start, part.start, part.length, param.numel())


def _stage3_placements(engine: DeepSpeedEngine) -> Iterator[Placement]:
    zero, optimizer = engine.optimizer, inner_optimizer(engine)
    for name, param in _trainable(engine):
        sub_group, offset, _ = zero.grad_position[zero.get_param_id(param)]
        group = optimizer.param_groups[zero.sub_group_to_group_id[sub_group]]
        start, length, total = _piece(param)
        flat = zero.fp32_partitioned_groups_flat[sub_group]
        yield Placement(name, group["name"], flat, offset, start, length, total)


def _piece(param: torch.nn.Parameter) -> tuple[int, int, int]:
    """(first element, elements, elements of the whole) of the piece that this rank has of a parameter at stage 3."""
    size, total = param.ds_tensor.ds_numel, param.ds_numel  # type: ignore[attr-defined]  # DeepSpeed sets them
    start = min(param.ds_zero_partition_rank * size, total)  # type: ignore[attr-defined]
    return start, min(size, total - start), total


def _trainable(engine: DeepSpeedEngine) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, param) for name, param in engine.module.named_parameters() if param.requires_grad)


def _frozen_views(engine: DeepSpeedEngine) -> dict[str, ShardView]:
    views: dict[str, ShardView] = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            continue
        if hasattr(param, "ds_id"):
            start, length, total = _piece(param)
            views[f"frozen/{name}"] = ShardView(param.ds_tensor.detach().view(-1).narrow(0, 0, length), start, total)
        else:
            views[f"frozen/{name}"] = ShardView(param.detach().view(-1), 0, param.numel())
    return views


def _buffer_views(engine: DeepSpeedEngine) -> dict[str, ShardView]:
    return {
        f"buffer/{name}": ShardView(buffer.detach().view(-1), 0, buffer.numel())
        for name, buffer in engine.module.named_buffers()
    }


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
