"""A model as a sequence of layers, and the totals that follow from it. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from llmscale.architecture.layers import Layer, Parameter, ParameterKind, Work, sum_of_work


@dataclass(frozen=True)
class Architecture:
    """A decoder of equal blocks. Its parameters, FLOPs and the order of everything derive from this alone
    (llmscale.architecture.parameter_list has the parameters one by one); what autograd keeps is recorded
    (llmscale.memory.activations)."""

    before_blocks: tuple[Layer, ...]
    """In the order of the forward pass; the token embedding first."""
    block: tuple[Layer, ...]
    """Of one block, in the order of the forward pass."""
    n_layer: int
    after_blocks: tuple[Layer, ...]
    """The output head last."""
    made_order: tuple[str, ...] = ()
    """Layers of a block in the order in which its constructor makes them, where that is another one: optimizers and
    flat buffers have the parameters in this order."""
    sliding_window: int = 0
    """Positions that attention sees, its own included; 0: all before it."""

    @property
    def head(self) -> Layer:
        return self.after_blocks[-1]

    @property
    def is_tied(self) -> bool:
        """Whether the output head is the token embedding."""
        return bool(self.head.tied_to)

    @property
    def token_embedding(self) -> Parameter:
        return self.before_blocks[0].parameters[0]

    @cached_property
    def block_parameters(self) -> int:
        """Elements of one block's parameters."""
        return _elements(self.block)

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters, those of a tied head once."""
        return _elements(self.before_blocks) + self.n_layer * self.block_parameters + _elements(self.after_blocks)

    @cached_property
    def elements_by_kind(self) -> dict[ParameterKind, int]:
        """Elements of the parameters of each kind, those of a tied head once."""
        found: dict[ParameterKind, int] = {}
        for layers, times in ((self.before_blocks, 1), (self.block, self.n_layer), (self.after_blocks, 1)):
            for parameter in (parameter for layer in layers for parameter in layer.parameters):
                found[parameter.kind] = found.get(parameter.kind, 0) + times * parameter.elements
        return found

    @property
    def head_gradients(self) -> int:
        """Elements that have gradients when the backward pass comes to the last block. Of a tied embedding the part
        from the look-up is still to come."""
        tied = self.token_embedding.elements if self.is_tied else 0
        return tied + _elements(self.after_blocks)

    @cached_property
    def blocks_work(self) -> Work:
        """Of all blocks, for one token of a forward pass."""
        return Work().plus(sum_of_work(self.block), self.n_layer)

    @cached_property
    def work(self) -> Work:
        """The same of the whole model."""
        return self.blocks_work.plus(sum_of_work(self.before_blocks)).plus(sum_of_work(self.after_blocks))

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs per token, forward and backward: 6 N + 12 L h s.

        Three forward passes. N counts the parameters that take part in a matrix product, a tied embedding once as the
        output head and not for its look-up, and biases and norms like everything else; 12 L h s is attention's share
        without the causal half (PaLM, Chowdhery et al. 2022, appendix B), h the width of all query heads and s the
        sliding window where that is shorter.
        """
        vectors = self.elements_by_kind.get("vector", 0)
        return 3 * (self.work.flops(self.context(seq_len)) + 2 * vectors)

    def context(self, seq_len: int) -> int:
        """Positions that the last token of a sequence attends to."""
        return min(seq_len, self.sliding_window) if self.sliding_window else seq_len

    def all_layers(self) -> Iterator[tuple[int | None, Layer]]:
        """(block, layer) in the order of the forward pass; None outside of the blocks."""
        yield from ((None, layer) for layer in self.before_blocks)
        yield from ((block, layer) for block in range(self.n_layer) for layer in self.block)
        yield from ((None, layer) for layer in self.after_blocks)

    @property
    def block_as_made(self) -> tuple[Layer, ...]:
        """A block's layers in the order in which its constructor makes them."""
        by_name = {layer.name: layer for layer in self.block}
        return tuple(by_name[name] for name in self.made_order) or self.block


def _elements(layers: Iterable[Layer]) -> int:
    return sum(parameter.elements for layer in layers for parameter in layer.parameters)
