"""Places of a parameter's master weights in ZeRO's tensors.

Only this file and zero_shards.py know DeepSpeed's internals.

Stage 0: complete tensors on every rank. Stages 1 and 2: an optimizer group's parameters are concatenated, and each rank
owns one contiguous partition, hence a (possibly empty) range of each parameter. Stage 3: every parameter is cut into
equal pieces, the last one padded. All of them become views of flat tensors, named after the parameter. Where ranks
divide experts, an expert's parameter on a rank is a range of the complete one, cut among the ranks that hold the same
range.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.config.muon_plan import Part
from llmscale.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

#: Range of DeepSpeed releases whose layout was tested, [from, to).
TESTED_DEEPSPEED = ((0, 19, 8), (0, 20))
#: What torch.compile adds to the names of a module that it wraps.
_COMPILED = "_orig_mod."


@dataclass(frozen=True)
class ShardView:
    """Elements [start, start + local.numel()) of a tensor that has `total` elements when flattened."""

    local: Tensor
    """1-D view that shares memory with DeepSpeed's tensor."""
    start: int
    total: int


@dataclass(frozen=True)
class ParameterShard:
    """This rank's part of one trainable parameter, and its place in a flat tensor."""

    name: str
    """The parameter's name in the module."""
    group: str
    """The parameter's optimizer group."""
    flat: Tensor
    """The tensor that the optimizer steps and that contains this part."""
    offset: int
    """First element of this part in `flat`."""
    start: int
    """First element of this part in the flattened parameter of all experts."""
    length: int
    """Elements of this part; 0 when this rank owns none of the parameter."""
    total: int
    """Elements of the parameter."""

    def view(self, tensor: Tensor) -> ShardView:
        """Return this part of a tensor laid out like `flat`, as a live view."""
        if not tensor.is_contiguous():
            raise CheckpointError(
                f"'{self.name}' is not contiguous in memory, and only contiguous parameters can be saved and loaded."
            )
        return ShardView(tensor.detach().view(-1).narrow(0, self.offset, self.length), self.start, self.total)


def check_deepspeed_version() -> None:
    """Refuse an untested DeepSpeed release before training, because its checkpoints might fail."""
    import deepspeed

    oldest, too_new = TESTED_DEEPSPEED
    version = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3])
    if not oldest <= version < too_new:
        tested = f">={'.'.join(map(str, oldest))},<{'.'.join(map(str, too_new))}"
        raise CheckpointError(
            f"DeepSpeed {deepspeed.__version__} is installed; checkpoints reach into its internals and were tested "
            f"with {tested}. Fix: pip install 'deepspeed{tested}'."
        )


def parameter_shards(engine: DeepSpeedEngine) -> Iterator[ParameterShard]:
    """Yield this rank's part of each trainable parameter, in the module's order."""
    zero = engine.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return _stage3_shards(engine)
    if hasattr(zero, "partition_count") or hasattr(zero, "single_partition_of_fp32_groups"):
        return _stage12_shards(engine)
    if hasattr(zero, "fp32_groups_flat"):
        return _fused_shards(engine)
    return _stage0_shards(engine)


def parts_of_all_ranks(engine: DeepSpeedEngine) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each trainable parameter on the ranks of its `shard_group`; empty where each has all."""
    zero = engine.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return {
            name: _equal_parts(param, dist.get_world_size(shard_group(engine, param)))
            for name, param in _trainable(engine)
        }
    groups, flats = _flat_groups(engine)
    flat_of = {id(param): flat for params, flat in zip(groups, flats, strict=True) for param in params}
    return {
        name: _parts_of_flat(param, flat_of[id(param)], dist.get_world_size(shard_group(engine, param)))
        for name, param in _trainable(engine)
        if id(param) in flat_of
    }


def shard_group(engine: DeepSpeedEngine, param: torch.nn.Parameter) -> dist.ProcessGroup | None:
    """Return the ranks that ZeRO divides a parameter's states over; None for all of them."""
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.utils import groups

    if is_moe_param(param):
        return groups._get_expert_data_parallel_group(param.group_name)  # type: ignore[attr-defined]
    return getattr(engine.optimizer, "dp_process_group", None)


