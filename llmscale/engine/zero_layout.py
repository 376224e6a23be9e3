"""Places of a parameter's master weights in ZeRO's tensors.

Only this file and zero_shards.py know DeepSpeed's internals.

Stage 0: complete tensors on every rank. Stages 1 and 2: an optimizer group's parameters are concatenated, and each rank
that ZeRO divides states over (ParallelLayout.shard_ranks) owns one contiguous partition, hence a (possibly empty) range
of each parameter. Stage 3: every parameter is cut into equal pieces, the last one padded. All of them become views of
flat tensors, named after the parameter.
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

#: Range of DeepSpeed releases whose layout was tested, [from, to).
TESTED_DEEPSPEED = ((0, 19, 8), (0, 20))


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
    """The fp32 tensor that the optimizer steps and that contains this part."""
    offset: int
    """First element of this part in `flat`."""
    start: int
    """First element of this part in the flattened parameter."""
    length: int
    """Elements of this part; 0 when this rank owns none of the parameter."""
    total: int
    """Elements of the parameter."""

    def view(self, tensor: Tensor) -> ShardView:
        """Return this part of a tensor laid out like `flat`, as a live view."""
        return ShardView(tensor.detach().view(-1).narrow(0, self.offset, self.length), self.start, self.total)


def check_deepspeed_version() -> None:
    """Refuse an untested DeepSpeed release before training, because its checkpoints might fail."""
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
    """Yield this rank's part of each trainable parameter, in the module's order."""
    zero = engine.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return _stage3_shards(engine)
    if hasattr(zero, "partition_count") or hasattr(zero, "single_partition_of_fp32_groups"):
        return _stage12_shards(engine)
    return _stage0_shards(engine)


def parts_of_all_ranks(engine: DeepSpeedEngine) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each trainable parameter on the ranks of `shard_group`; empty where every rank has all."""
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
    """Return the ranks that ZeRO divides states over; None for all of them."""
    return getattr(engine.optimizer, "dp_process_group", None)


def inner_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """Return the torch optimizer inside DeepSpeed's wrapper, which stage 0 in fp32 does not have."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _trainable(engine: DeepSpeedEngine) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, param) for name, param in engine.module.named_parameters() if param.requires_grad)


def piece_of(param: torch.nn.Parameter) -> tuple[int, int, int]:
    """Return (first element, elements, the parameter's elements) of this rank's piece at stage 3."""
    size, total = param.ds_tensor.ds_numel, param.ds_numel  # type: ignore[attr-defined]  # DeepSpeed sets them
    start = min(param.ds_zero_partition_rank * size, total)  # type: ignore[attr-defined]
    return start, min(size, total - start), total


def _stage0_shards(engine: DeepSpeedEngine) -> Iterator[ParameterShard]:
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


def _stage12_shards(engine: DeepSpeedEngine) -> Iterator[ParameterShard]:
    # Not by DeepSpeed's `_hp_mapping`: it assumes the module's order, and `round_robin_gradients` changes the order.
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


def _stage3_shards(engine: DeepSpeedEngine) -> Iterator[ParameterShard]:
    zero, optimizer = engine.optimizer, inner_optimizer(engine)
    for name, param in _trainable(engine):
        sub_group, offset, _ = zero.grad_position[zero.get_param_id(param)]
        group = optimizer.param_groups[zero.sub_group_to_group_id[sub_group]]
        start, length, total = piece_of(param)
        flat = zero.fp32_partitioned_groups_flat[sub_group]
        yield ParameterShard(name, group["name"], flat, offset, start, length, total)


def _equal_parts(param: torch.nn.Parameter, ranks: int) -> tuple[Part, ...]:
    """Return stage 3's equal pieces, of which the last ones may be shorter or empty."""
    size, total = param.ds_tensor.ds_numel, param.ds_numel  # type: ignore[attr-defined]  # DeepSpeed sets them
    pieces = (Part(rank, rank * size, min(size, total - rank * size)) for rank in range(ranks))
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
    begin, size = _offset_in_flat(param, flat), flat.numel() // ranks
    end = begin + param.numel()
    cuts = [begin, *range((begin // size + 1) * size, end, size), end]
    return tuple(Part(start // size, start - begin, stop - start) for start, stop in itertools.pairwise(cuts))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
