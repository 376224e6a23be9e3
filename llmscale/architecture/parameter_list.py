"""The parameters of a model one by one. No torch.

DeepSpeed's buffers depend on the order of the tensors, on the largest one and on how each is rounded, so totals are not
enough. Looping over tensors (about 1,200 for GPT-3 175B) keeps it exact and instant.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from llmscale.architecture.description import Architecture
from llmscale.architecture.layers import Layer, Parameter, ParameterKind


@dataclass(frozen=True)
class ParameterTensor:
    """One parameter."""

    index: int
    """Place in the model's order."""
    layer: str
    """Its layer's name within the block, or within the model."""
    block: int | None
    """None outside of the blocks."""
    parameter: Parameter
    elements: int
    kind: ParameterKind

    @property
    def name(self) -> str:
        """In a state dict of llmscale.model."""
        prefix = "" if self.block is None else f"blocks.{self.block}."
        return f"{prefix}{self.layer}.{self.parameter.name}"


@dataclass(frozen=True)
class ParameterTensors:
    """Every parameter of a model."""

    architecture: Architecture

    @cached_property
    def all(self) -> tuple[ParameterTensor, ...]:
        """In the order in which the model makes them."""
        model = self.architecture
        places: list[tuple[int | None, Layer]] = [(None, layer) for layer in model.before_blocks]
        places += [(block, layer) for block in range(model.n_layer) for layer in model.block_as_made]
        places += [(None, layer) for layer in model.after_blocks]
        found = [(layer.name, block, parameter) for block, layer in places for parameter in layer.parameters]
        return tuple(
            ParameterTensor(index, layer, block, parameter, parameter.elements, parameter.kind)
            for index, (layer, block, parameter) in enumerate(found)
        )

    @property
    def kinds(self) -> dict[str, ParameterKind]:
        """By name in a state dict."""
        return {tensor.name: tensor.kind for tensor in self.all}

    @cached_property
    def of_layer(self) -> dict[tuple[int | None, str], tuple[ParameterTensor, ...]]:
        """(block, layer) -> its parameters in the model's order, a tied head's too."""
        found: dict[tuple[int | None, str], tuple[ParameterTensor, ...]] = {}
        for tensor in self.all:
            place = tensor.block, tensor.layer
            found[place] = (*found.get(place, ()), tensor)
        head = self.architecture.head
        if head.tied_to:
            found[None, head.name] = found[None, head.tied_to]
        return found

    @cached_property
    def gradient_order(self) -> tuple[tuple[ParameterTensor, ...], ...]:
        """In the order in which the backward pass completes their gradients, those of one layer at once: the token
        embedding last."""
        layers = [(block, layer) for block, layer in self.architecture.all_layers() if layer.parameters]
        return tuple(layer.in_gradient_order(self.of_layer[block, layer.name]) for block, layer in reversed(layers))

    @property
    def table(self) -> ParameterTensor:
        """The token embedding."""
        return self.all[0]

    @property
    def tied(self) -> bool:
        """Whether the token embedding is the output head too."""
        return self.architecture.is_tied
