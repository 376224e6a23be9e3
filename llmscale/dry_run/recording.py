"""A forward and a backward pass on a simulated GPU, allocation by allocation, and formulas of it over several shapes.

Any model can be traced that runs its blocks one after the other through a given function. `MicroStepTrace` holds the
allocations by segment (embeddings, each block, head, and the same backwards). `factor_traces` turns traces at several
shapes into formulas: coefficient x product of symbols for every allocation.
"""

from __future__ import annotations

import gc
import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import gcd, prod

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from llmscale.dry_run.cuda_kernels import cuda_kernels, kernel_workspace
from llmscale.dry_run.tracker import Category, MemoryTracker
from llmscale.memory.activations.recorded import SEGMENTS, RecordedSegment
from llmscale.memory.activations.symbols import VOCABULARY_SYMBOLS
from llmscale.model.gpt import BlockCheckpoint, BlockOutput

_aten = torch.ops.aten

#: Kind of a storage in the formulas.
_KINDS = {Category.ACTIVATIONS: "activation", Category.TEMPORARIES: "temporary", Category.PARAMETERS: "cast"}


@dataclass(frozen=True)
class TracedSegment:
    """Allocations and releases of a segment."""

    name: str
    """Name from llmscale.memory.activations.recorded.SEGMENTS."""
    block: int | None
    """Number of the block; None outside the blocks."""
    events: tuple[tuple[int, bool], ...]
    """Events (storage, whether it is allocated) in time order."""


@dataclass(frozen=True)
class MicroStepTrace:
    """A pass at one shape, without parameters.

    A parameter's gradient is a temporary until autograd completes it; then it is replaced by a `gradient` with another
    number.
    """

    segments: tuple[TracedSegment, ...]
    sizes: dict[int, int]
    """Bytes by storage before rounding; elements for a gradient."""
    kinds: dict[int, str]
    """Kind by storage: activation, temporary, cast or gradient."""
    first_input: int
    """Storage of the first block's input."""


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
    """Trace a forward and a backward pass of the model `build(run_block)`.

    The model must run each of its `n_layer` blocks by `run_block(block, x)`, which applies `checkpoint`. `dtype` is
    that of the parameters; `autocast` computes in bf16. `patches` are entered around everything. `used_twice` names
    parameters whose gradients arrive in parts, which count as temporaries.
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
    """Current segment of the pass, and the tracker of its allocations."""

    def __init__(self, n_layer: int) -> None:
        self.tracker = MemoryTracker(classify=self._kind_of, workspace=kernel_workspace, keep_events=True)
        self.forward = True
        self._n_layer = n_layer
        self._recomputing = 0
        self._places: list[tuple[str, int | None]] = []
        self._parameters: set[int] = set()
        self._handed_over: dict[int, list[tuple[int, int]]] = {}
        """(Segment, storage) of the gradients completed before an event, by number of the event."""
        self._gradient_elements: dict[int, int] = {}
        """Elements of each such storage."""
        self._first_input = -1
        self._rows: set[int] = set()
        """Storages of the blocks' rows of `GPT.routing`, which are counted beside the recording."""

    def begin(self, model: nn.Module, used_twice: Collection[str]) -> None:
        """Start counting after the model is built."""
        self._parameters = {id(parameter.untyped_storage()) for parameter in model.parameters()}
        for name, parameter in model.named_parameters():
            if name not in used_twice:
                parameter.register_post_accumulate_grad_hook(self._hand_over)
        self.tracker.reset_peaks()
        self.mark("embed_forward")

    def mark(self, name: str, block: int | None = None) -> None:
        """Begin a segment."""
        self._places.append((name, block))
        self._enter_phase()

    def block_runner(self, checkpoint: BlockCheckpoint | None) -> BlockCheckpoint:
        """Return a function that runs a block and marks its begin and end, forwards and backwards."""
        numbers = itertools.count()

        def run(block: nn.Module, x: Tensor, *context: object) -> BlockOutput:
            index = next(numbers)
            if index == 0:
                self.mark("block_forward", 0)
                self._first_input = self.tracker.number_of(x)
                x.register_hook(lambda _: self.mark("embed_backward"))
            if checkpoint is not None:
                block.register_forward_pre_hook(lambda *_: self._recompute(1))
                block.register_forward_hook(lambda *_: self._recompute(-1))
            y = block(x, *context) if checkpoint is None else checkpoint(block, x, *context)
            hidden = y[0] if isinstance(y, tuple) else y
            if isinstance(y, tuple):
                self._rows.add(self.tracker.number_of(y[1]))
            hidden.register_hook(lambda _: self.mark("block_backward", index))
            if index + 1 < self._n_layer:
                self.mark("block_forward", index + 1)
            else:
                self.mark("head_forward")
            return y

        return run

    def trace(self) -> MicroStepTrace:
        """Return the recorded pass."""
        sizes = {event.storage: event.tensor_bytes for event in self.tracker.events if event.num_bytes > 0}
        sizes = {storage: size for storage, size in sizes.items() if storage not in self._rows}
        kinds = {storage: _KINDS[self.tracker.category_of[storage]] for storage in sizes}
        for storage, elements in self._gradient_elements.items():
            sizes[_as_gradient(storage)], kinds[_as_gradient(storage)] = elements, "gradient"
        events: list[list[tuple[int, bool]]] = [[] for _ in self._places]
        for position in range(len(self.tracker.events) + 1):
            for place, storage in self._handed_over.get(position, ()):
                events[place] += [(storage, False), (_as_gradient(storage), True)]
            for event in self.tracker.events[position : position + 1]:
                if event.storage not in self._rows:
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
        """Return PARAMETERS for autocast's copies of weights; None for all else, for which the phase decides."""
        source = arguments[0] if operator is _aten._to_copy.default else None
        is_cast = isinstance(source, Tensor) and id(source.untyped_storage()) in self._parameters
        return Category.PARAMETERS if is_cast else None

    def _hand_over(self, parameter: Tensor) -> None:
        """Record that autograd has completed a gradient, which then belongs to DeepSpeed."""
        assert parameter.grad is not None
        storage = self.tracker.number_of(parameter.grad)
        self._handed_over.setdefault(len(self.tracker.events), []).append((len(self._places) - 1, storage))
        self._gradient_elements[storage] = parameter.grad.numel()


