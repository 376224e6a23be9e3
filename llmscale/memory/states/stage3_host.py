"""What stage 3 keeps in host memory and on NVMe. No torch.

Follows deepspeed/runtime/zero/stage3.py, DeepSpeedZeroOptimizer_Stage3, and deepspeed/runtime/swap_tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmscale.memory.host import HostMemory
from llmscale.memory.states.stage3_sub_groups import SubGroup
from llmscale.memory.zero_settings import BYTES_PER_ELEMENT, EngineLayout

#: Smaller optimizer sub-groups stay in host memory (swap_tensor/utils.py, MIN_AIO_BYTES).
_SMALLEST_SWAP_BYTES = 2**20

#: fp32 numbers an element that AdamW's step needs at once: master weight, gradient and two moments.
_STEP_TENSORS = 4


def stage3_host_bytes(sub_groups: Sequence[SubGroup], layout: EngineLayout) -> int:
    """In host memory, by one rank."""
    everything = sum(sub_group.elements for sub_group in sub_groups)
    states, parameters = layout.offload_optimizer, layout.offload_param
    host = HostMemory(pin_memory=True)
    if parameters.device != "none":
        # _create_param_groups_fp16_flat_cpu_memory: page-locked, whatever the config says.
        for group in sorted({sub_group.group for sub_group in sub_groups}):
            host.pinned(_elements_in_host(group, sub_groups, layout), layout.model_dtype)
    if parameters.device == "nvme":
        # AsyncPartitionedParameterSwapper: its buffers, and a swap space for the largest sub-group not in memory.
        host.pageable(parameters.buffer_count * parameters.buffer_size, layout.model_dtype)
        swapped = [sub_group.elements for sub_group in sub_groups if not _is_in_host(sub_group, sub_groups, layout)]
        host.pageable(max(swapped, default=0), layout.model_dtype)
    host.pin_memory = states.pin_memory
    if states.device != "none":
        # grad_partitions_flat_buffer in _setup_for_real_optimizer.
        host.pinned(everything, layout.grad_accum_dtype)
    if states.device == "nvme":
        # SwapBufferManager of the OptimizerSwapper.
        host.pageable(states.buffer_count * max(sub_group.elements for sub_group in sub_groups), "fp32")
    for sub_group in sub_groups:
        # _create_fp32_partitions and initialize_optimizer_states.
        if states.device == "cpu" or (states.device == "nvme" and not _is_swapped(sub_group)):
            host.pageable(3 * sub_group.elements, "fp32")
            host.pinned(sub_group.elements, "fp32")
    return host.num_bytes


def stage3_nvme_bytes(sub_groups: Sequence[SubGroup], layout: EngineLayout) -> int:
    """In files, by one rank."""
    num_bytes = 0
    for sub_group in sub_groups:
        if layout.offload_optimizer.device == "nvme" and _is_swapped(sub_group):
            num_bytes += _STEP_TENSORS * BYTES_PER_ELEMENT["fp32"] * sub_group.elements
        if layout.offload_param.device == "nvme" and not _is_in_host(sub_group, sub_groups, layout):
            num_bytes += BYTES_PER_ELEMENT[layout.model_dtype] * sub_group.elements
    return num_bytes


def _is_swapped(sub_group: SubGroup) -> bool:
    """OptimizerSwapper.is_swappable_tensor."""
    return sub_group.elements * BYTES_PER_ELEMENT["fp32"] >= _SMALLEST_SWAP_BYTES


def _elements_in_host(group: int, sub_groups: Sequence[SubGroup], layout: EngineLayout) -> int:
    """Room for a group's parameters: all of them, or what `max_in_cpu` leaves after the groups before."""
    own = sum(sub_group.elements for sub_group in sub_groups if sub_group.group == group)
    if layout.offload_param.device == "cpu":
        return own
    before = sum(sub_group.elements for sub_group in sub_groups if sub_group.group < group)
    return max(0, min(own, layout.offload_param.max_in_cpu - before))


def _is_in_host(sub_group: SubGroup, sub_groups: Sequence[SubGroup], layout: EngineLayout) -> bool:
    """Whether a sub-group's parameters lie within their group's room (_create_fp16_partitions_with_defragmentation)."""
    end = 0
    for other in sub_groups:
        if other.group == sub_group.group:
            end += other.elements
        if other is sub_group:
            break
    return end <= _elements_in_host(sub_group.group, sub_groups, layout)
