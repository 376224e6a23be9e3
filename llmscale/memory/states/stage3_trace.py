"""The order in which the model's modules run and its gradients appear at stage 3. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from llmscale.architecture.layers import Layer
from llmscale.architecture.parameter_list import ParameterTensor, ParameterTensors

#: fetch: DeepSpeed's hook before a module's forward or backward; release: its hook after it; gradients: those of a
#: layer have just been computed; place: the forward pass comes to the embeddings, the next block or the head; reduced:
#: the last gradient was handed over.
Action = Literal["fetch", "release", "gradients", "place", "reduced"]


class Event(NamedTuple):
    """A step of a pass."""

    action: Action
    module: int
    """Index of a module; each has its parameters in `Stage3Trace.parameters`. 0 is the model itself."""


_MODEL = 0
#: The path of a block within itself.
_WHOLE = ""


class Stage3Trace:
    """One forward and one backward pass, as DeepSpeed's hooks see them."""

    def __init__(self, tensors: ParameterTensors, recomputes: bool) -> None:
        """`recomputes`: every block runs forward once more before its backward pass."""
        model = tensors.architecture
        self.parameters: list[tuple[ParameterTensor, ...]] = [()]
        before = [self._add(tensors, None, name) for name in _names(model.before_blocks)]
        after = [self._add(tensors, None, name) for name in _names(model.after_blocks)]
        runs = list(_visits(_names(model.block)))
        backs = list(_visits(_names(model.block)[::-1], "gradients"))
        paths = [path for action, path in runs if action == "fetch"]
        blocks = [{path: self._add(tensors, block, path) for path in paths} for block in range(model.n_layer)]
        self.forward: Sequence[Event] = list(_forward(before, [_numbered(runs, numbers) for numbers in blocks], after))
        again = runs if recomputes else []
        backwards = [_numbered([*again, *backs], numbers) for numbers in reversed(blocks)]
        self.backward: Sequence[Event] = list(_backward(before[::-1], backwards, after[::-1]))

    def _add(self, tensors: ParameterTensors, block: int | None, path: str) -> int:
        """The number of a new module."""
        self.parameters.append(tensors.of_layer.get((block, path), ()))
        return len(self.parameters) - 1

    @cached_property
    def order(self) -> list[int]:
        """The module that each fetch is for: DeepSpeed's steps."""
        return [event.module for event in (*self.forward, *self.backward) if event.action == "fetch"]

    @cached_property
    def queue(self) -> list[tuple[ParameterTensor, int]]:
        """Every use of a parameter with its step, in the order of time."""
        return [(tensor, step) for step, module in enumerate(self.order) for tensor in self.parameters[module]]

    @cached_property
    def uses(self) -> dict[int, list[int]]:
        """Index of a parameter -> steps."""
        found: dict[int, list[int]] = {}
        for tensor, step in self.queue:
            found.setdefault(tensor.index, []).append(step)
        return found

    @cached_property
    def elements_before(self) -> list[int]:
        """Step -> elements of all modules before it."""
        sizes = (sum(tensor.elements for tensor in self.parameters[module]) for module in self.order)
        return list(accumulate(sizes, initial=0))


def _names(layers: Iterable[Layer]) -> list[str]:
    return [layer.name for layer in layers if layer.name]


def _visits(names: Sequence[str], between: Literal["gradients"] | None = None) -> Iterator[tuple[Action, str]]:
    """A block with everything in it, by path. A module is entered before what it contains and left behind it; `between`
    happens in those that contain nothing."""
    entered = [_WHOLE]
    yield "fetch", _WHOLE
    for name in names:
        while not f"{name}.".startswith(entered[-1] and f"{entered[-1]}."):
            yield "release", entered.pop()
        parts = name.split(".")
        for depth in range(len(entered), len(parts)):
            entered.append(".".join(parts[:depth]))
            yield "fetch", entered[-1]
        yield "fetch", name
        if between:
            yield between, name
        yield "release", name
    for path in reversed(entered):
        yield "release", path


def _numbered(visits: Iterable[tuple[Action, str]], numbers: dict[str, int]) -> list[Event]:
    return [Event(action, numbers[path]) for action, path in visits]


def _forward(before: Iterable[int], blocks: Iterable[list[Event]], after: Iterable[int]) -> Iterator[Event]:
    yield Event("fetch", _MODEL)
    yield Event("place", _MODEL)
    for module in before:
        yield Event("fetch", module)
        yield Event("release", module)
    for block in blocks:
        yield Event("place", _MODEL)
        yield from block
    yield Event("place", _MODEL)
    for module in after:
        yield Event("fetch", module)
        yield Event("release", module)
    yield Event("release", _MODEL)


def _backward(before: Sequence[int], blocks: Iterable[list[Event]], after: Iterable[int]) -> Iterator[Event]:
    """All in the order of the backward pass. The embeddings take no input with a gradient, so DeepSpeed releases them
    only at the end."""
    yield Event("fetch", _MODEL)
    for module in after:
        yield Event("fetch", module)
        yield Event("gradients", module)
        yield Event("release", module)
    for block in blocks:
        yield from block
    for module in before:
        yield Event("fetch", module)
        yield Event("gradients", module)
    yield Event("reduced", _MODEL)
    for module in (*before, _MODEL):
        yield Event("release", module)
