"""Bytes that ZeRO holds beside activations on rank 0 of DeepSpeed 0.19.8: the choice of a stage, and stage 0. No torch.

`complete`: gradients that are complete; `handing` beside it: those of a layer that is handing its gradients over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from llmscale.architecture.layers import ParameterTensors
from llmscale.memory.gathers import allocates_gathered
from llmscale.memory.sharding import Sharding
from llmscale.memory.states import Added, Gathered, States, largest_addition, layers_in_order, resident_bytes
from llmscale.memory.zero_setup import ZeroSetup
from llmscale.memory.zero_stage1 import stage1_states
from llmscale.memory.zero_stage2 import Stage2
from llmscale.memory.zero_stage3 import stage3_states

#: Elements at which the engine closes a bucket of gradients (engine.py, MEMORY_OPT_ALLREDUCE_SIZE).
_ALLREDUCE_ELEMENTS = 500_000_000


def zero_states(tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool = False) -> States:
    """Return what DeepSpeed allocates beside activations; autocast's 16-bit copies count as activations.

    `recomputes` matters at stage 3, where recomputation gathers the parameters once more.
    """
    sharding = Sharding(tensors, setup)
    states = _states_of_stage(sharding, recomputes)
    # Steps of earlier micro-steps update nothing, and leave what the next forward pass finds.
    states.step = largest_addition([states.step, states.before])
    if tensors.frozen:
        states.trained = _count_trained(tensors)
    return states


def _states_of_stage(sharding: Sharding, recomputes: bool) -> States:
    setup = sharding.setup
    if setup.stage == 0:
        return _stage0_states(sharding)
    if setup.stage == 3:
        is_gathered = allocates_gathered(setup)
        return stage3_states(sharding, Gathered(sharding.tensors, setup, recomputes) if is_gathered else None)
    config = setup.config
    is_bf16_with_fp32_sums = config.precision == "bf16" and config.grad_accum_dtype == "fp32"
    if setup.stage == 1 and is_bf16_with_fp32_sums and not sharding.offloads:
        return _bf16_optimizer_states(sharding)
    if setup.stage == 1 and not sharding.zero.overlap_comm:
        return stage1_states(sharding)
    return Stage2(sharding).states()


def _count_trained(tensors: ParameterTensors) -> Callable[[float], float]:
    """Return a function of a number of gradients, of which frozen parameters have none."""
    frozen = set(tensors.frozen_tensors)
    layers = layers_in_order(tensors)
    sizes = [sum(tensor.elements for tensor in layer) for layer in layers]
    trained = [sum(tensor.elements for tensor in layer if tensor not in frozen) for layer in layers]
    begins = list(accumulate(sizes, initial=0))
    counts = list(accumulate(trained, initial=0))

    def count(complete: float) -> float:
        place = min(bisect_right(begins, complete) - 1, len(layers) - 1)
        return counts[place] + min(trained[place], complete - begins[place])

    return count


def _stage0_states(sharding: Sharding) -> States:
    """Everything everywhere. 16 bit: FP16_UnfusedOptimizer, whose fp32 gradients live in the step alone."""
    trained = sharding.trained_elements
    weight_bytes = sharding.weight_bytes
    is_16_bit = weight_bytes == 2
    master_bytes = 4 * trained if is_16_bit else 0
    sums_bytes = 0
    if sharding.accumulates:
        sums_bytes = trained * (sharding.sum_bytes if is_16_bit else weight_bytes)
    casts = sharding.accumulates and sharding.sum_bytes > weight_bytes
    casting_bytes = weight_bytes * sharding.last_elements if casts else 0
    state_bytes = sum(
        (group.optimizer.state_bytes - 4) * tensor.elements + group.optimizer.sums_bytes(tensor.parameter)
        for group in sharding.groups
        for tensor in group.tensors
    )
    complete_bytes = weight_bytes * trained

    def gradients(complete: float) -> Added:
        if sums_bytes:
            return Added(gradients=sums_bytes + sharding.waiting_after(complete))
        return Added(gradients=weight_bytes * min(complete, trained))

    return States(
        resident=resident_bytes(complete_bytes + sharding.frozen_bytes, optimizer=master_bytes + state_bytes),
        before=Added(gradients=sums_bytes),
        gradients=gradients,
        handing=lambda complete, handing: Added(gradients=weight_bytes * handing),
        end=largest_addition(
            [
                Added(gradients=sums_bytes, temporaries=casting_bytes),
                Added(gradients=complete_bytes, buckets=_allreduce_bytes(sharding)),
            ]
        ),
        step=Added(
            gradients=complete_bytes,
            temporaries=master_bytes + max(sharding.orthogonalising_bytes, sharding.factored_bytes),
        ),
    )


def _allreduce_bytes(sharding: Sharding) -> float:
    """Bytes of gradients in a flat tensor, which closes after the tensor that fills it, and cast to travel."""
    elements = 0
    size = 0
    for group in sharding.groups:
        for tensor in group.tensors:
            size += tensor.elements
            elements = max(elements, size)
            if size > _ALLREDUCE_ELEMENTS:
                size = 0
    is_cast = sharding.sent_bytes != sharding.weight_bytes
    return elements * (sharding.weight_bytes + (sharding.sent_bytes if is_cast else 0))


def _bf16_optimizer_states(sharding: Sharding) -> States:
    """BF16_Optimizer: stage 1 in bf16 with sums in fp32, which stay between steps."""
    trained = sharding.trained_elements
    sums_at_once = sharding.setup.config.immediate_grad_update
    earlier_bytes = 2 * trained if sharding.accumulates and not sums_at_once else 0
    grows = not earlier_bytes and not sums_at_once
    is_one_flat = (
        trained <= _ALLREDUCE_ELEMENTS and len(sharding.groups) > 1 and sharding.setup.expert_parallel_size == 1
    )
    flat_bytes = 4 * trained if is_one_flat else 0
    cast_bytes = sharding.sent_bytes * trained if sharding.sent_bytes != 4 else 0
    complete_bytes = 2 * trained if grows else earlier_bytes

    def gradients(complete: float) -> Added:
        if grows:
            return Added(gradients=2 * min(complete, trained))
        return Added(gradients=earlier_bytes + sharding.waiting_after(complete))

    def handing_over(complete: float, handing: float) -> Added:
        return Added(gradients=2 * handing, temporaries=4 * handing if sums_at_once else 0)

    return States(
        resident=resident_bytes(2 * trained + sharding.frozen_bytes, 4 * trained, sharding.state_bytes),
        before=Added(gradients=earlier_bytes),
        gradients=gradients,
        handing=handing_over,
        end=largest_addition(
            [
                Added(gradients=complete_bytes, temporaries=4 * sharding.largest_elements),
                Added(gradients=complete_bytes, buckets=flat_bytes + cast_bytes),
            ]
        ),
        step=Added(gradients=complete_bytes, temporaries=sharding.orthogonalising_bytes),
    )
