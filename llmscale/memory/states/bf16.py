"""Stage 1 in bf16 with gradients summed in fp32: another optimizer class, whose sums are not partitioned. No torch.

Follows deepspeed/runtime/bf16_optimizer.py, BF16_Optimizer; DeepSpeedEngine._do_optimizer_sanity_check chooses it.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmscale.architecture.layers import ParameterTensor, ParameterTensors
from llmscale.memory.activations.backward_timeline import follow_backward
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.category_peak import Tally
from llmscale.memory.states.flat_groups import FlatGroup, build_flat_groups
from llmscale.memory.states.stage0 import reduce_in_buckets
from llmscale.memory.states.state_memory import StateMemory
from llmscale.memory.zero_settings import ZeroSetup, tensor_bytes


def uses_bf16_optimizer(setup: ZeroSetup) -> bool:
    """Whether DeepSpeed takes this class."""
    return (
        setup.stage == 1
        and setup.config.precision == "bf16"
        and setup.config.grad_accum_dtype == "fp32"
        and setup.zero.offload_optimizer.device == "none"
    )


def estimate_bf16_optimizer(tensors: ParameterTensors, setup: ZeroSetup) -> StateMemory:
    """The sums of all gradients in fp32 stay between steps. A gradient in bf16 is added to them at the end of the
    backward pass, or at once with immediate_grad_update."""
    groups = build_flat_groups(tensors, setup)
    tally = Tally()
    low = sum(tensor_bytes(tensor.elements, "bf16") for tensor in tensors.all)
    kept = setup.accumulates and not setup.config.immediate_grad_update
    tally.hold("gradients", low if kept else 0)
    forward = tally.now

    def hook(tensor: ParameterTensor) -> None:
        if setup.config.immediate_grad_update:
            _add(tensor, tally)
            tally.drop("gradients", tensor_bytes(tensor.elements, "bf16"))
        elif kept:  # cleared to zero, not freed, and added to in place
            tally.drop("gradients", tensor_bytes(tensor.elements, "bf16"))

    def end() -> None:
        if not setup.config.immediate_grad_update:
            for tensor in tensors.all:
                _add(tensor, tally)
        reduce_in_buckets([group.elements for group in groups], "fp32", setup, tally)

    course = follow_backward(tensors, tally, dtype="bf16", hook=hook, end=end)
    return StateMemory(
        resident=Breakdown(
            parameters_bytes=sum(tensor_bytes(group.elements, "bf16") for group in groups),
            gradients_bytes=sum(tensor_bytes(group.elements, "fp32") for group in groups),
            optimizer_bytes=sum(group.state_bytes for group in groups),
        ),
        forward_course=(forward,) * (tensors.architecture.n_layer + 3),
        backward_course=course,
        step=_step(groups, tally),
    )


def _step(groups: Sequence[FlatGroup], tally: Tally) -> Breakdown:
    """All groups at once, from their partitions of the sums."""
    for group in groups:
        tally.touch("temporaries", group.orthogonalising_bytes(from_host=False))
    return tally.take_peak()


def _add(tensor: ParameterTensor, tally: Tally) -> None:
    """_update_hp_grad: an fp32 copy on the way."""
    tally.touch("temporaries", tensor_bytes(tensor.elements, "fp32"))
