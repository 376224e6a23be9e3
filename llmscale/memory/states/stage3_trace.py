"""The order in which the model's modules run and its gradients appear at stage 3. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llmscale.architecture.parameter_list import Layer, ParameterTensor, ParameterTensors

#: fetch: DeepSpeed's hook before a module's forward or backward; release: its hook after it; gradients: those of a
#: layer have just been computed; place: the forward pass comes to the embeddings, the next block or the head; reduced:
#: the last gradient was handed over.
Action = Literal["fetch", "release", "gradients", "place", "reduced"]


@dataclass(frozen=True)
class Event:
    action: Action
    module: int
    """Index of a module; each has its parameters in `Stage3Trace.parameters`. 0 is the model itself."""


@dataclass(frozen=True)
class _Modules:
    """Modules of one block, or of what surrounds the blocks."""

    names: tuple[str, ...]
    first: int

    def __getitem__(self, name: str) -> int:
        return self.first + self.names.index(name)


_OUTER = ("model", "wte", "wpe", "ln_f", "head")
_BLOCK = ("block", "ln_1", "attn", "qkv", "proj", "ln_2", "mlp", "up", "down")
#: What a module of a block contains, in the order of the forward pass.
_CHILDREN = {"block": ("ln_1", "attn", "ln_2", "mlp"), "attn": ("qkv", "proj"), "mlp": ("up", "down")}


class Stage3Trace:
    """One forward and one backward pass, as DeepSpeed's hooks see them."""

    def __init__(self, tensors: ParameterTensors, recomputes: bool) -> None:
        """`recomputes`: every block runs forward once more before its backward pass."""
        self._n_layer = tensors.shape.n_layer
        self._recomputes = recomputes
        self._outer = _Modules(_OUTER, 0)
        self._blocks = [_Modules(_BLOCK, len(_OUTER) + index * len(_BLOCK)) for index in range(self._n_layer)]
        self.parameters: list[tuple[ParameterTensor, ...]] = [()] * (len(_OUTER) + self._n_layer * len(_BLOCK))
        for tensor in tensors.all:
            module = self._module_of(tensor.layer, tensor.block)
            self.parameters[module] = (*self.parameters[module], tensor)
        if tensors.tied:
            self.parameters[self._outer["head"]] = (tensors.table,)

    def _module_of(self, layer: Layer, block: int | None) -> int:
        return self._outer[layer] if block is None else self._blocks[block][layer]

    def forward(self) -> Iterator[Event]:
        outer = self._outer
        yield Event("fetch", outer["model"])
        yield Event("place", 0)
        for name in ("wte", "wpe"):
            yield Event("fetch", outer[name])
            yield Event("release", outer[name])
        for block in self._blocks:
            yield Event("place", 0)
            yield from _run_forward(block, "block")
        yield Event("place", 0)
        for name in ("ln_f", "head"):
            yield Event("fetch", outer[name])
            yield Event("release", outer[name])
        yield Event("release", outer["model"])

    def backward(self) -> Iterator[Event]:
        """The embeddings take no input with a gradient, so DeepSpeed releases them only at the end."""
        outer = self._outer
        yield Event("fetch", outer["model"])
        yield Event("fetch", outer["head"])
        yield Event("gradients", outer["head"])
        yield Event("release", outer["head"])
        yield Event("fetch", outer["ln_f"])
        yield Event("gradients", outer["ln_f"])
        yield Event("release", outer["ln_f"])
        for block in reversed(self._blocks):
            if self._recomputes:
                yield from _run_forward(block, "block")
            yield from _run_backward(block, "block")
        for name in ("wpe", "wte"):
            yield Event("fetch", outer[name])
            yield Event("gradients", outer[name])
        yield Event("reduced", outer["model"])
        for name in ("wpe", "wte", "model"):
            yield Event("release", outer[name])


def _run_forward(block: _Modules, name: str) -> Iterator[Event]:
    yield Event("fetch", block[name])
    for child in _CHILDREN.get(name, ()):
        yield from _run_forward(block, child)
    yield Event("release", block[name])


def _run_backward(block: _Modules, name: str) -> Iterator[Event]:
    yield Event("fetch", block[name])
    for child in reversed(_CHILDREN.get(name, ())):
        yield from _run_backward(block, child)
    if name not in _CHILDREN:
        yield Event("gradients", block[name])
    yield Event("release", block[name])
