"""The layers that models are made of: what each one owns, computes and moves. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

T = TypeVar("T")

#: What optimizers tell apart: rows that are looked up (and the output head, which shares or mirrors them), the matrices
#: of linear layers, and what has one dimension: biases and norms.
ParameterKind = Literal["embedding", "matrix", "vector"]


@dataclass(frozen=True)
class Parameter:
    """One tensor of a layer."""

    name: str
    """Within its layer, as in a state dict."""
    shape: tuple[int, ...]
    kind: ParameterKind
    row_blocks: tuple[int, ...] = ()
    """Rows of each of the matrices that lie in it one below the other, such as those of q, k and v; empty: one."""

    @property
    def matrix_rows(self) -> tuple[int, ...]:
        """Rows of each of its matrices."""
        return self.row_blocks or self.shape[:1]

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Work:
    """What a forward pass does for one token."""

    matmul_flops: int = 0
    """Of matrix products with parameters: a multiplication and an addition per element of the matrix."""
    attention_flops: int = 0
    """Of products between positions, per position of the context; the causal half is not taken off."""
    elementwise: int = 0
    """Elements made outside of matrix products, which take as long as memory needs, not arithmetic."""

    def plus(self, other: Work, times: int = 1) -> Work:
        """The sum with `times` the other."""
        return Work(
            self.matmul_flops + times * other.matmul_flops,
            self.attention_flops + times * other.attention_flops,
            self.elementwise + times * other.elementwise,
        )

    def flops(self, seq_len: int) -> int:
        """Matrix products and attention over a context of `seq_len` positions."""
        return self.matmul_flops + self.attention_flops * seq_len


@dataclass(frozen=True)
class Layer:
    """One step of a forward pass: a module, or a function without one."""

    name: str = ""
    """Its module's path within the block, or within the model: `attn.qkv`. Empty for a function."""
    parameters: tuple[Parameter, ...] = ()
    """In the order in which the module makes them."""
    tied_to: str = ""
    """The layer whose parameters it uses instead of its own."""
    work: Work = Work()

    def in_gradient_order(self, own: tuple[T, ...]) -> tuple[T, ...]:
        """`own`, one of each parameter, as autograd completes their gradients: a linear layer's bias before its weight.
        (Stage 3's own linear layer has the weight first.)"""
        return own[::-1] if self.work.matmul_flops else own


def embedding(name: str, rows: int, width: int) -> Layer:
    """A look-up of one row per token."""
    return Layer(name, (Parameter("weight", (rows, width), "embedding"),))


def layer_norm(name: str, width: int, *, bias: bool = True, affine: bool = True) -> Layer:
    """Over the last dimension; `affine`: with a weight."""
    shapes = {"weight": affine, "bias": affine and bias}
    parameters = tuple(Parameter(own, (width,), "vector") for own, is_there in shapes.items() if is_there)
    return Layer(name, parameters, work=Work(elementwise=width))


def rms_norm(name: str, width: int) -> Layer:
    """Over the last dimension, without a mean and a bias."""
    return layer_norm(name, width, bias=False)


def linear(name: str, inputs: int, outputs: int, *, bias: bool, row_blocks: tuple[int, ...] = ()) -> Layer:
    """[..., inputs] -> [..., outputs]; `row_blocks`: the outputs of several linear layers that are computed as one."""
    weight = Parameter("weight", (outputs, inputs), "matrix", row_blocks)
    parameters = (weight, Parameter("bias", (outputs,), "vector"))
    return Layer(name, parameters if bias else parameters[:1], work=Work(matmul_flops=2 * inputs * outputs))


def attention(n_head: int, head_dim: int) -> Layer:
    """softmax(q k^T) v of every query head in a fused kernel: two products over the context."""
    return Layer(work=Work(attention_flops=2 * 2 * n_head * head_dim))


def elementwise(width: int) -> Layer:
    """An activation, a gate, or an addition to the residual stream: anything that makes `width` elements per token."""
    return Layer(work=Work(elementwise=width))


def head(name: str, rows: int, width: int, *, tied_to: str = "") -> Layer:
    """Logits over the vocabulary, and their loss; `tied_to` names the embedding whose rows it shares."""
    parameters = () if tied_to else (Parameter("weight", (rows, width), "embedding"),)
    return Layer(name, parameters, tied_to, Work(matmul_flops=2 * rows * width, elementwise=rows))


def combined_layer(name: str, *layers: Layer) -> Layer:
    """Several modules that are gathered, and get their gradients, as one."""
    parameters = tuple(replace(p, name=f"{layer.name}.{p.name}") for layer in layers for p in layer.parameters)
    return Layer(name, parameters, work=sum_of_work(layers))


def sum_of_work(layers: Iterable[Layer]) -> Work:
    """Of one token through all of them."""
    total = Work()
    for layer in layers:
        total = total.plus(layer.work)
    return total


@dataclass(frozen=True)
class Architecture:
    """A decoder of equal blocks. Its parameters, FLOPs and the order of everything derive from this alone
    (llmscale.architecture.layers has the parameters one by one); what autograd keeps is recorded
    (llmscale.memory.activations)."""

    before_blocks: tuple[Layer, ...]
    """In the order of the forward pass; the token embedding first."""
    block: tuple[Layer, ...]
    """Of one block, in the order of the forward pass."""
    n_layer: int
    after_blocks: tuple[Layer, ...]
    """The output head last."""
    parameter_order: tuple[str, ...] = ()
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
    def block_in_parameter_order(self) -> tuple[Layer, ...]:
        """A block's layers in the order in which its constructor makes them."""
        by_name = {layer.name: layer for layer in self.block}
        return tuple(by_name[name] for name in self.parameter_order) or self.block


def _elements(layers: Iterable[Layer]) -> int:
    return sum(parameter.elements for layer in layers for parameter in layer.parameters)


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
        places += [(block, layer) for block in range(model.n_layer) for layer in model.block_in_parameter_order]
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
