"""Where ZeRO keeps a parameter's master weights. With zero_shards.py the only files that know DeepSpeed's internals.

Stage 0: whole tensors on every rank. Stages 1 and 2: the parameters of an optimizer group are laid end to end and each
of the ranks that ZeRO divides states over (ParallelLayout.shard_ranks) owns one contiguous partition, so it holds a
(possibly empty) run of each parameter. Stage 3: every parameter is cut into equal pieces, the last one padded. Here all
of them become views of flat tensors named after the parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.config.muon import Part
from llmscale.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

#: DeepSpeed releases whose layout was tested, [from, to).
TESTED_DEEPSPEED = ((0, 19, 8), (0, 20))


@dataclass(frozen=True)
class ShardView:
    """Elements [start, start + local.numel()) of a tensor that has `total` elements when flattened."""

    local: Tensor
    """1-D; shares memory with what DeepSpeed trains."""
    start: int
    total: int


@dataclass(frozen=True)
class ParameterShard:
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


def parameter_shards(engine: DeepSpeedEngine) -> Iterator[ParameterShard]:
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


def inner_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """The torch optimizer inside DeepSpeed's wrapper; at stage 0 in fp32 there is no wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _trainable(engine: DeepSpeedEngine) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, param) for name, param in engine.module.named_parameters() if param.requires_grad)


def piece_of(param: torch.nn.Parameter) -> tuple[int, int, int]:
    """(first element, elements, elements of the whole) of the piece that this rank has of a parameter at stage 3."""
    size, total = param.ds_tensor.ds_numel, param.ds_numel  # type: ignore[attr-defined]  # DeepSpeed sets them
    start = min(param.ds_zero_partition_rank * size, total)  # type: ignore[attr-defined]
    return start, min(size, total - start), total


def _stage0_placements(engine: DeepSpeedEngine) -> Iterator[ParameterShard]:
    zero, optimizer = engine.optimizer, inner_optimizer(engine)
    lows = getattr(zero, "fp16_groups", None) or [group["params"] for group in optimizer.param_groups]
    masters = {
        id(low): (master, group["name"])
        for group, low_group in zip(optimizer.param_groups, lows, strict=True)
        for low, master in zip(low_group, group["params"], strict=True)
    }
    for name, param in _trainable(engine):
        flat, group_name = masters[id(param)]
        yield ParameterShard(name, group_name, flat, 0, 0, param.numel(), param.numel())


def _stage12_placements(engine: DeepSpeedEngine) -> Iterator[ParameterShard]:
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
            yield ParameterShard(name, group["name"], flat, 0, 0, 0, param.numel())
        else:
            begin = _offset_in_flat(param, flats[index]) - rank * flat.numel()
            yield ParameterShard(name, group["name"], flat, begin + part.start, part.start, part.length, param.numel())


def _stage3_placements(engine: DeepSpeedEngine) -> Iterator[ParameterShard]:
    zero, optimizer = engine.optimizer, inner_optimizer(engine)
    for name, param in _trainable(engine):
        sub_group, offset, _ = zero.grad_position[zero.get_param_id(param)]
        group = optimizer.param_groups[zero.sub_group_to_group_id[sub_group]]
        start, length, total = piece_of(param)
        flat = zero.fp32_partitioned_groups_flat[sub_group]
        yield ParameterShard(name, group["name"], flat, offset, start, length, total)


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


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
