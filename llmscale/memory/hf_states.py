"""Model states of a transformers model under DeepSpeed: the same bookkeeping over its own list of tensors. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from llmscale.architecture.hf_config import HFModel
from llmscale.architecture.hf_families import Layers
from llmscale.architecture.parameter_list import Layer, ParameterTensor, ParameterTensors
from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.sections import CheckpointingMode
from llmscale.memory.estimate import CONTEXT_BYTES, RESERVED_PER_ALLOCATED, MemoryEstimate
from llmscale.memory.states.by_stage import estimate_states_of
from llmscale.memory.zero_settings import EngineLayout

#: The order in which a block's layers get their gradients.
_BACKWARD: tuple[Layer, ...] = ("down", "up", "ln_2", "proj", "qkv", "ln_1")


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


class HFTensors(ParameterTensors):
    """The parameters of a transformers model in the places of ours."""

    def __init__(self, model: HFModel) -> None:
        """Of the shape only the number of blocks is used."""
        stand_in = GPTShape(n_layer=model.tensors.n_layer, n_head=1, n_embd=1, vocab_size=1, seq_len=1)
        super().__init__(stand_in)
        object.__setattr__(self, "model", model)

    model: HFModel

    @cached_property
    def all(self) -> tuple[ParameterTensor, ...]:
        tensors = self.model.tensors
        places: list[tuple[Layers, int | None]] = [(tensors.before_blocks, None)]
        places += [(tensors.block, block) for block in range(tensors.n_layer)]
        places.append((tensors.after_blocks, None))
        found = [(layer, block, shape) for layers, block in places for layer, shapes in layers for shape in shapes]
        return tuple(
            ParameterTensor(index, layer, block, math.prod(shape), decays=len(shape) > 1)
            for index, (layer, block, shape) in enumerate(found)
        )

    @cached_property
    def groups(self) -> tuple[tuple[ParameterTensor, ...], ...]:
        return tuple(group for group in super().groups if group)

    @cached_property
    def gradient_order(self) -> tuple[tuple[ParameterTensor, ...], ...]:
        by_place: dict[tuple[Layer, int | None], tuple[ParameterTensor, ...]] = {}
        for tensor in self.all:
            place = tensor.layer, tensor.block
            by_place[place] = (tensor, *by_place.get(place, ()))
        places: list[tuple[Layer, int | None]] = [("head", None), ("ln_f", None)]
        places += [(layer, block) for block in reversed(range(self.shape.n_layer)) for layer in _BACKWARD]
        places += [("wpe", None), ("wte", None)]
        return tuple(by_place[place] for place in places if place in by_place)

    @property
    def tied(self) -> bool:
        return self.model.tensors.tied


def estimate_hf_states(model: HFModel, layout: EngineLayout, checkpointing: CheckpointingMode = "none") -> HFStates:
    """Parameters, gradients, optimizer states, buffers and temporaries of DeepSpeed; nothing of the model's own."""
    states = estimate_states_of(HFTensors(model), layout, checkpointing)
    moments = {
        "forward": states.resident + states.forward,
        "backward": states.resident + states.backward,
        "optimizer step": states.resident + states.step,
    }
    begin = states.resident + states.backward_course[0].extra
    return HFStates(MemoryEstimate(moments, states.host_bytes, states.nvme_bytes), begin.total_bytes)
