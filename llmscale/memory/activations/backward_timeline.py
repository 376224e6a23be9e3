"""The backward pass as a list of moments. No torch."""

from __future__ import annotations

from collections.abc import Callable

from llmscale.architecture.layers import ParameterTensor, ParameterTensors
from llmscale.config.deepspeed.schema import Dtype
from llmscale.memory.category_peak import Tally
from llmscale.memory.states.state_memory import BackwardMoment
from llmscale.memory.zero_settings import tensor_bytes

#: What DeepSpeed does with a gradient as soon as it is complete; the gradient is held by then.
GradientHook = Callable[[ParameterTensor], None]


def follow_backward(
    tensors: ParameterTensors,
    tally: Tally,
    *,
    dtype: Dtype,
    hook: GradientHook,
    end: Callable[[], None],
) -> tuple[BackwardMoment, ...]:
    """Let gradients of type `dtype` appear in order, hand each to `hook`, and call `end` after the last.

    The tied table's gradient from the head waits through the whole pass for the one from the look-up, which is added to
    it in place.
    """
    course: list[BackwardMoment] = []
    done = 0
    table_bytes = tensor_bytes(tensors.table.elements, dtype)
    tally.take_peak()
    handover = tally.now
    if tensors.tied:
        tally.hold("gradients", table_bytes)
        course.append(BackwardMoment(done, handover, tally.take_peak()))
        done, handover = tensors.table.elements, tally.now
    for together in tensors.gradient_order[:-1]:
        course.append(BackwardMoment(done, handover, tally.take_peak()))
        for tensor in together:
            done += tensor.elements
            tally.hold("gradients", tensor_bytes(tensor.elements, dtype))
        for tensor in together:
            hook(tensor)
        handover = tally.take_peak()
    course.append(BackwardMoment(done, handover, tally.take_peak()))
    if tensors.tied:
        tally.touch("gradients", table_bytes)
    else:
        tally.hold("gradients", table_bytes)
        done += tensors.table.elements
    hook(tensors.table)
    end()
    handover = tally.take_peak()
    course.append(BackwardMoment(done, handover, tally.now))
    return tuple(course)
