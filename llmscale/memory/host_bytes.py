"""Bytes that offload keeps in host memory and on disk, of one rank. No torch."""

from __future__ import annotations

from itertools import accumulate

from llmscale.memory.sharding import Sharding


def pinned_bytes(num_bytes: float, pinned: bool = True) -> float:
    """Page-locked memory comes in powers of two."""
    if not pinned or num_bytes < 1:
        return num_bytes
    return 1 << (int(num_bytes) - 1).bit_length()


def flat_host_bytes(sharding: Sharding) -> float:
    """Stages 1 and 2: master weights, gradients, new parameters, states, the largest parameter; at stage 2 sums."""
    if not sharding.offloads:
        return 0.0
    weight_bytes = sharding.weight_bytes
    is_pinned = sharding.zero.offload_optimizer.pin_memory
    keeps_sums = sharding.setup.stage == 2 and sharding.accumulates and not sharding.sums_part_in_fp32
    host = pinned_bytes(weight_bytes * sharding.largest_elements, is_pinned)
    for group in sharding.groups:
        host += 2 * pinned_bytes(4 * group.part_elements, is_pinned)
        host += pinned_bytes(weight_bytes * group.part_elements, is_pinned)
        host += (group.optimizer.state_bytes - 4) * group.part_elements
        if keeps_sums:
            host += sum(pinned_bytes(weight_bytes * tensor.elements, is_pinned) for tensor in group.owned_tensors)
    return host


def stage3_host_bytes(sharding: Sharding) -> float:
    """Stage 3: parameters, sums of gradients, master weights, states; buffers of NVMe."""
    states = sharding.zero.offload_optimizer
    parameters = sharding.zero.offload_param
    in_host, on_disk = _parameters_on_host(sharding)
    host = 0.0
    if parameters.device != "none":
        host += sum(pinned_bytes(sharding.weight_bytes * elements) for elements in in_host)
    if parameters.device == "nvme":
        buffers = parameters.buffer_count * parameters.buffer_size
        host += sharding.weight_bytes * (buffers + max(on_disk, default=0))
    if states.device != "none":
        host += pinned_bytes(sharding.sum_bytes * sharding.owned_elements, states.pin_memory)
    sizes = [elements for group in sharding.groups for elements in group.sub_groups(sharding.zero.sub_group_size)]
    if states.device == "nvme":
        host += states.buffer_count * 4 * max(sizes)
    if states.device == "cpu":
        host += sharding.state_bytes
        host += sum(pinned_bytes(4 * elements, states.pin_memory) for elements in sizes)
    return host


def nvme_bytes(sharding: Sharding) -> float:
    """Optimizer states with the gradient, and parameters beyond the host's room."""
    num_bytes = 0.0
    if sharding.zero.offload_optimizer.device == "nvme":
        num_bytes += sum((group.optimizer.state_bytes + 4) * group.part_elements for group in sharding.groups)
    if sharding.zero.offload_param.device == "nvme":
        _, on_disk = _parameters_on_host(sharding)
        num_bytes += sharding.weight_bytes * sum(on_disk)
    return num_bytes


def _parameters_on_host(sharding: Sharding) -> tuple[list[float], list[float]]:
    """Elements of each group with room in host memory, and of the sub-groups beyond it."""
    offload = sharding.zero.offload_param
    left = float(offload.max_in_cpu)
    in_host: list[float] = []
    on_disk: list[float] = []
    for group in sharding.groups:
        room = group.part_elements
        if offload.device != "cpu":
            room = max(0.0, min(room, left))
        left -= group.part_elements
        in_host.append(room)
        sizes = group.sub_groups(sharding.zero.sub_group_size)
        on_disk += [size for size, end in zip(sizes, accumulate(sizes), strict=True) if end > room]
    return in_host, on_disk
