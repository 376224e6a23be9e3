"""The order in which the model's modules run and its gradients appear at stage 3. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Literal, NamedTuple

from llmscale.architecture.layers import Layer, ParameterTensor, ParameterTensors

#: fetch: DeepSpeed's hook before a module's forward or backward; release: its hook after it; gradients: those of a
#: layer have just been computed; place: the forward pass comes to the embeddings, the next block, the head or its
#: logits; reduced: the last gradient was handed over.
Action = Literal["fetch", "release", "gradients", "place", "reduced"]


class Event(NamedTuple):
    """A step of a pass."""

    action: Action
    module: int
    """Index of a module; each has its parameters in `Stage3Trace.parameters`. 0 is the model itself."""


@dataclass(frozen=True)
class Pass:
    """Forward or backward."""

    begin: Sequence[Event]
    blocks: Sequence[Sequence[Event]]
    """In the order in which they run; alike but for the numbers of their modules."""
    end: Sequence[Event]
    numbers: range
    """Which block each of `blocks` is."""

    @property
    def events(self) -> Iterator[Event]:
        return chain(self.begin, chain.from_iterable(self.blocks), self.end)

    def count(self, action: Action) -> int:
        """In each block."""
        return sum(event.action == action for event in self.blocks[0])


_MODEL = 0
#: The path of a block within itself.
_WHOLE = ""


class Stage3Trace:
    """One forward and one backward pass, as DeepSpeed's hooks see them."""

    def __init__(self, tensors: ParameterTensors, recomputes: bool, reuse_distance: int) -> None:
        """`recomputes`: every block runs forward once more before its backward pass. `reuse_distance` in elements."""
        self._reuse_distance = reuse_distance
        model = tensors.architecture
        self.parameters: list[tuple[ParameterTensor, ...]] = [()]
        before = [self._add(tensors, None, name) for name in _names(model.before_blocks)]
        after = [self._add(tensors, None, name) for name in _names(model.after_blocks)]
        runs = list(_visits(_names(model.block)))
        backs = list(_visits(_names(model.block)[::-1], "gradients"))
        paths = [path for action, path in runs if action == "fetch"]
        blocks = [{path: self._add(tensors, block, path) for path in paths} for block in range(model.n_layer)]
        again = runs if recomputes else []
        self.forward = _forward(before, [_numbered([("place", _WHOLE), *runs], numbers) for numbers in blocks], after)
        backwards = [_numbered([*again, *backs], numbers) for numbers in reversed(blocks)]
        self.backward = _backward(before[::-1], backwards, after[::-1])
        self.block_of = {tensor.index: tensor.block for tensor in tensors.all if tensor.block is not None}
        """Index of a parameter -> its block, of those that have one."""
        self.block_tensors = len(self.block_of) // model.n_layer
        """Parameters of each block; their indices follow each other."""

    def _add(self, tensors: ParameterTensors, block: int | None, path: str) -> int:
        """The number of a new module."""
        self.parameters.append(tensors.of_layer.get((block, path), ()))
        return len(self.parameters) - 1

    @cached_property
    def order(self) -> list[int]:
        """The module that each fetch is for: DeepSpeed's steps."""
        events = chain(self.forward.events, self.backward.events)
        return [event.module for event in events if event.action == "fetch"]

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
    def uses_before(self) -> list[int]:
        """Step -> place in `queue` of its first use."""
        return list(accumulate((len(self.parameters[module]) for module in self.order), initial=0))

    @cached_property
    def used_soon(self) -> list[tuple[bool, ...]]:
        """Release -> of each of the module's parameters, whether the modules before its next use have fewer elements
        than the reuse distance (__params_to_release)."""
        sizes = (sum(tensor.elements for tensor in self.parameters[module]) for module in self.order)
        before = list(accumulate(sizes, initial=0))

        def is_used_soon(tensor: ParameterTensor, step: int) -> bool:
            uses = self.uses[tensor.index]
            place = bisect_left(uses, step)
            return place < len(uses) and before[uses[place]] - before[step] < self._reuse_distance

        found, step = [], 0
        for action, module in chain(self.forward.events, self.backward.events):
            if action == "fetch":
                step += 1
            elif action == "release":
                found.append(tuple([is_used_soon(tensor, step) for tensor in self.parameters[module]]))
        return found


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


def _forward(before: Sequence[int], blocks: Sequence[Sequence[Event]], after: Sequence[int]) -> Pass:
    begin = [Event("fetch", _MODEL), Event("place", _MODEL), *_run_through(before)]
    *norms, head = after
    end = [Event("place", _MODEL), *_run_through(norms), Event("fetch", head)]
    # What the head gathers is there before its logits are.
    end += [Event("place", _MODEL), Event("release", head), Event("release", _MODEL)]
    return Pass(begin, blocks, end, range(len(blocks)))


def _run_through(modules: Iterable[int]) -> list[Event]:
    actions: tuple[Action, ...] = ("fetch", "release")
    return [Event(action, module) for module in modules for action in actions]


def _backward(before: Sequence[int], blocks: Sequence[Sequence[Event]], after: Sequence[int]) -> Pass:
    """All in the order of the backward pass. The embeddings take no input with a gradient, so DeepSpeed releases them
    only at the end."""
    head: tuple[Action, ...] = ("fetch", "gradients", "release")
    embedding: tuple[Action, ...] = ("fetch", "gradients")
    begin = [Event("fetch", _MODEL), *(Event(action, module) for module in after for action in head)]
    end = [Event(action, module) for module in before for action in embedding]
    end += [Event("reduced", _MODEL), *(Event("release", module) for module in (*before, _MODEL))]
    return Pass(begin, blocks, end, range(len(blocks) - 1, -1, -1))