def _as_gradient(storage: int) -> int:
    """Return the number of a storage as a gradient, which is negative."""
    return -1 - storage


#: Most factors of a product: b t h^2 would have five with h = a d, and no tensor is that large.
_MOST_FACTORS = 4


def factor_traces(traces: Sequence[MicroStepTrace], symbols: Sequence[Mapping[str, int]]) -> dict[str, RecordedSegment]:
    """Return the recording that fits all traces, with equal blocks recorded once.

    `symbols`: each trace's shape by symbol. Raises ValueError if the sequence of allocations differs between shapes
    (another branch) or blocks, if a size is not a product of the symbols, or if two products have the same sizes.
    """
    traces = [_release_inputs_with_blocks(_release_shared_after_blocks(trace)) for trace in traces]
    first = traces[0]
    for other in traces[1:]:
        if _signatures(first) != _signatures(other):
            raise ValueError("the sequence of allocations differs between the shapes: they take different branches")
    formulas = _formulas(traces, symbols)
    blocks = 1 + max(segment.block for segment in first.segments if segment.block is not None)
    found: dict[str, RecordedSegment] = {}
    for index, segment in enumerate(first.segments):
        recorded = _record_segment(first, index, formulas, blocks)
        if segment.block not in (None, 0) and segment.name in found and found[segment.name] != recorded:
            raise ValueError(f"block {segment.block} allocates other tensors than the one before in {segment.name}")
        found[segment.name] = recorded
    return {name: found[name] for name in SEGMENTS}


def pack_branches(branches: Mapping[str, Mapping[str, RecordedSegment]]) -> dict[str, object]:
    """Return recordings by branch as values for JSON, equal segments stored once.

    Each segment is a JSON text, so that a reader parses only those it needs (RecordedTable in
    llmscale.memory.activations.recorded).
    """
    formulas: dict[str, int] = {}
    segments: dict[str, int] = {}
    stored: list[str] = []

    def index_of(recorded: RecordedSegment) -> int:
        parts = (recorded.net,), (recorded.per_block,), recorded.moments, recorded.handovers
        digest = repr([[sorted(one.items()) for one in part] for part in parts])
        if digest not in segments:
            segments[digest] = len(stored)
            (net,), (per_block,), *lists = [[_pairs(one, formulas) for one in part] for part in parts]
            stored.append(json.dumps([net, per_block, *lists], separators=(",", ":")))
        return segments[digest]

    found = {
        key: {name: index_of(branches[key][name]) for name in SEGMENTS if name in branches[key]}
        for key in sorted(branches)
    }
    return {"formulas": list(formulas), "segments": stored, "branches": found}


def _pairs(counts: Mapping[str, int], formulas: dict[str, int]) -> list[int]:
    """Return [formula, count, ...] with formulas by number."""
    return [
        number for text, count in sorted(counts.items()) for number in (formulas.setdefault(text, len(formulas)), count)
    ]


