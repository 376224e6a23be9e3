"""Model states of a transformers model under DeepSpeed: the same bookkeeping over its own list of tensors. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmscale.architecture.hf_config import HFModel
from llmscale.architecture.layers import ParameterTensors
from llmscale.memory.estimate import CONTEXT_BYTES, RESERVED_PER_ALLOCATED, MemoryEstimate
from llmscale.memory.states.by_stage import estimate_states_of
from llmscale.memory.zero_settings import ZeroSetup


@dataclass(frozen=True)
class HFStates:
    """One rank without activations."""

    estimate: MemoryEstimate
    begin_of_backward_bytes: int
    """Allocated when the activations are at their most: with what gradients and buffers there are by then."""

    def room_bytes(self, gpu_bytes: int) -> int:
        """What a GPU has left for activations, logits and loss, after the allocator's reserve and the context;
        negative: what is missing."""
        return int((gpu_bytes - CONTEXT_BYTES) / RESERVED_PER_ALLOCATED) - self.begin_of_backward_bytes


def estimate_hf_states(model: HFModel, setup: ZeroSetup) -> HFStates:
    """Parameters, gradients, optimizer states, buffers and temporaries of DeepSpeed; nothing of the model's own."""
    states = estimate_states_of(ParameterTensors(model.architecture), setup)
    moments = {
        "forward": states.resident + states.forward,
        "backward": states.resident + states.backward,
        "optimizer step": states.resident + states.step,
    }
    begin = states.resident + states.backward_course[0].extra
    return HFStates(MemoryEstimate(moments, states.host_bytes, states.nvme_bytes), begin.total_bytes)
