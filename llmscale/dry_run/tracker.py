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
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

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


class Category(Enum):
    """Category of memory; the values are the fields of `Breakdown` without `_bytes`."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    BUCKETS = "buckets"
    TEMPORARIES = "temporaries"


@dataclass(frozen=True)
class Event:
    """Allocation (`num_bytes` > 0) or release (< 0) of a storage. Numbers of storages count from 0 and are unique."""

    storage: int
    num_bytes: int
    """Bytes rounded up to blocks of the allocator."""
    phase: str
    tensor_bytes: int = 0
    """Bytes before rounding, of an allocation."""


@dataclass(frozen=True)
class Peak:
    """Moment of a phase with the most live bytes."""

    breakdown: Breakdown = field(default_factory=Breakdown)
    operator: str = ""
    """Operator whose result caused the peak."""


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
        keep_events: bool = False,
        number_elsewhere: float = 0.0,
    ) -> None:
        """`device`: device whose storages count; others only add to `elsewhere_bytes`.

        `number_elsewhere`: what `.item()` returns of a floating-point tensor on another device.
        """
        super().__init__()
        self._device, self._number_elsewhere = device, number_elsewhere
        self._elsewhere: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self.events: list[Event] = []
        """Allocations and releases in order, if `keep_events`."""
        self.category_of: dict[int, Category] = {}
        """Latest category of each storage by number, if `keep_events`; kept after its release."""
        self._classify, self._workspace, self._keep_events = classify, workspace, keep_events
        self._live: dict[int, _Live] = {}
        self._bytes: Counter[Category] = Counter()
        self._total = 0
        self._numbers = count()
        self._phase, self._category = "", Category.TEMPORARIES
        self._peaks: dict[str, Peak] = {}
        self._peak_totals: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: see a graph when it runs, not while it is compiled."""
        return True

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of a live tensor's storage in `events`. Raises KeyError if it is unknown."""
        return self._live[id(tensor.untyped_storage())].number

    @property
    def elsewhere_bytes(self) -> int:
        """Return the live bytes on other devices than `device`, not rounded."""
        return sum(num_bytes for num_bytes, _ in self._elsewhere.values())

    @property
    def live(self) -> Breakdown:
        """Return the live bytes by category."""
        return Breakdown(**{f"{category.value}_bytes": self._bytes[category] for category in Category})

    @property
    def peaks(self) -> Mapping[str, Peak]:
        """Return the peak of each phase since the last reset."""
        return self._peaks

    def reset_peaks(self) -> None:
        """Forget peaks and events; live storages stay."""
        self._peaks, self._peak_totals = {}, Counter()
        self.events.clear()

    @contextmanager
    def phase(self, name: str, category: Category) -> Iterator[None]:
        """Run a block as phase `name`, with new storages in `category`. Live storages count for the phase's peak."""
        before = self._phase, self._category
        self.begin_phase(name, category)
        self._record_peak("")
        try:
            yield
        finally:
            self.begin_phase(*before)

    def begin_phase(self, name: str, category: Category) -> None:
        """Begin a phase that lasts until the next one."""
        self._phase, self._category = name, category

    def assign(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Move these tensors' storages to `category`. Storages from before the tracker begin to count."""
        for tensor in tensors:
            live = self._find(tensor.untyped_storage())
            if live is None:
                self._add(tensor, category, "")
                continue
            self._bytes[live.category] -= live.num_bytes
            self._bytes[category] += live.num_bytes
            live.category = category
            if self._keep_events:
                self.category_of[live.number] = category

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
            self._use_workspace(self._workspace(func, args), str(func))
        return result

    def _observe(self, tensor: Tensor, func: torch._ops.OpOverload, args: tuple[object, ...]) -> None:
        storage = tensor.untyped_storage()
        if self._device is not None and tensor.device != self._device:
            self._observe_elsewhere(storage)
            return
        live = self._find(storage)
        if live is None:
            category = self._classify(tensor, func, args) if self._classify is not None else None
            self._add(tensor, category or self._category, str(func))
        elif live.num_bytes != (resized := allocated_bytes(storage.nbytes(), 1)):
            self._release(id(storage))
            if resized:
                self._add(tensor, live.category, str(func))

    def _observe_elsewhere(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._elsewhere:
            reference = weakref.ref(storage, lambda _: self._elsewhere.pop(key))
            self._elsewhere[key] = (storage.nbytes(), reference)

    def _find(self, storage: torch.UntypedStorage) -> _Live | None:
        return self._live.get(id(storage))

    def _add(self, tensor: Tensor, category: Category, operator: str) -> None:
        storage = tensor.untyped_storage()
        num_bytes = allocated_bytes(storage.nbytes(), 1)
        if num_bytes == 0:
            return
        key, number = id(storage), next(self._numbers)
        # weakref.finalize would also run thousands of callbacks when the process ends.
        reference = weakref.ref(storage, lambda _: self._release(key))
        self._live[key] = _Live(number, num_bytes, category, reference)
        self._change(number, num_bytes, category, storage.nbytes())
        self._record_peak(operator)

    def _release(self, key: int) -> None:
        live = self._live.pop(key)
        self._change(live.number, -live.num_bytes, live.category)

    def _use_workspace(self, sizes: Sequence[int], operator: str) -> None:
        """Count memory that a kernel allocates and frees while it runs."""
        numbered = [(next(self._numbers), size, allocated_bytes(size, 1)) for size in sizes if size]
        for number, size, num_bytes in numbered:
            self._change(number, num_bytes, Category.TEMPORARIES, size)
        self._record_peak(operator)
        for number, _, num_bytes in numbered:
            self._change(number, -num_bytes, Category.TEMPORARIES)

    def _change(self, number: int, num_bytes: int, category: Category, tensor_bytes: int = 0) -> None:
        self._bytes[category] += num_bytes
        self._total += num_bytes
        if self._keep_events:
            self.events.append(Event(number, num_bytes, self._phase, tensor_bytes))
            self.category_of[number] = category

    def _record_peak(self, operator: str) -> None:
        if self._total > self._peak_totals[self._phase] or self._phase not in self._peaks:
            self._peak_totals[self._phase] = self._total
            self._peaks[self._phase] = Peak(self.live, operator)
