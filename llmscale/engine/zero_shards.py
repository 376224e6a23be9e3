"""Where ZeRO keeps a parameter's master weights and optimizer states. The only file that knows DeepSpeed's internals.

Stage 0: whole tensors on every rank. Stages 1 and 2: the parameters of an optimizer group are laid end to end and each
rank owns one stretch, so a rank holds a (possibly empty) run of each parameter. Stage 3: every parameter is cut into
equal pieces, the last one padded. Here all of them become views of flat tensors named after the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

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
            f"DeepSpeed {deepspeed.__version__} is installed; checkpoints reach into its internals and were "
            "tested with "
            f">={_dotted(oldest)},<{_dotted(too_new)}. Fix: pip install "
            f"'deepspeed>={_dotted(oldest)},<{_dotted(too_new)}'."
        )


def state_views(engine: DeepSpeedEngine) -> dict[str, ShardView]:
    """Live views of everything this rank owns: '<state>/<parameter>', 'frozen/<parameter>', 'buffer/<buffer>'.

    <state> is `master` (fp32 weights) or the optimizer's own name of a tensor that has an element per weight
    (`exp_avg`, ...). A state of another shape (Adafactor's row and column sums, stage 0 only) is kept whole.
    """
    states = inner_optimizer(engine).state
    views: dict[str, ShardView] = {}
    for place in placements(engine):
        views[f"{MASTER}/{place.name}"] = place.view(place.flat)
        for key, value in states.get(place.flat, {}).items():
            if not isinstance(value, Tensor) or value.numel() == 1 != place.flat.numel():
                continue
            if value.numel() == place.flat.numel():
                views[f"{key}/{place.name}"] = place.view(value)
            else:
                views[f"{key}/{place.name}"] = ShardView(value.detach().view(-1), 0, value.numel())
    return views | _frozen_views(engine) | _buffer_views(engine)


def group_scalars(engine: DeepSpeedEngine) -> dict[str, dict[str, float]]:
    """Per optimizer group, the states that are one number (Adam's `step`)."""
    states = inner_optimizer(engine).state
    scalars: dict[str, dict[str, float]] = {}
    for place in placements(engine):
        for key, value in states.get(place.flat, {}).items():
            if not isinstance(value, Tensor) or value.numel() == 1 != place.flat.numel():
                scalars.setdefault(place.group, {})[key] = float(value)
    return scalars


def set_group_scalars(engine: DeepSpeedEngine, scalars: dict[str, dict[str, float]]) -> None:
    """The inverse of group_scalars; groups that are not in `scalars` are left alone."""
    states = inner_optimizer(engine).state
    for place in placements(engine):
        state = states.get(place.flat, {})
        for key, number in scalars.get(place.group, {}).items():
            if isinstance(state.get(key), Tensor):
                state[key].fill_(number)
            else:
                state[key] = type(state.get(key, number))(number)


def materialise_optimizer_state(engine: DeepSpeedEngine) -> None:
    """Let the optimizer create its states, which it does at its first step, so that they can be loaded into.

    One step with gradients of zero and a learning rate of zero changes no weight.
    """
    optimizer = inner_optimizer(engine)
    groups = {group["name"]: group for group in optimizer.param_groups}
    for flat, name in {id(p.flat): (p.flat, p.group) for p in placements(engine)}.values():
        if optimizer.state.get(flat):
            continue
        group = groups[name]
        params, lr, grad = group["params"], group["lr"], flat.grad
        others = [(other, other["params"]) for other in optimizer.param_groups if other is not group]
        for other, _ in others:
            other["params"] = []
        group["params"], group["lr"], flat.grad = [flat], 0.0, torch.zeros_like(flat)
        optimizer.step()
        group["params"], group["lr"], flat.grad = params, lr, grad
        for other, kept in others:
            other["params"] = kept


def reset_step_counts(engine: DeepSpeedEngine) -> None:
    """Undo what DeepSpeed's dummy step at start-up (stage 0 in 16 bit) did to Adam's bias correction."""
    for state in inner_optimizer(engine).state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()


def refresh_low_precision_weights(engine: DeepSpeedEngine) -> None:
    """Copy the master weights into the weights that the forward pass uses. Collective."""
    zero = engine.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        for low, master in zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True):
            low.data.copy_(master.data)
    elif hasattr(zero, "update_lp_params"):  # stages 1 and 2
        zero.update_lp_params()
    elif hasattr(zero, "fp16_groups"):  # stage 0 in 16 bit
        for lows, masters in zip(zero.fp16_groups, zero.fp32_groups, strict=True):
            for low, master in zip(lows, masters, strict=True):
                low.data.copy_(master.data)


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
    optimizer = inner_optimizer(engine)
    group_of = {
        id(param): index
        for index, group in enumerate(getattr(engine.optimizer, "bit16_groups", None) or engine.optimizer.bf16_groups)
        for param in group
    }
    for name, param in _trainable(engine):
        group = optimizer.param_groups[group_of[id(param)]]
        flat, mapping = group["params"][0], param._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed sets it
        if mapping is None:
            yield Placement(name, group["name"], flat, 0, 0, 0, param.numel())
        else:
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield Placement(name, group["name"], flat, here.start, there.start, here.numel, param.numel())


def _stage3_placements(engine: DeepSpeedEngine) -> Iterator[Placement]:
    zero, optimizer = engine.optimizer, inner_optimizer(engine)
    rank = dist.get_rank()
    for name, param in _trainable(engine):
        sub_group, offset, _ = zero.grad_position[zero.get_param_id(param)]
        group = optimizer.param_groups[zero.sub_group_to_group_id[sub_group]]
        piece, total = param.ds_tensor, param.ds_numel  # type: ignore[attr-defined]  # DeepSpeed sets them
        size = piece.ds_numel
        start = min(rank * size, total)
        flat = zero.fp32_partitioned_groups_flat[sub_group]
        yield Placement(name, group["name"], flat, offset, start, min(size, total - start), total)


def _trainable(engine: DeepSpeedEngine) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, param) for name, param in engine.module.named_parameters() if param.requires_grad)


def _frozen_views(engine: DeepSpeedEngine) -> dict[str, ShardView]:
    views: dict[str, ShardView] = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            continue
        if hasattr(param, "ds_id"):
            size, total = param.ds_tensor.ds_numel, param.ds_numel
            start = min(dist.get_rank() * size, total)
            views[f"frozen/{name}"] = ShardView(
                param.ds_tensor.detach().view(-1).narrow(0, 0, min(size, total - start)), start, total
            )
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
