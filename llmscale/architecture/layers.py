"""A model as a sequence of layers: their parameters, FLOPs and orders, from which everything else derives. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal, TypeVar

T = TypeVar("T")

#: Standard deviation of every weight matrix and embedding (Radford et al. 2019, and OpenAI's code).
INIT_STD = 0.02

#: Names of a linear layer's adapters, as in transformers' peft: [adapters x rank, inputs] and [outputs, rank].
ADAPTERS = ("lora_A", "lora_B")
#: Patterns of the names of all other parameters, which are frozen beside adapters.
BESIDE_ADAPTERS = ("*.weight", "*.bias", "*.experts.*")
#: Kinds that optimizers distinguish: token and position tables, the output head and routers; matrices of linear layers
#: and experts; biases and norms.
ParameterKind = Literal["embedding", "matrix", "vector"]


def is_adapter(name: str) -> bool:
    """Return whether a parameter of that name belongs to an adapter."""
    return name.endswith(ADAPTERS)


@dataclass(frozen=True)
class Parameter:
    """One tensor of a layer."""

    name: str
    """Name within the layer, as in a state dict."""
    shape: tuple[int, ...]
    kind: ParameterKind
    row_blocks: tuple[int, ...] = ()
    """Rows of each matrix stacked in this tensor, such as q, k and v; empty for a single matrix."""

    @property
    def matrix_rows(self) -> tuple[int, ...]:
        """Rows of each matrix in this tensor."""
        return self.row_blocks or self.shape[:1]

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_stacked(self) -> bool:
        """True for the matrices of experts, which ranks may divide."""
        return len(self.shape) > 2

    @property
    def columns(self) -> int:
        """Columns of each matrix in this tensor."""
        return self.shape[-1]


@dataclass(frozen=True)
class Work:
    """Cost of a forward pass for one token."""

    matmul_flops: int = 0
    """FLOPs of products with parameters: a multiplication and an addition per element of the matrix."""
    attention_flops: int = 0
    """FLOPs of products between positions, per position of the context, the masked half included."""
    elementwise: int = 0
    """Elements produced outside matrix products, whose time is bound by memory."""

    def plus(self, other: Work, times: int = 1) -> Work:
        """Return this work plus `times` the other."""
        return Work(
            self.matmul_flops + times * other.matmul_flops,
            self.attention_flops + times * other.attention_flops,
            self.elementwise + times * other.elementwise,
        )

    def flops(self, seq_len: int) -> int:
        """Return the FLOPs of matrix products and attention over a context of `seq_len` positions."""
        return self.matmul_flops + self.attention_flops * seq_len


@dataclass(frozen=True)
class Layer:
    """One step of a forward pass: a module, or a function without one."""

    name: str = ""
    """Path of the module within the block, or within the model: `attn.qkv`. Empty for a function."""
    parameters: tuple[Parameter, ...] = ()
    """Parameters in the order in which the module creates them."""
    tied_to: str = ""
    """Name of the layer whose parameters this one uses."""
    work: Work = Work()
    idle: int = 0
    """Elements of the parameters that one token does not use: those of the experts that it is not sent to."""

    def with_part(self, parts: int) -> Layer:
        """Return the layer with one of `parts` equal parts of its experts, if it has any."""
        parameters = tuple(
            replace(
                one,
                shape=(one.shape[0] // parts, *one.shape[1:]),
                row_blocks=one.row_blocks[: len(one.row_blocks) // parts],
            )
            if one.is_stacked
            else one
            for one in self.parameters
        )
        return replace(self, parameters=parameters)

    def in_gradient_order(self, own: tuple[T, ...]) -> tuple[tuple[T, ...], ...]:
        """Sort `own`, one item per parameter, as autograd completes the gradients, those of one moment together.

        A linear layer completes its bias with its weight, stacked experts one product after the other. Stage 3's own
        linear layer completes the weight first.
        """
        if all(parameter.kind == "matrix" for parameter in self.parameters):
            return tuple((item,) for item in reversed(own))
        return (own[::-1] if self.work.matmul_flops else own,)


def embedding(name: str, rows: int, width: int) -> Layer:
    """Describe a look-up of one row per token."""
    return Layer(name, (Parameter("weight", (rows, width), "embedding"),))


def layer_norm(name: str, width: int, *, bias: bool = True) -> Layer:
    """Describe a layer norm over the last dimension."""
    names = ("weight", "bias") if bias else ("weight",)
    return Layer(name, tuple(Parameter(own, (width,), "vector") for own in names), work=Work(elementwise=width))


def rms_norm(name: str, width: int) -> Layer:
    """Describe an RMS norm over the last dimension: no mean, no bias."""
    return layer_norm(name, width, bias=False)


def linear(
    name: str,
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    row_blocks: tuple[int, ...] = (),
    adapter: tuple[int, tuple[int, ...]] = (0, ()),
) -> Layer:
    """Describe [..., inputs] -> [..., outputs]; `row_blocks`: outputs of each linear layer in a stacked one; `adapter`:
    rank and outputs of its adapters."""
    parameters = [Parameter("weight", (outputs, inputs), "matrix", row_blocks)]
    if bias:
        parameters.append(Parameter("bias", (outputs,), "vector"))
    rank, rows = adapter
    stacked = rank * len(rows)
    if rows:
        parameters.append(Parameter(ADAPTERS[0], (stacked, inputs), "matrix", (rank,) * len(rows)))
        parameters.append(Parameter(ADAPTERS[1], (outputs, rank), "matrix", rows))
    added = 2 * (stacked * inputs + rank * sum(rows))
    return Layer(name, tuple(parameters), work=Work(matmul_flops=2 * inputs * outputs + added))


def attention(n_head: int, head_dim: int) -> Layer:
    """Describe softmax(q k^T) v of every query head in a fused kernel: two products over the context."""
    return Layer(work=Work(attention_flops=2 * 2 * n_head * head_dim))


def experts(name: str, inputs: int, width: int, count: int, chosen: int, *, gated: bool) -> Layer:
    """Describe `count` MLPs stacked in two parameters, of which each token uses `chosen`; `gated`: SwiGLU and alike."""
    hidden = (width, width) if gated else (width,)
    parameters = (
        Parameter("up", (count, sum(hidden), inputs), "matrix", hidden * count),
        Parameter("down", (count, inputs, width), "matrix", (inputs,) * count),
    )
    one = sum(parameter.elements for parameter in parameters) // count
    work = Work(matmul_flops=2 * chosen * one, elementwise=chosen * (sum(hidden) + inputs))
    return Layer(name, parameters, work=work, idle=(count - chosen) * one)


def elementwise(width: int) -> Layer:
    """Describe an activation, a gate or a residual sum: `width` elements per token."""
    return Layer(work=Work(elementwise=width))


def head(name: str, rows: int, width: int, *, tied_to: str = "") -> Layer:
    """Describe the logits over the vocabulary and their loss; `tied_to` names the embedding whose rows they share."""
    parameters = () if tied_to else (Parameter("weight", (rows, width), "embedding"),)
    return Layer(name, parameters, tied_to, Work(matmul_flops=2 * rows * width, elementwise=rows))


def combined_layer(name: str, *layers: Layer) -> Layer:
    """Combine modules that are gathered, and get their gradients, at the same time."""
    parameters = tuple(replace(p, name=f"{layer.name}.{p.name}") for layer in layers for p in layer.parameters)
    return Layer(name, parameters, work=sum_of_work(layers), idle=sum(layer.idle for layer in layers))


def sum_of_work(layers: Iterable[Layer]) -> Work:
    """Return the work of one token through all layers."""
    total = Work()
    for layer in layers:
        total = total.plus(layer.work)
    return total


@dataclass(frozen=True)
class Architecture:
    """A decoder of blocks of one kind or two, from which its parameters, FLOPs and orders derive.

    llmscale.memory.layers has the bytes that each keeps for the backward pass.
    """

    before_blocks: tuple[Layer, ...]
    """Layers before the blocks in the order of the forward pass, the token embedding first."""
    block: tuple[Layer, ...]
    """Layers of one block in the order of the forward pass; with experts, of one that has them."""
    n_layer: int
    after_blocks: tuple[Layer, ...]
    """Layers after the blocks, the output head last."""
    parameter_order: tuple[str, ...] = ()
    """Layers of blocks of all kinds in the order of their construction, where it differs: optimizers use it, and flat
    buffers."""
    sliding_window: int = 0
    """Positions that attention sees, its own included; 0 for all earlier ones."""
    global_layers: int = 0
    """Blocks in which attention sees all earlier positions, in spite of the window."""
    other_block: tuple[Layer, ...] = ()
    """Layers of the blocks without experts in a model with experts."""
    other_blocks: frozenset[int] = frozenset()
    """Indices of the blocks that are `other_block`."""

    def layers_of(self, block: int) -> tuple[Layer, ...]:
        """Return the layers of a block in the order of the forward pass."""
        return self.other_block if block in self.other_blocks else self.block

    @property
    def head(self) -> Layer:
        return self.after_blocks[-1]

    @property
    def has_adapters(self) -> bool:
        """True when all that is trained is adapters."""
        return any(is_adapter(one.name) for layer in (*self.block, *self.other_block) for one in layer.parameters)

    @property
    def token_embedding(self) -> Parameter:
        return self.before_blocks[0].parameters[0]

    @cached_property
    def block_parameters(self) -> int:
        """Number of elements of one block's parameters, of the larger kind."""
        return max(_elements(self.block), _elements(self.other_block))

    @cached_property
    def _counted(self) -> tuple[tuple[tuple[Layer, ...], int], ...]:
        """Layers with the number of times they occur."""
        others = len(self.other_blocks)
        blocks = ((self.block, self.n_layer - others), (self.other_block, others))
        return (self.before_blocks, 1), *blocks, (self.after_blocks, 1)

    @cached_property
    def num_parameters(self) -> int:
        """Number of elements of all parameters, a tied head counted once."""
        return sum(times * _elements(layers) for layers, times in self._counted)

    @cached_property
    def active_parameters(self) -> int:
        """Number of elements of the parameters that one token uses: all without experts."""
        return self.num_parameters - sum(times * layer.idle for layers, times in self._counted for layer in layers)

    @cached_property
    def elements_by_kind(self) -> dict[ParameterKind, int]:
        """Number of elements by kind, a tied head counted once."""
        elements: dict[ParameterKind, int] = {}
        for layers, times in self._counted:
            for parameter in (parameter for layer in layers for parameter in layer.parameters):
                elements[parameter.kind] = elements.get(parameter.kind, 0) + times * parameter.elements
        return elements

    @cached_property
    def blocks_work(self) -> Work:
        """Work of all blocks for one token of a forward pass."""
        others = len(self.other_blocks)
        return Work().plus(sum_of_work(self.block), self.n_layer - others).plus(sum_of_work(self.other_block), others)

    @cached_property
    def work(self) -> Work:
        """Work of the entire model for one token of a forward pass."""
        return self.blocks_work.plus(sum_of_work(self.before_blocks)).plus(sum_of_work(self.after_blocks))

    def flops_per_token(self, seq_len: int) -> int:
        """Return training FLOPs per token, forward and backward: 6 N + 12 L h s, three times the forward pass.

        N counts the parameters of matrix products (a tied embedding once, as the output head), biases and norms.
        12 L h s is attention's share with the masked half included (PaLM, Chowdhery et al. 2022, appendix B). h is the
        width of all query heads, s the sequence length or, in layers with one, a shorter sliding window. Weights beside
        adapters have no gradients: 4 N, and 6 for each weight of the adapters.
        """
        vectors = self.elements_by_kind.get("vector", 0)
        window = min(seq_len, self.sliding_window or seq_len)
        positions = self.global_layers * seq_len + (self.n_layer - self.global_layers) * window
        attention = sum_of_work(self.block).attention_flops * positions
        if self.has_adapters:
            frozen = self.work.matmul_flops + 2 * vectors - 2 * self._adapter_elements
        else:
            frozen = 0
        return 3 * (self.work.matmul_flops + attention + 2 * vectors) - frozen

    @property
    def _adapter_elements(self) -> int:
        return sum(
            times * parameter.elements
            for layers, times in self._counted
            for layer in layers
            for parameter in layer.parameters
            if is_adapter(parameter.name)
        )

    def all_layers(self) -> Iterator[tuple[int | None, Layer]]:
        """Yield (block, layer) in the order of the forward pass; block is None outside the blocks."""
        yield from ((None, layer) for layer in self.before_blocks)
        yield from ((block, layer) for block in range(self.n_layer) for layer in self.layers_of(block))
        yield from ((None, layer) for layer in self.after_blocks)

    def in_parameter_order(self, block: int) -> tuple[Layer, ...]:
        """Return the layers of a block in the order of their construction."""
        return self._ordered(self.layers_of(block))

    def with_divided_experts(self, parts: int) -> Architecture:
        """Return the model of a rank with one of `parts` equal parts of each block's experts."""
        if parts == 1:
            return self
        block, other = (tuple(layer.with_part(parts) for layer in layers) for layers in (self.block, self.other_block))
        return replace(self, block=block, other_block=other)

    def with_combined_blocks(self) -> Architecture:
        """Return the model with each block as a single module."""
        block, other = (
            (combined_layer("", *self._ordered(layers)),) if layers else () for layers in (self.block, self.other_block)
        )
        return replace(self, block=block, other_block=other, parameter_order=())

    def _ordered(self, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
        by_name = {layer.name: layer for layer in layers}
        return tuple(by_name[name] for name in self.parameter_order if name in by_name) or layers


def _elements(layers: Iterable[Layer]) -> int:
    return sum(parameter.elements for layer in layers for parameter in layer.parameters)


@dataclass(frozen=True)
class ParameterTensor:
    """One parameter of a model."""

    index: int
    """Position in the model's order."""
    layer: str
    """Name of the layer within the block, or within the model."""
    block: int | None
    """Index of the block; None outside the blocks."""
    parameter: Parameter
    elements: int
    kind: ParameterKind

    @property
    def name(self) -> str:
        """Name in a state dict of llmscale.model."""
        prefix = "" if self.block is None else f"blocks.{self.block}."
        return f"{prefix}{self.layer}.{self.parameter.name}"


@dataclass(frozen=True)
class ParameterTensors:
    """Every parameter of a model, one by one.

    DeepSpeed's buffers depend on the order of the tensors, on the largest one and on the rounding of each. Looping over
    tensors (about 1,200 for GPT-3 175B) is exact and instant.
    """

    architecture: Architecture
    frozen: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained."""

    @cached_property
    def trainable(self) -> tuple[ParameterTensor, ...]:
        """Parameters that are trained, in the order of `all`."""
        if self.frozen:
            return tuple(tensor for tensor in self.all if not self.is_frozen(tensor.name))
        return self.all

    def is_frozen(self, name: str) -> bool:
        """Return whether a parameter is not trained."""
        return any(fnmatchcase(name, pattern) for pattern in self.frozen)

    @cached_property
    def frozen_tensors(self) -> tuple[ParameterTensor, ...]:
        """Parameters that are not trained, in the order of `all`."""
        if self.frozen:
            return tuple(tensor for tensor in self.all if self.is_frozen(tensor.name))
        return ()

    @property
    def num_trainable(self) -> int:
        """Number of elements that are trained."""
        return self.architecture.num_parameters - sum(tensor.elements for tensor in self.frozen_tensors)

    @property
    def trainable_by_kind(self) -> dict[ParameterKind, int]:
        """Number of elements that are trained, by kind."""
        elements = dict(self.architecture.elements_by_kind)
        for tensor in self.frozen_tensors:
            elements[tensor.kind] -= tensor.elements
        return elements

    @cached_property
    def all(self) -> tuple[ParameterTensor, ...]:
        """Parameters in the order in which the model creates them."""
        model = self.architecture
        places: list[tuple[int | None, Layer]] = [(None, layer) for layer in model.before_blocks]
        places += [(block, layer) for block in range(model.n_layer) for layer in model.in_parameter_order(block)]
        places += [(None, layer) for layer in model.after_blocks]
        parameters = [(layer.name, block, parameter) for block, layer in places for parameter in layer.parameters]
        return tuple(
            ParameterTensor(index, layer, block, parameter, parameter.elements, parameter.kind)
            for index, (layer, block, parameter) in enumerate(parameters)
        )

    @property
    def kinds(self) -> dict[str, ParameterKind]:
        """Kinds by name in a state dict."""
        return {tensor.name: tensor.kind for tensor in self.all}

    @cached_property
    def of_layer(self) -> dict[tuple[int | None, str], tuple[ParameterTensor, ...]]:
        """(block, layer) -> the layer's parameters in the model's order, a tied head's included."""
        of_layer: dict[tuple[int | None, str], tuple[ParameterTensor, ...]] = {}
        for tensor in self.all:
            place = tensor.block, tensor.layer
            of_layer[place] = (*of_layer.get(place, ()), tensor)
        head = self.architecture.head
        if head.tied_to:
            of_layer[None, head.name] = of_layer[None, head.tied_to]
        return of_layer

    @cached_property
    def gradient_order(self) -> tuple[tuple[ParameterTensor, ...], ...]:
        """Parameters by moment at which the backward pass completes their gradients, the token embedding last."""
        layers = [(block, layer) for block, layer in self.architecture.all_layers() if layer.parameters]
        return tuple(
            together
            for block, layer in reversed(layers)
            for together in layer.in_gradient_order(self.of_layer[block, layer.name])
        )

    @property
    def table(self) -> ParameterTensor:
        """The token embedding."""
        return self.all[0]

    @property
    def tied(self) -> bool:
        """True when the token embedding is also the output head."""
        return bool(self.architecture.head.tied_to)