def held_range(param: torch.nn.Parameter) -> tuple[int, int, int]:
    """Return (first element, elements, the parameter's elements) of what the ranks of its `shard_group` hold together:
    everything, except of divided experts."""
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.utils import groups

    held = getattr(param, "ds_numel", param.numel())
    if not is_moe_param(param):
        return 0, held, held
    name = param.group_name  # type: ignore[attr-defined]
    return groups._get_expert_parallel_rank(name) * held, held, groups._get_expert_parallel_world_size(name) * held


def group_name(group: Mapping[str, object]) -> str:
    """Return the name of an optimizer's group. DeepSpeed wants the ranks of divided experts in its place."""
    return str(group.get("divided_from", group["name"]))


def count_names(engine: DeepSpeedEngine) -> dict[str, str]:
    """Return, by optimizer group, the name under which its scalar states are stored: that of the group that patterns
    have divided into it and others, whose scalars are equal."""
    groups = inner_optimizer(engine).param_groups
    return {group_name(group): str(group.get("undivided", group_name(group))) for group in groups}


def name_groups(engine: DeepSpeedEngine) -> None:
    """Name the groups of an optimizer after their numbers, unless each has a name of its own.

    torch's optimizers and DeepSpeed's keep further keys of a group.
    """
    groups = inner_optimizer(engine).param_groups
    names = {group.get("name") for group in groups}
    if None in names or len(names) < len(groups):
        for number, group in enumerate(groups):
            group["name"] = f"group-{number}"


