"""The parameters of llmscale.model.gpt one by one, as numbers of elements. No torch.

DeepSpeed's buffers depend on the order of the tensors, on the largest one and on how each is rounded, so totals are not
enough. Looping over tensors (about 1,200 for GPT-3 175B) keeps it exact and instant.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from llmscale.architecture.shape import GPTShape

Layer = Literal["wte", "wpe", "ln_1", "qkv", "proj", "ln_2", "up", "down", "ln_f", "head"]


@dataclass(frozen=True)
class ParameterTensor:
    """One parameter."""

    index: int
    """Place in the model's order."""
    layer: Layer
    block: int | None
    """None outside of the blocks."""
    elements: int
    decays: bool
    """A matrix or an embedding, in the group with weight decay; else a bias or a norm."""


@dataclass(frozen=True)
class ParameterTensors:
    """Every parameter of a shape."""

    shape: GPTShape

    @cached_property
    def all(self) -> tuple[ParameterTensor, ...]:
        """In the order in which the model makes them."""
        found: list[tuple[Layer, int | None, int, bool]] = []
        h, bias = self.shape.n_embd, self.shape.bias
        matrices: dict[Layer, tuple[int, int]] = {
            "qkv": (h, 3 * h),
            "proj": (h, h),
            "up": (h, 4 * h),
            "down": (4 * h, h),
        }

        def add_norm(layer: Layer, block: int | None) -> None:
            found.append((layer, block, h, False))
            if bias:
                found.append((layer, block, h, False))

        def add_linear(layer: Layer, block: int) -> None:
            inputs, outputs = matrices[layer]
            found.append((layer, block, inputs * outputs, True))
            if bias:
                found.append((layer, block, outputs, False))

        found.append(("wte", None, self.shape.padded_vocab_size * h, True))
        found.append(("wpe", None, self.shape.seq_len * h, True))
        for block in range(self.shape.n_layer):
            add_norm("ln_1", block)
            add_linear("qkv", block)
            add_linear("proj", block)
            add_norm("ln_2", block)
            add_linear("up", block)
            add_linear("down", block)
        add_norm("ln_f", None)
        return tuple(
            ParameterTensor(index, layer, block, elements, decays)
            for index, (layer, block, elements, decays) in enumerate(found)
        )

    @cached_property
    def groups(self) -> tuple[tuple[ParameterTensor, ...], ...]:
        """The optimizer's groups (`llmscale.engine.optimizer`): with weight decay, without."""
        decay = tuple(tensor for tensor in self.all if tensor.decays)
        no_decay = tuple(tensor for tensor in self.all if not tensor.decays)
        return (decay, no_decay)

    @cached_property
    def gradient_order(self) -> tuple[tuple[ParameterTensor, ...], ...]:
        """In the order in which the backward pass completes their gradients, those of one layer at once and a linear
        layer's bias before its weight: the tied table last. (Stage 3's own linear layer has the weight first.)"""
        by_place: dict[tuple[Layer, int | None], tuple[ParameterTensor, ...]] = {}
        for tensor in self.all:
            place = tensor.layer, tensor.block
            before = by_place.get(place, ())
            is_bias_of_linear = bool(before) and before[0].decays
            by_place[place] = (tensor, *before) if is_bias_of_linear else (*before, tensor)
        in_block: tuple[Layer, ...] = ("down", "up", "ln_2", "proj", "qkv", "ln_1")
        blocks = [by_place[layer, block] for block in reversed(range(self.shape.n_layer)) for layer in in_block]
        return (by_place["ln_f", None], *blocks, by_place["wpe", None], by_place["wte", None])

    @cached_property
    def table(self) -> ParameterTensor:
        """The token table."""
        return self.all[0]

    @property
    def tied(self) -> bool:
        """Whether the token table is the output head too: always in our model."""
        return True
