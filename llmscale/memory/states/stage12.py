"""Stages 1 and 2: flat groups of parameters whose optimizer states (and gradients) are partitioned. No torch.

Follows deepspeed/runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer, on rank 0.
"""

from __future__ import annotations

from llmscale.architecture.parameter_list import ParameterTensors
from llmscale.memory.activations.backward_timeline import follow_backward
from llmscale.memory.breakdown import ALLOCATION_BYTES, Breakdown
from llmscale.memory.host import HostMemory
from llmscale.memory.states.flat_groups import FlatGroup
from llmscale.memory.states.stage12_walk import Stage12Walk, is_compact
from llmscale.memory.states.state_memory import BackwardMoment, StateMemory
from llmscale.memory.zero_settings import EngineLayout, tensor_bytes


def estimate_stage12(tensors: ParameterTensors, layout: EngineLayout) -> StateMemory:
    """DeepSpeedZeroOptimizer with partition_grads false (stage 1) or true (stage 2)."""
    walk = Stage12Walk(tensors, layout)
    courses: list[tuple[BackwardMoment, ...]] = []
    forward = walk.tally.now
    # What the second micro-step adds to, every later one adds to as well.
    micro_steps = min(layout.gradient_accumulation_steps, 2)
    for micro_step in range(micro_steps):
        walk.begin(boundary=micro_step == micro_steps - 1)
        forward = walk.tally.now
        course = follow_backward(
            tensors,
            walk.tally,
            dtype=walk.dtype,
            sums_in_place=layout.precision == "autocast",
            hook=walk.hook,
            end=walk.end,
        )
        courses.append(course)
    return StateMemory(
        resident=_resident(tensors, walk.groups, layout),
        forward_course=(forward,) * (tensors.architecture.n_layer + 2),
        # Gradients larger than a bucket, when offloaded, leave the GPU earlier in the last micro-step.
        backward_course=tuple(max(moments, key=_extra_bytes) for moments in zip(*courses, strict=True)),
        step=walk.step(),
        host_bytes=_host(tensors, walk.groups, layout).num_bytes,
    )


def _extra_bytes(moment: BackwardMoment) -> int:
    return moment.extra.total_bytes


def _resident(tensors: ParameterTensors, groups: tuple[FlatGroup, ...], layout: EngineLayout) -> Breakdown:
    """The flat parameters; of each group's partition an fp32 copy, even of fp32, and Adam's states and step count."""
    parameters = sum(tensor_bytes(group.elements, layout.model_dtype) for group in groups)
    if layout.offload_optimizer.device != "none":
        # temp_grad_buffer_for_gpu_offload: as large as the largest parameter.
        largest = max(tensor.elements for tensor in tensors.all)
        return Breakdown(parameters_bytes=parameters, buckets_bytes=tensor_bytes(largest, layout.model_dtype))
    states = sum(3 * tensor_bytes(group.partition, "fp32") + ALLOCATION_BYTES for group in groups)
    return Breakdown(parameters_bytes=parameters, optimizer_bytes=states)


def _host(tensors: ParameterTensors, groups: tuple[FlatGroup, ...], layout: EngineLayout) -> HostMemory:
    """With offload: master weights, their gradients and a buffer for the new parameters (pinned), Adam's states (not),
    a buffer of the largest parameter and, for stage 2 to accumulate in, each parameter that this rank has a part of."""
    host = HostMemory(layout.offload_optimizer.pin_memory)
    if layout.offload_optimizer.device == "none":
        return host
    for group in groups:
        host.pinned(group.partition, "fp32")
        host.pinned(group.partition, "fp32")
        host.pinned(group.partition, layout.model_dtype)
        host.pageable(2 * group.partition, "fp32")
    host.pinned(max(tensor.elements for tensor in tensors.all), layout.model_dtype)
    if layout.zero_stage == 2 and layout.gradient_accumulation_steps > 1 and not is_compact(layout):
        for group in groups:
            for tensor in group.tensors:
                if tensor.index in group.local:
                    host.pinned(tensor.elements, layout.model_dtype)
    return host