def _release_shared_after_blocks(trace: MicroStepTrace) -> MicroStepTrace:
    """Move releases of tensors shared by all blocks (angles, a mask) from the first block's backward pass to after it.

    That pass comes last, and is never the peak of more than one block.
    """
    made_before = {storage for storage, appears in _events_of(trace, "embed_forward") if appears}
    made_before.discard(trace.first_input)
    segments = list(trace.segments)
    for place, segment in enumerate(segments[:-1]):
        if segment.name == "block_backward" and segment.block == 0:
            shared = [event for event in segment.events if event[0] in made_before and not event[1]]
            rest = tuple(event for event in segment.events if event not in shared)
            following = segments[place + 1]
            segments[place] = replace(segment, events=rest)
            segments[place + 1] = replace(following, events=(*shared, *following.events))
    return replace(trace, segments=tuple(segments))


def _release_inputs_with_blocks(trace: MicroStepTrace) -> MicroStepTrace:
    """Move the release of a block's unsaved input from the begin of the next block to the end of this one."""
    segments = list(trace.segments)
    for place, segment in enumerate(segments[1:], 1):
        if segments[place - 1].name == "block_forward":
            first = next((i for i, (_, appears) in enumerate(segment.events) if appears), len(segment.events))
            before = segments[place - 1]
            segments[place - 1] = replace(before, events=(*before.events, *segment.events[:first]))
            segments[place] = replace(segment, events=segment.events[first:])
    return replace(trace, segments=tuple(segments))


def _events_of(trace: MicroStepTrace, name: str) -> Sequence[tuple[int, bool]]:
    return [event for segment in trace.segments if segment.name == name for event in segment.events]


def _formulas(traces: Sequence[MicroStepTrace], symbols: Sequence[Mapping[str, int]]) -> dict[int, str]:
    """Return kind and formula by storage of the first trace."""
    products = _Products(tuple(tuple(shape.items()) for shape in symbols))
    order = [[storage for s in trace.segments for storage, appears in s.events if appears] for trace in traces]
    first, found = traces[0], {}
    in_loss = False
    places = {storage: s.name for s in first.segments for storage, appears in s.events if appears}
    for numbers in zip(*order, strict=True):
        storage = numbers[0]
        product = products.find([trace.sizes[number] for trace, number in zip(traces, numbers, strict=True)])
        kind = first.kinds[storage]
        if places[storage] == "head_forward" and kind == "activation":
            in_loss |= not VOCABULARY_SYMBOLS.isdisjoint(product.split("*"))
            kind = "logits" if in_loss else kind
        found[storage] = f"{kind} {product}"
    return found


class _Products:
    """Finder of the coefficient and the product of symbols for a tensor's sizes at several shapes."""

    def __init__(self, symbols: tuple[tuple[tuple[str, int], ...], ...]) -> None:
        """Prepare all products. Raises ValueError if two of them have the same ratios at all shapes."""
        self._symbols = [dict(shape) for shape in symbols]
        self._names_of = _products_by_ratios(symbols)

    def find(self, sizes: Sequence[int]) -> str:
        """Return a formula like `2*b*t*a*d`. Raises ValueError if no product fits."""
        names = self._names_of.get(_ratios(sizes))
        if names is None:
            raise ValueError(f"no product of {', '.join(self._symbols[0])} has the sizes {list(sizes)}")
        coefficient = Fraction(sizes[0], prod(self._symbols[0][name] for name in names))
        return "*".join([str(coefficient), *names])


@cache
def _products_by_ratios(
    symbols: tuple[tuple[tuple[str, int], ...], ...],
) -> dict[tuple[tuple[int, int], ...], tuple[str, ...]]:
    """Return products of symbols by the ratios of their values. Raises ValueError if two have the same ratios."""
    values = _distinct(symbols)
    found: dict[tuple[tuple[int, int], ...], tuple[str, ...]] = {}
    for size in range(_MOST_FACTORS + 1):
        for names in itertools.combinations_with_replacement(values, size):
            key = _ratios([prod(values[name][place] for name in names) for place in range(len(symbols))])
            if key in found:
                raise ValueError(f"the shapes do not tell {found[key]} from {names}")
            found[key] = names
    return found


def _distinct(symbols: Sequence[Sequence[tuple[str, int]]]) -> dict[str, list[int]]:
    """Return symbols with their values, without constants and multiples of an earlier symbol at every shape."""
    found: dict[str, list[int]] = {}
    seen = {_ratios([1] * len(symbols))}
    for places in zip(*symbols, strict=True):
        values = [value for _, value in places]
        if _ratios(values) not in seen:
            seen.add(_ratios(values))
            found[places[0][0]] = values
    return found


