"""One forward and one backward pass of a model on a simulated GPU, allocation by allocation.

Any model takes part that runs its blocks, one after the other, through a given function. `MicroStepTrace` holds the
allocations by segment (embeddings, each block, head, and the same backwards), and `factor_traces` makes formulas
of traces at several shapes.
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


#: Most factors of a product: b t h^2 would have five with h = a d, and no tensor is that large.
_MOST_FACTORS = 4


def factor_traces(traces: Sequence[MicroStepTrace], symbols: Sequence[Mapping[str, int]]) -> dict[str, RecordedSegment]:
    """The recording that all traces agree on, one of equal blocks for all of them.

    `symbols` gives each trace's shape as symbol -> number. Raises ValueError where the sequence of allocations differs
    between shapes (another branch) or blocks, where a size is no product of the symbols, and where the shapes do not
    tell two products apart.
    """
    traces = [_release_inputs_with_blocks(_release_what_blocks_share_behind_them(trace)) for trace in traces]
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
    """Recordings by branch as plain values for JSON, equal segments stored once, each as JSON text: a reader takes only
    those that it needs apart (llmscale.memory.activations.recorded.RecordedTable)."""
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
    """[formula, count, ...], formulas by their number."""
    return [
        number for text, count in sorted(counts.items()) for number in (formulas.setdefault(text, len(formulas)), count)
    ]


def _release_what_blocks_share_behind_them(trace: MicroStepTrace) -> MicroStepTrace:
    """What the embeddings made for all blocks, such as angles and a mask, goes with the first block's backward pass,
    which comes last. Here it goes right behind it: of more than one block that one never holds most."""
    made_before = {storage for storage, appears in _events_of(trace, "embed_forward") if appears}
    made_before.discard(trace.first_input)
    segments = list(trace.segments)
    for place, segment in enumerate(segments[:-1]):
        if segment.name == "block_backward" and segment.block == 0:
            shared = [event for event in segment.events if event[0] in made_before and not event[1]]
            rest = tuple(event for event in segment.events if event not in shared)
            behind = segments[place + 1]
            segments[place] = replace(segment, events=rest)
            segments[place + 1] = replace(behind, events=(*shared, *behind.events))
    return replace(trace, segments=tuple(segments))


def _release_inputs_with_blocks(trace: MicroStepTrace) -> MicroStepTrace:
    """A block's input that nothing saves goes when the next one begins, that is right behind the block."""
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
    """Storage of the first trace -> kind and formula."""
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
    """Finds the coefficient and the product of symbols for the sizes that one tensor has at several shapes."""

    def __init__(self, symbols: tuple[tuple[tuple[str, int], ...], ...]) -> None:
        """Raises ValueError where two products have the same ratios at all shapes."""
        self._symbols = [dict(shape) for shape in symbols]
        self._names_of = _products_by_ratios(symbols)

    def find(self, sizes: Sequence[int]) -> str:
        """`2*b*t*a*d`. Raises ValueError where no product fits."""
        names = self._names_of.get(_ratios(sizes))
        if names is None:
            raise ValueError(f"no product of {', '.join(self._symbols[0])} has the sizes {list(sizes)}")
        coefficient = Fraction(sizes[0], prod(self._symbols[0][name] for name in names))
        return "*".join([str(coefficient), *names])


@cache
def _products_by_ratios(
    symbols: tuple[tuple[tuple[str, int], ...], ...],
) -> dict[tuple[tuple[int, int], ...], tuple[str, ...]]:
    """Ratios of a product's values at the shapes -> its symbols. Raises ValueError where two have the same ratios."""
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
    """Symbols with their values, without those that are constant, or a multiple of an earlier one at every shape."""
    found: dict[str, list[int]] = {}
    seen = {_ratios([1] * len(symbols))}
    for places in zip(*symbols, strict=True):
        values = [value for _, value in places]
        if _ratios(values) not in seen:
            seen.add(_ratios(values))
            found[places[0][0]] = values
    return found


def _ratios(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """To the first, in lowest terms."""
    divisors = [gcd(size, sizes[0]) for size in sizes]
    return tuple((size // divisor, sizes[0] // divisor) for size, divisor in zip(sizes, divisors, strict=True))


def _signatures(trace: MicroStepTrace) -> list[tuple[str, int | None, list[tuple[int, bool, str]]]]:
    """What must agree between shapes. Storages are numbered by their first appearance. Releases between two allocations
    have no order: autocast's cache goes in that of a hash table of addresses."""
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
    """What is alive, beyond the segment's begin, whenever a release follows an allocation; whenever the gradients of
    a layer were handed over; and at its end."""
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
    """Whether another one of the same layer is handed over, before anything else is made."""
    made = next((storage for storage, appears in events if appears), None)
    return made is not None and formulas[made].startswith("gradient")


def _released_per_block(trace: MicroStepTrace, index: int, formulas: Mapping[int, str], blocks: int) -> Counter[str]:
    """What a segment releases of every block alike, such as autocast's cache: formula -> negative count a block."""
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
    """Without those that can be no peak at any shape: a later one holds as much of everything (gradients only become
    more), or an earlier one does with the same gradients."""
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
    """Without the kinds, which do not matter to what is larger: (whether a gradient, product) -> count."""
    merged = Counter[tuple[bool, str]]()
    for formula, count in moment.items():
        kind, _, product = formula.partition(" ")
        merged[kind == "gradient", product] += count
    return merged


def _nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {formula: count for formula, count in counts.items() if count}
