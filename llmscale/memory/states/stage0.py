"""Stage 0: everything on every rank. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from llmscale.architecture.layers import ParameterTensor, ParameterTensors
from llmscale.config.deepspeed.schema import Dtype
from llmscale.memory.activations.backward_timeline import follow_backward
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.category_peak import Tally
from llmscale.memory.states.muon import orthogonalising_bytes
from llmscale.memory.states.state_memory import StateMemory
from llmscale.memory.zero_settings import ZeroSetup, state_tensor_bytes, tensor_bytes

#: Elements at which the engine closes a bucket of gradients (deepspeed/runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE).
ALLREDUCE_ELEMENTS = 500_000_000


def estimate_stage0(tensors: ParameterTensors, setup: ZeroSetup) -> StateMemory:
    """Without a wrapper in fp32 and under autocast; in bf16 FP16_UnfusedOptimizer with an fp32 copy of every parameter
    (engine.py, DeepSpeedEngine._configure_optimizer and _configure_fp16_optimizer: torch's AdamW is not FusedAdam)."""
    dtype = setup.config.model_dtype
    low = sum(tensor_bytes(tensor.elements, dtype) for tensor in tensors.all)
    full = sum(tensor_bytes(tensor.elements, "fp32") for tensor in tensors.all)
    master = full if dtype != "fp32" else 0
    group_of = setup.optimizer.group_of
    states = sum(state_tensor_bytes(group_of(tensor.kind), tensor.elements) for tensor in tensors.all)
    accumulates = setup.accumulates
    # llmscale.engine.deepspeed_patches: sums in fp32 until the last micro-step, handed over in the parameters' type.
    in_fp32 = accumulates and setup.config.grad_accum_dtype == "fp32" and dtype != "fp32"
    tally = Tally()
    if accumulates:
        tally.hold("gradients", full if in_fp32 else low)
    forward = tally.now

    def hook(tensor: ParameterTensor) -> None:
        if accumulates:  # added in place to what is there
            tally.drop("gradients", tensor_bytes(tensor.elements, dtype))

    def end() -> None:
        for tensor in tensors.all if in_fp32 else ():
            tally.hold("gradients", tensor_bytes(tensor.elements, dtype))
            tally.drop("gradients", tensor_bytes(tensor.elements, "fp32"))
        reduce_in_buckets([tensor.elements for tensor in tensors.all], dtype, setup, tally)

    course = follow_backward(tensors, tally, dtype=dtype, hook=hook, end=end)
    # FP16_UnfusedOptimizer.step: gradients in fp32 beside those in 16 bit, until the step is over.
    tally.hold("temporaries", master)
    for group, members in setup.optimizer.group_tensors(tensors.all):
        whole = ((tensor, ()) for tensor in members)
        tally.touch("temporaries", orthogonalising_bytes(group, whole, from_host=False))
    return StateMemory(
        resident=Breakdown(parameters_bytes=low, optimizer_bytes=states + master),
        forward_course=(forward,) * (tensors.architecture.n_layer + 3),
        backward_course=course,
        step=tally.take_peak(),
    )


def reduce_in_buckets(sizes: Sequence[int], dtype: Dtype, setup: ZeroSetup, tally: Tally) -> None:
    """engine.py, DeepSpeedEngine.allreduce_no_retain: gradients are copied into one flat tensor, which a single
    gradient does not need, and that into another one where the communication has another type."""
    elements = count = 0
    for position, size in enumerate(sizes):
        elements, count = elements + size, count + 1
        if elements > ALLREDUCE_ELEMENTS or position == len(sizes) - 1:
            flat = tensor_bytes(elements, dtype) if count > 1 else 0
            other = setup.config.communication_data_type != dtype
            tally.touch(
                "buckets", flat + (tensor_bytes(elements, setup.config.communication_data_type) if other else 0)
            )
            elements = count = 0
