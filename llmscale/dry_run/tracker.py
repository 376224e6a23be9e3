"""Follows every live tensor of a simulated GPU: bytes by category, and their peak.

The tensors are fake (`FakeTensorMode`, device `cpu`): they have shapes and storages, and no memory. A storage counts
from the operator that made it until its last tensor is released, rounded up to the blocks of CUDA's caching allocator,
so that the sums are those of `torch.cuda.memory_allocated`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmscale.memory.breakdown import Breakdown, allocated_bytes

_aten = torch.ops.aten

#: From an operator and its arguments to the sizes in bytes that its kernel allocates and frees while it runs.
Workspace = Callable[[torch._ops.OpOverload, tuple[object, ...]], Sequence[int]]
#: From a storage's first tensor, its operator and arguments to its category; None if the phase decides.
Classify = Callable[[Tensor, torch._ops.OpOverload, tuple[object, ...]], "Category | None"]


#: Storage of an event without one.
_NO_STORAGE = 0


class Category(Enum):
    """Category of memory; the values are the fields of `Breakdown` without `_bytes`."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    BUCKETS = "buckets"
    TEMPORARIES = "temporaries"


class Event(NamedTuple):
    """Allocation (`num_bytes` > 0) or release (< 0) of a storage, or with 0 bytes the beginning of a phase."""

    storage: int
    """Number of the storage, unique."""
    num_bytes: int
    """Bytes rounded up to blocks of the allocator."""
    phase: str


@dataclass
class _Live:
    number: int
    num_bytes: int
    category: Category
    reference: weakref.ref[torch.UntypedStorage]


class MemoryTracker(TorchDispatchMode):
    """Tracker of memory by phase and category. Enter it inside of `FakeTensorMode`.

    A new storage gets the category of the current phase, unless `classify` returns another one, and can be moved to
    another category later. Fake tensors have no values, so `.item()` returns 0 and `torch.equal` True.
    """

    def __init__(
        self,
        *,
        device: torch.device | None = None,
        classify: Classify | None = None,
        workspace: Workspace | None = None,
        number_elsewhere: float = 0.0,
    ) -> None:
        """`device`: device whose storages count; others only add to `elsewhere_bytes`.

        `number_elsewhere`: what `.item()` returns of a floating-point tensor on another device.
        """
        super().__init__()
        self._device = device
        self._number_elsewhere = number_elsewhere
        self._elsewhere: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._classify = classify
        self._workspace = workspace
        self._live: dict[int, _Live] = {}
        self._bytes: Counter[Category] = Counter()
        self._numbers = count(1)
        self._phase = ""
        self._category = Category.TEMPORARIES
        self._category_of = {_NO_STORAGE: self._category}
        """Latest category of each storage; kept after its release."""
        self._events: list[Event] = []
        self._before: Counter[Category] = Counter()
        """Live bytes before the first event."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: see a graph when it runs, not while it is compiled."""
        return True

    @property
    def elsewhere_bytes(self) -> int:
        """Return the live bytes on other devices than `device`, not rounded."""
        return sum(num_bytes for num_bytes, _ in self._elsewhere.values())

    @property
    def live(self) -> Breakdown:
        """Return the live bytes by category."""
        return _breakdown(self._bytes)

    def restart(self) -> None:
        """Forget events; live storages stay."""
        self._events.clear()
        self._before = self._bytes.copy()

    def peaks(self, *without: Category) -> dict[str, Breakdown]:
        """Return each phase's moment with the most live bytes since the restart, of all categories but `without`.

        A storage counts in its latest category all the time.
        """
        live = Counter({category: self._before[category] for category in Category if category not in without})
        total = sum(live.values())
        totals = dict[str, int]()
        peaks = dict[str, Breakdown]()
        for event in self._events:
            category = self._category_of[event.storage]
            if category not in without:
                live[category] += event.num_bytes
                total += event.num_bytes
            if total > totals.get(event.phase, -1):
                totals[event.phase] = total
                peaks[event.phase] = _breakdown(live)
        return peaks

    @contextmanager
    def phase(self, name: str, category: Category) -> Iterator[None]:
        """Run a block as phase `name`, with new storages in `category`. Live storages count for the phase's peak."""
        before = self._phase, self._category
        self._phase = name
        self._category = category
        self._events.append(Event(_NO_STORAGE, 0, name))
        try:
            yield
        finally:
            self._phase, self._category = before

    def assign(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Move these tensors' storages to `category`. Storages from before the tracker begin to count."""
        for tensor in tensors:
            live = self._find(tensor.untyped_storage())
            if live is None:
                self._add(tensor, category)
                continue
            self._bytes[live.category] -= live.num_bytes
            self._bytes[category] += live.num_bytes
            live.category = self._category_of[live.number] = category

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is _aten._local_scalar_dense.default:
            assert isinstance(args[0], Tensor)
            if args[0].dtype is torch.bool:
                return False
            if args[0].is_floating_point():
                return 0.0 if args[0].device == self._device else self._number_elsewhere
            return 0
        if func is _aten.equal.default:
            return True
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._observe(leaf, func, args)
        tensors = (tensor for tensor in args if isinstance(tensor, Tensor))
        if self._workspace is not None and all(self._device in (None, tensor.device) for tensor in tensors):
            self._use_workspace(self._workspace(func, args))
        return result

    def _observe(self, tensor: Tensor, func: torch._ops.OpOverload, args: tuple[object, ...]) -> None:
        storage = tensor.untyped_storage()
        if self._device is not None and tensor.device != self._device:
            self._observe_elsewhere(storage)
            return
        live = self._find(storage)
        if live is None:
            if self._classify is not None:
                category = self._classify(tensor, func, args)
            else:
                category = None
            self._add(tensor, category or self._category)
        elif live.num_bytes != (resized := allocated_bytes(storage.nbytes(), 1)):
            self._release(id(storage))
            if resized:
                self._add(tensor, live.category)

    def _observe_elsewhere(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._elsewhere:
            reference = weakref.ref(storage, lambda _: self._elsewhere.pop(key))
            self._elsewhere[key] = (storage.nbytes(), reference)

    def _find(self, storage: torch.UntypedStorage) -> _Live | None:
        return self._live.get(id(storage))

    def _add(self, tensor: Tensor, category: Category) -> None:
        storage = tensor.untyped_storage()
        num_bytes = allocated_bytes(storage.nbytes(), 1)
        if num_bytes == 0:
            return
        key = id(storage)
        number = next(self._numbers)
        # weakref.finalize would also run thousands of callbacks when the process ends.
        reference = weakref.ref(storage, lambda _: self._release(key))
        self._live[key] = _Live(number, num_bytes, category, reference)
        self._change(number, num_bytes, category)

    def _release(self, key: int) -> None:
        live = self._live.pop(key)
        self._change(live.number, -live.num_bytes, live.category)

    def _use_workspace(self, sizes: Sequence[int]) -> None:
        """Count memory that a kernel allocates and frees while it runs."""
        num_bytes = sum(allocated_bytes(size, 1) for size in sizes)
        number = next(self._numbers)
        self._change(number, num_bytes, Category.TEMPORARIES)
        self._change(number, -num_bytes, Category.TEMPORARIES)

    def _change(self, number: int, num_bytes: int, category: Category) -> None:
        self._bytes[category] += num_bytes
        self._category_of[number] = category
        self._events.append(Event(number, num_bytes, self._phase))


def _breakdown(live: Mapping[Category, int]) -> Breakdown:
    return Breakdown(**{f"{category.value}_bytes": num_bytes for category, num_bytes in live.items()})
