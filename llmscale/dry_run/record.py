"""One forward and one backward pass of a model on a simulated GPU, allocation by allocation.

Any model takes part that runs its blocks, one after the other, through a given function. `MicroStepTrace` holds the
allocations by segment (embeddings, each block, head, and the same backwards); `llmscale.dry_run.factor` makes formulas
of traces at several shapes.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from llmscale.dry_run.cuda_kernels import cuda_kernels, kernel_workspace
from llmscale.dry_run.tracker import Category, MemoryTracker
from llmscale.model.gpt import BlockCheckpoint

_aten = torch.ops.aten

#: What a storage is, as the formulas call it.
_KINDS = {Category.ACTIVATIONS: "activation", Category.TEMPORARIES: "temporary", Category.PARAMETERS: "cast"}


@dataclass(frozen=True)
class TracedSegment:
    """A segment's allocations and releases."""

    name: str
    """One of llmscale.memory.activations.recorded.SEGMENTS."""
    block: int | None
    """Of the model; None outside of the blocks."""
    events: tuple[tuple[int, bool], ...]
    """(storage, whether it appears), in the order of time."""


@dataclass(frozen=True)
class MicroStepTrace:
    """One pass at one shape; parameters are left out. A parameter's gradient is a temporary until autograd hands it
    over; then that goes, and a `gradient` with a number of its own appears."""

    segments: tuple[TracedSegment, ...]
    sizes: dict[int, int]
    """Storage -> bytes before rounding; of a gradient its elements."""
    kinds: dict[int, str]
    """Storage -> activation, temporary, cast or gradient."""
    first_input: int
    """The storage of what the first block reads."""


def trace_micro_step(
    build: Callable[[BlockCheckpoint], nn.Module],
    loss_of: Callable[[nn.Module], Tensor],
    *,
    n_layer: int,
    dtype: torch.dtype,
    autocast: bool = False,
    checkpoint: BlockCheckpoint | None = None,
    patches: Sequence[Callable[[], AbstractContextManager[object]]] = (),
    used_twice: Collection[str] = (),
) -> MicroStepTrace:
    """Run `build(run_block)`'s model forwards and backwards.

    `run_block(block, x)` is what the model must run each of its `n_layer` blocks through; it applies `checkpoint`.
    `dtype` is the parameters'; `autocast` computes in bf16. `patches` are entered around everything. `used_twice` names
    parameters whose gradients arrive in parts that wait for each other: they count as temporaries.
    """
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(cuda_kernels())
        for patch in patches:
            stack.enter_context(patch())
        recorder = _Recorder(n_layer)
        tracker = stack.enter_context(recorder.tracker)
        model = build(recorder.block_runner(checkpoint))
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        gc.collect()
        recorder.begin(model, used_twice)
        with torch.autocast("cpu", torch.bfloat16, enabled=True) if autocast else nullcontext():
            loss = loss_of(model)
            recorder.mark("end_forward")
        recorder.forward = False
        del parameter
        recorder.mark("head_backward")
        loss.backward()
        trace = recorder.trace()
        del loss, model, tracker
    gc.collect()
    return trace


class _Recorder:
    """Where the pass is, and the tracker that notes what happens there."""

    def __init__(self, n_layer: int) -> None:
        self.tracker = MemoryTracker(classify=self._kind_of, workspace=kernel_workspace, keep_events=True)
        self.forward = True
        self._n_layer = n_layer
        self._recomputing = 0
        self._places: list[tuple[str, int | None]] = []
        self._parameters: set[int] = set()
        self._handed_over: dict[int, list[tuple[int, int]]] = {}
        """Number of an event -> (place, storage) of the gradients that were handed over before it."""
        self._gradient_elements: dict[int, int] = {}
        """Of each such storage."""
        self._first_input = -1

    def begin(self, model: nn.Module, used_twice: Collection[str]) -> None:
        """The model is built: what is allocated from now on counts."""
        self._parameters = {id(parameter.untyped_storage()) for parameter in model.parameters()}
        for name, parameter in model.named_parameters():
            if name not in used_twice:
                parameter.register_post_accumulate_grad_hook(self._hand_over)
        self.tracker.reset_peaks()
        self.mark("embed_forward")

    def mark(self, name: str, block: int | None = None) -> None:
        """A segment begins."""
        self._places.append((name, block))
        self._enter_phase()

    def block_runner(self, checkpoint: BlockCheckpoint | None) -> BlockCheckpoint:
        """Runs a block, and marks where it begins and ends, forwards and backwards."""
        numbers = itertools.count()

        def run(block: nn.Module, x: Tensor, *context: object) -> Tensor:
            index = next(numbers)
            if index == 0:
                self.mark("block_forward", 0)
                self._first_input = self.tracker.number_of(x)
                x.register_hook(lambda _: self.mark("embed_backward"))
            if checkpoint is not None:
                block.register_forward_pre_hook(lambda *_: self._recompute(1))
                block.register_forward_hook(lambda *_: self._recompute(-1))
            y = block(x, *context) if checkpoint is None else checkpoint(block, x, *context)
            y.register_hook(lambda _: self.mark("block_backward", index))
            if index + 1 < self._n_layer:
                self.mark("block_forward", index + 1)
            else:
                self.mark("head_forward")
            return y

        return run

    def trace(self) -> MicroStepTrace:
        """What was recorded so far."""
        sizes = {event.storage: event.tensor_bytes for event in self.tracker.events if event.num_bytes > 0}
        kinds = {storage: _KINDS[self.tracker.category_of[storage]] for storage in sizes}
        for storage, elements in self._gradient_elements.items():
            sizes[_as_gradient(storage)], kinds[_as_gradient(storage)] = elements, "gradient"
        events: list[list[tuple[int, bool]]] = [[] for _ in self._places]
        for position in range(len(self.tracker.events) + 1):
            for place, storage in self._handed_over.get(position, ()):
                events[place] += [(storage, False), (_as_gradient(storage), True)]
            for event in self.tracker.events[position : position + 1]:
                events[int(event.phase)].append((event.storage, event.num_bytes > 0))
        segments = [
            TracedSegment(name, block, tuple(found)) for (name, block), found in zip(self._places, events, strict=True)
        ]
        return MicroStepTrace(tuple(segments), sizes, kinds, self._first_input)

    def _enter_phase(self) -> None:
        category = Category.ACTIVATIONS if self.forward or self._recomputing else Category.TEMPORARIES
        self.tracker.begin_phase(str(len(self._places) - 1), category)

    def _recompute(self, change: int) -> None:
        if not self.forward:
            self._recomputing += change
            self._enter_phase()

    def _kind_of(
        self, tensor: Tensor, operator: torch._ops.OpOverload, arguments: tuple[object, ...]
    ) -> Category | None:
        """Autocast's copies of weights; of what a kernel takes for itself and all the rest the phase decides."""
        source = arguments[0] if operator is _aten._to_copy.default else None
        is_cast = isinstance(source, Tensor) and id(source.untyped_storage()) in self._parameters
        return Category.PARAMETERS if is_cast else None

    def _hand_over(self, parameter: Tensor) -> None:
        """Autograd has completed a gradient: from here on it is DeepSpeed's."""
        assert parameter.grad is not None
        storage = self.tracker.number_of(parameter.grad)
        self._handed_over.setdefault(len(self.tracker.events), []).append((len(self._places) - 1, storage))
        self._gradient_elements[storage] = parameter.grad.numel()


def _as_gradient(storage: int) -> int:
    """The number of a storage once it is a gradient; the others are not negative."""
    return -1 - storage