def _ratios(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the ratios to the first size, in lowest terms."""
    divisors = [gcd(size, sizes[0]) for size in sizes]
    return tuple((size // divisor, sizes[0] // divisor) for size, divisor in zip(sizes, divisors, strict=True))


def _signatures(trace: MicroStepTrace) -> list[tuple[str, int | None, list[tuple[int, bool, str]]]]:
    """Return the properties that must agree between shapes, with storages numbered by first allocation.

    Releases between two allocations are sorted: autocast's cache is released in the order of a hash table of addresses.
    """
    numbers: dict[int, int] = {}
    found = []
    for segment in trace.segments:
        signature: list[tuple[int, bool, str]] = []
        for appears, run in itertools.groupby(segment.events, key=lambda event: event[1]):
            places = [(numbers.setdefault(storage, len(numbers)), trace.kinds[storage]) for storage, _ in run]
            signature += [(number, appears, kind) for number, kind in (places if appears else sorted(places))]
        found.append((segment.name, segment.block, signature))
    return found


def _record_segment(trace: MicroStepTrace, index: int, formulas: Mapping[int, str], blocks: int) -> RecordedSegment:
    segment = trace.segments[index]
    moments, handovers, net = _moments(segment, formulas)
    per_block = Counter[str]()
    if segment.block is None:
        per_block = _released_per_block(trace, index, formulas, blocks)
    if per_block:
        if moments:
            raise ValueError(f"{segment.name} allocates after it released something of every block")
        for formula, count in per_block.items():
            net[formula] -= blocks * count
    return RecordedSegment(_nonzero(net), _nonzero(per_block), tuple(_fullest(moments)), tuple(handovers))


def _moments(
    segment: TracedSegment, formulas: Mapping[int, str]
) -> tuple[list[dict[str, int]], list[dict[str, int]], Counter[str]]:
    """Return the growth since the segment's begin: at each peak, after each layer's gradients, and at its end."""
    moments: list[dict[str, int]] = []
    handovers: list[dict[str, int]] = []
    live = Counter[str]()
    grew = False
    for place, (storage, appears) in enumerate(segment.events):
        if grew and not appears:
            moments.append(_nonzero(live))
        is_gradient = formulas[storage].startswith("gradient")
        grew = appears and not is_gradient
        live[formulas[storage]] += 1 if appears else -1
        if is_gradient and not _is_followed_by_gradient(segment.events[place + 1 :], formulas):
            handovers.append(_nonzero(live))
    if grew:
        moments.append(_nonzero(live))
    return moments, handovers, live


def _is_followed_by_gradient(events: Sequence[tuple[int, bool]], formulas: Mapping[int, str]) -> bool:
    """Return whether another gradient of the layer is completed before the next allocation."""
    made = next((storage for storage, appears in events if appears), None)
    return made is not None and formulas[made].startswith("gradient")


def _released_per_block(trace: MicroStepTrace, index: int, formulas: Mapping[int, str], blocks: int) -> Counter[str]:
    """Return negative counts per block of tensors that a segment releases for every block, like autocast's cache."""
    made_by = {
        storage: place for place, segment in enumerate(trace.segments) for storage, appears in segment.events if appears
    }
    by_block: dict[str, Counter[int | None]] = {}
    for storage, appears in trace.segments[index].events:
        origin = trace.segments[made_by[storage]]
        if not appears and made_by[storage] != index and origin.name == "block_forward":
            by_block.setdefault(formulas[storage], Counter())[origin.block] += 1
    return Counter(
        {
            formula: -min(counts[block] for block in range(blocks))
            for formula, counts in by_block.items()
            if len(counts) == blocks
        }
    )


def _fullest(moments: Sequence[Mapping[str, int]]) -> list[Mapping[str, int]]:
    """Return the moments that can be a peak: no later one holds as much of everything, no earlier one with the same
    gradients."""
    products = [_by_product(moment) for moment in moments]
    kept: list[int] = []
    for place, product in enumerate(products):
        later = any(_is_below(product, other, same_gradients=False) for other in products[place + 1 :])
        earlier = any(_is_below(product, products[other], same_gradients=True) for other in kept)
        if not later and not earlier:
            kept.append(place)
    return [moments[place] for place in kept]


def _is_below(small: Counter[tuple[bool, str]], large: Counter[tuple[bool, str]], *, same_gradients: bool) -> bool:
    for key in small.keys() | large.keys():
        is_gradient = key[0]
        if small[key] != large[key] if is_gradient and same_gradients else not is_gradient and small[key] > large[key]:
            return False
    return True


def _by_product(moment: Mapping[str, int]) -> Counter[tuple[bool, str]]:
    """Return counts by (whether a gradient, product), merged over the other kinds."""
    merged = Counter[tuple[bool, str]]()
    for formula, count in moment.items():
        kind, _, product = formula.partition(" ")
        merged[kind == "gradient", product] += count
    return merged


def _nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {formula: count for formula, count in counts.items() if count}
