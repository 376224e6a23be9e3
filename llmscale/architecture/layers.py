"""The layers that models are made of: what each one owns, computes and moves. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
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


def together(name: str, *layers: Layer) -> Layer:
    """Several modules that are gathered, and get their gradients, as one."""
    parameters = tuple(replace(p, name=f"{layer.name}.{p.name}") for layer in layers for p in layer.parameters)
    return Layer(name, parameters, work=sum_of_work(layers))


def sum_of_work(layers: Iterable[Layer]) -> Work:
    """Of one token through all of them."""
    total = Work()
    for layer in layers:
        total = total.plus(layer.work)
    return total
