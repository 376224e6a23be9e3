"""How stages 1 and 2 lay the parameters of a group end to end and cut them into equal partitions. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from llmscale.architecture.layers import ParameterTensor, ParameterTensors
from llmscale.config.muon import Part
from llmscale.config.optimizers import OptimizerGroup
from llmscale.memory.states.muon import orthogonalising_bytes
from llmscale.memory.zero_settings import BYTES_PER_ELEMENT, ZeroSetup, state_tensor_bytes, tensor_bytes

#: DeepSpeedZeroOptimizer.nccl_start_alignment_factor, in elements.
_START_ALIGNMENT = 2


@dataclass(frozen=True)
class FlatGroup:
    """One of the optimizer's groups (deepspeed/runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__)."""

    optimizer: OptimizerGroup
    tensors: tuple[ParameterTensor, ...]
    """In the order in which they lie in the flat tensor."""
    offsets: tuple[int, ...]
    """First element of each."""
    elements: int
    """Of the flat tensor, padded so that every rank's partition begins aligned."""
    shard_ranks: int

    @cached_property
    def partition(self) -> int:
        """Elements that one rank owns."""
        return self.elements // self.shard_ranks

    @property
    def state_bytes(self) -> int:
        """On one rank's GPU: an fp32 copy of its partition, even of fp32, and the optimizer's states."""
        return tensor_bytes(self.partition, "fp32") + state_tensor_bytes(self.optimizer, self.partition)

    @cached_property
    def local(self) -> dict[int, int]:
        """Tensor index -> elements of it that rank 0 owns."""
        return {
            tensor.index: min(tensor.elements, self.partition - offset)
            for tensor, offset in zip(self.tensors, self.offsets, strict=True)
            if offset < self.partition
        }

    def pieces(self, tensor: ParameterTensor) -> Iterator[tuple[int, int]]:
        """(owning rank, elements) of each piece of a tensor."""
        offset = self._offset_of[tensor.index]
        end = offset + tensor.elements
        while offset < end:
            rank = offset // self.partition
            length = min(end, (rank + 1) * self.partition) - offset
            yield rank, length
            offset += length

    def orthogonalising_bytes(self, *, from_host: bool) -> int:
        """What the step of this group takes beside its states; 0 where nothing is orthogonalised."""
        parts = ((tensor, tuple(self._parts(tensor))) for tensor in self.tensors)
        return orthogonalising_bytes(self.optimizer, parts, from_host=from_host)

    def _parts(self, tensor: ParameterTensor) -> Iterator[Part]:
        start = 0
        for rank, length in self.pieces(tensor):
            yield Part(rank, start, length)
            start += length

    @cached_property
    def _offset_of(self) -> dict[int, int]:
        return {tensor.index: offset for tensor, offset in zip(self.tensors, self.offsets, strict=True)}


def build_flat_groups(tensors: ParameterTensors, setup: ZeroSetup) -> tuple[FlatGroup, ...]:
    """All groups. With `round_robin_gradients` every shard_ranks-th tensor is next to the other; with
    `parameter_alignment` each begins at a multiple of 16 bytes."""
    groups = setup.optimizer.group_tensors(tensors.all)
    return tuple(_build_flat_group(group, members, setup) for group, members in groups)


def _build_flat_group(group: OptimizerGroup, members: Sequence[ParameterTensor], setup: ZeroSetup) -> FlatGroup:
    ranks = setup.shard_ranks
    order = list(members)
    if setup.zero.round_robin_gradients:
        order = [tensor for start in range(min(ranks, len(order))) for tensor in order[start::ranks]]
    alignment = 16 // BYTES_PER_ELEMENT[setup.config.model_dtype] if setup.zero.parameter_alignment else 1
    offsets, end = [], 0
    for tensor in order:
        offsets.append(math.ceil(end / alignment) * alignment if alignment > 1 else end)
        end = offsets[-1] + tensor.elements
    multiple = _START_ALIGNMENT * ranks
    return FlatGroup(group, tuple(order), tuple(offsets), -(-end // multiple) * multiple, ranks)
