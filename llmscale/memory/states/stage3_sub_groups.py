"""Sub-groups of stage 3: the optimizer steps, and swaps, one after the other. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.architecture.parameter_list import ParameterTensors
from llmscale.memory.states.stage3_parameters import shard_elements
from llmscale.memory.zero_settings import EngineLayout


@dataclass(frozen=True)
class SubGroup:
    """Parameters of one optimizer group that are stepped together."""

    group: int
    shards: tuple[int, ...]
    """Elements that a rank has of each parameter."""

    @property
    def elements(self) -> int:
        return sum(self.shards)


def build_sub_groups(tensors: ParameterTensors, layout: EngineLayout) -> list[SubGroup]:
    """A sub-group is closed when a rank's part of it has reached `sub_group_size` (deepspeed/runtime/zero/stage3.py,
    DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups)."""
    found: list[SubGroup] = []
    for index, group in enumerate(tensors.groups):
        current: list[int] = []
        elements = 0
        for position, tensor in enumerate(group):
            shard = shard_elements(tensor, layout.ranks.shard_ranks)
            current.append(shard)
            elements += shard
            if elements >= layout.sub_group_size or position == len(group) - 1:
                found.append(SubGroup(index, tuple(current)))
                current, elements = [], 0
    return found