def inner_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """Return the torch optimizer inside DeepSpeed's wrapper, which stage 0 in fp32 does not have."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def named_parameters(engine: DeepSpeedEngine) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the module's parameters, tied ones once, by the names that they have without torch.compile."""
    return ((plain_name(name), param) for name, param in engine.module.named_parameters())


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer as if no module had been passed through torch.compile."""
    return name.replace(_COMPILED, "")


def is_stepped(engine: DeepSpeedEngine) -> Callable[[torch.nn.Parameter], bool]:
    """Return a function that tells whether the optimizer changes a parameter: it has it, and it is not frozen."""
    known = {id(param) for group in grouped_parameters(engine) for param in group}
    return lambda param: id(param) in known


def grouped_parameters(engine: DeepSpeedEngine) -> list[list[torch.nn.Parameter]]:
    """Return the module's parameters that the optimizer changes, by its groups, in their order."""
    zero = engine.optimizer
    optimizer = inner_optimizer(engine)
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        divided: list[list[torch.nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for sub_group, params in enumerate(zero.fp16_groups):
            divided[zero.sub_group_to_group_id[sub_group]] += params
        return divided
    flat_groups, _ = _flat_groups(engine)
    own = [group["params"] for group in optimizer.param_groups]
    groups = flat_groups or getattr(zero, "fp16_groups", None) or own
    # Some of DeepSpeed's optimizers leave frozen parameters out of their groups, others do not.
    return [[param for param in group if param.requires_grad] for group in groups]


def _trainable(engine: DeepSpeedEngine) -> Iterator[tuple[str, torch.nn.Parameter]]:
    stepped = is_stepped(engine)
    return ((name, param) for name, param in named_parameters(engine) if stepped(param))


def piece_of(param: torch.nn.Parameter) -> tuple[int, int, int]:
    """Return (first element, elements, the parameter's elements) of this rank's piece at stage 3."""
    first, held, total = held_range(param)
    size = param.ds_tensor.ds_numel  # type: ignore[attr-defined]  # DeepSpeed sets them
    start = min(param.ds_zero_partition_rank * size, held)  # type: ignore[attr-defined]
    return first + start, min(size, held - start), total


def _stage0_shards(engine: DeepSpeedEngine) -> Iterator[ParameterShard]:
    zero = engine.optimizer
    optimizer = inner_optimizer(engine)
    lows = getattr(zero, "fp16_groups", None) or [group["params"] for group in optimizer.param_groups]
    masters = {
        id(low): (master, group_name(group))
        for group, low_group in zip(optimizer.param_groups, lows, strict=True)
        for low, master in zip(low_group, group["params"], strict=True)
    }
    for name, param in _trainable(engine):
        flat, group = masters[id(param)]
        yield ParameterShard(name, group, flat, 0, 0, param.numel(), param.numel())


def _fused_shards(engine: DeepSpeedEngine) -> Iterator[ParameterShard]:
    """Yield the parameters of FusedAdam in 16 bit at stage 0, which steps one flat tensor a group."""
    zero = engine.optimizer
    optimizer = inner_optimizer(engine)
    group_of = {id(param): index for index, params in enumerate(zero.fp16_groups) for param in params}
    for name, param in _trainable(engine):
        index = group_of[id(param)]
        group = group_name(optimizer.param_groups[index])
        offset = _offset_in_flat(param, zero.fp16_groups_flat[index])
        yield ParameterShard(
            name,
            group,
            zero.fp32_groups_flat[index],
            offset=offset,
            start=0,
            length=param.numel(),
            total=param.numel(),
        )


def _stage12_shards(engine: DeepSpeedEngine) -> Iterator[ParameterShard]:
    # Not by DeepSpeed's `_hp_mapping`: it assumes the module's order, and `round_robin_gradients` changes the order.
    optimizer = inner_optimizer(engine)
    parts = parts_of_all_ranks(engine)
    groups, flats = _flat_groups(engine)
    group_of = {id(param): index for index, params in enumerate(groups) for param in params}
    for name, param in _trainable(engine):
        index = group_of[id(param)]
        group = optimizer.param_groups[index]
        flat = group["params"][0]
        rank = dist.get_rank(shard_group(engine, param))
        first, _, total = held_range(param)
        part = next((part for part in parts[name] if part.rank == rank), None)
        if part is None:
            yield ParameterShard(name, group_name(group), flat, 0, first, 0, total)
        else:
            begin = _offset_in_flat(param, flats[index]) - rank * flat.numel() - first
            yield ParameterShard(name, group_name(group), flat, begin + part.start, part.start, part.length, total)


def _stage3_shards(engine: DeepSpeedEngine) -> Iterator[ParameterShard]:
    zero = engine.optimizer
    optimizer = inner_optimizer(engine)
    for name, param in _trainable(engine):
        sub_group, offset, _ = zero.grad_position[zero.get_param_id(param)]
        group = optimizer.param_groups[zero.sub_group_to_group_id[sub_group]]
        start, length, total = piece_of(param)
        flat = zero.fp32_partitioned_groups_flat[sub_group]
        yield ParameterShard(name, group_name(group), flat, offset, start, length, total)


def _equal_parts(param: torch.nn.Parameter, ranks: int) -> tuple[Part, ...]:
    """Return stage 3's equal pieces, of which the last ones may be shorter or empty."""
    first, held, _ = held_range(param)
    size = param.ds_tensor.ds_numel  # type: ignore[attr-defined]  # DeepSpeed sets it
    pieces = (Part(rank, first + rank * size, min(size, held - rank * size)) for rank in range(ranks))
    return tuple(piece for piece in pieces if piece.length > 0)


def _flat_groups(engine: DeepSpeedEngine) -> tuple[list[list[torch.nn.Parameter]], list[Tensor]]:
    """Return each group's parameters and the flat tensor that they are views of; empty outside stages 1 and 2."""
    zero = engine.optimizer
    if hasattr(zero, "bf16_groups"):  # BF16_Optimizer
        return zero.bf16_groups, zero.bf16_groups_flat
    return getattr(zero, "bit16_groups", []), getattr(zero, "bit16_groups_flat", [])


def _offset_in_flat(param: torch.nn.Parameter, flat: Tensor) -> int:
    return int(param.storage_offset()) - int(flat.storage_offset())


def _parts_of_flat(param: torch.nn.Parameter, flat: Tensor, ranks: int) -> tuple[Part, ...]:
    """Return the parts of a parameter at stages 1 and 2, where its flat tensor is cut into equal partitions."""
    begin, size, (first, held, _) = _offset_in_flat(param, flat), flat.numel() // ranks, held_range(param)
    end = begin + held
    cuts = [begin, *range((begin // size + 1) * size, end, size), end]
    return tuple(Part(start // size, first + start - begin, stop - start) for start, stop in itertools.pairwise(cuts))
