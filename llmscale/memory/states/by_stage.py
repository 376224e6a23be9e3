"""What DeepSpeed 0.19.8 allocates beside activations, for our model at any ZeRO stage, in closed form. No torch.

Not multiples of the model's size, but DeepSpeed's own bookkeeping over the list of parameter tensors: which buffer is
made when, how it is padded, and what is released by then. Each stage's file names the class and function that an
allocation comes from. tests/memory/states/test_by_stage.py holds all of it against a dry run of the real engine.
"""

from __future__ import annotations

from llmscale.architecture.layers import ParameterTensors
from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.memory.states.bf16 import estimate_bf16_optimizer, uses_bf16_optimizer
from llmscale.memory.states.stage0 import estimate_stage0
from llmscale.memory.states.stage3 import estimate_stage3
from llmscale.memory.states.stage12 import estimate_stage12
from llmscale.memory.states.state_memory import StateMemory
from llmscale.memory.zero_settings import ZeroSetup


def estimate_states(shape: GPTShape, setup: ZeroSetup, checkpointing: CheckpointingMode = "none") -> StateMemory:
    """One rank's memory without activations; autocast's 16-bit copies of weights count as activations.

    `checkpointing` matters at stage 3, where recomputation gathers the parameters once more.
    """
    return estimate_states_of(shape.tensors, setup, checkpointing)


def estimate_states_of(
    tensors: ParameterTensors, setup: ZeroSetup, checkpointing: CheckpointingMode = "none"
) -> StateMemory:
    """The same for any list of parameters."""
    if setup.stage == 0:
        return estimate_stage0(tensors, setup)
    if uses_bf16_optimizer(setup):
        return estimate_bf16_optimizer(tensors, setup)
    if setup.stage == 3:
        return estimate_stage3(tensors, setup, recomputes=checkpointing != "none")
    return estimate_stage12(tensors, setup)
