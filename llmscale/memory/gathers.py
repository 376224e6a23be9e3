"""Parameters that stage 3 gathers and releases during one micro-step. No torch.

Follows PartitionedParameterCoordinator with a complete trace (deepspeed/runtime/zero/partitioned_param_coordinator.py)
and Init.all_gather_coalesced (partition_parameters.py). Everything runs in the order of one stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from llmscale.architecture.layers import Layer, ParameterTensor, ParameterTensors
from llmscale.config.deepspeed.schema import Dtype, OffloadOptimizer, OffloadParam
from llmscale.memory.breakdown import allocated_bytes
from llmscale.memory.zero_setup import BYTES_PER_ELEMENT, ZeroSetup

#: Blocks in the middle of a deep model that must be alike, so that as many others are.
_ALIKE = 4

#: Indices of a module's parameters.
_Module = tuple[int, ...]
#: fetch: DeepSpeed's hook before a module's forward or backward. release: its hook after it. moment: the forward pass
#: reaches the embeddings, a block, the final norm or the logits, or a layer's gradients are ready.
_Action = Literal["fetch", "release", "moment"]
_Event = tuple[_Action, _Module]


class Gathers(NamedTuple):
    """All-gathers up to a moment of a micro-step, and the memory of gathered parameters."""

    calls: int = 0
    elements: int = 0
    """Elements of the gathered tensors, with the padding of the last rank's shard."""
    live_bytes: int = 0
    """Memory at the moment, without parameters that always stay gathered."""
    peak_bytes: int = 0
    """Largest memory from the moment to the next one."""
    settled_bytes: int = 0
    """Largest memory from the moment to the next one between all-gathers, without what these alone need."""

    def plus(self, other: Gathers, times: int = 1) -> Gathers:
        """Return the sum with `times` the other."""
        # Spelt out: estimates of large models do this thousands of times.
        return Gathers(
            self.calls + times * other.calls,
            self.elements + times * other.elements,
            self.live_bytes + times * other.live_bytes,
            self.peak_bytes + times * other.peak_bytes,
            self.settled_bytes + times * other.settled_bytes,
        )


def padded(elements: int, ranks: int) -> int:
    """Return the elements of all shards of a parameter, the last one padded (Init._partition_param)."""
    return -(-elements // ranks) * ranks


def tensor_bytes(elements: int, dtype: Dtype) -> int:
    """Return the bytes that a tensor takes on the GPU."""
    return allocated_bytes(elements, BYTES_PER_ELEMENT[dtype])


def second_copies(tensors: Iterable[ParameterTensor], setup: ZeroSetup) -> dict[int, int]:
    """Return the bytes of a rank's part of hpZ's copy of each parameter, by index; nothing without hpZ.

    A copy is made when the parameter is first released (_partition_param_sec), and freed by the optimizer step.
    """
    group_ranks = setup.zero.zero_hpz_partition_size
    if group_ranks == 1:
        return {}
    return {
        tensor.index: tensor_bytes(
            padded(tensor.elements, setup.ranks_of(tensor)) // group_ranks, setup.config.model_dtype
        )
        for tensor in tensors
    }


def persistent_parameters(tensors: Iterable[ParameterTensor], setup: ZeroSetup) -> dict[int, ParameterTensor]:
    """Return the parameters that stay gathered between steps (DeepSpeedZeRoOffload.mark_persistent_parameters)."""
    chosen: dict[int, ParameterTensor] = {}
    zero = setup.zero
    total = 0
    for tensor in tensors:
        is_small = tensor.elements <= zero.stage3_param_persistence_threshold
        if is_small and total + tensor.elements <= zero.stage3_model_persistence_threshold:
            chosen[tensor.index] = tensor
            total += tensor.elements
    return chosen


def allocates_gathered(setup: ZeroSetup) -> bool:
    """Return False for a single rank with its parameters on the GPU, which has nothing to gather."""
    return setup.shard_ranks > 1 or setup.zero.offload_param.device != "none"


def follow_gathers(tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool) -> list[Gathers]:
    """Return the moments of a micro-step: n_layer + 3 of the forward pass, 1 + each layer's gradients, the end.

    `recomputes`: every block runs forward again before its backward pass.
    """
    if not allocates_gathered(setup):
        return [Gathers()] * (tensors.architecture.n_layer + 5 + len(tensors.gradient_order) + tensors.tied)
    if setup.expert_parallel_size == 1:
        # The rows of a table differ in what they offload, and gather alike.
        on_host = OffloadParam(device="none" if setup.zero.offload_param.device == "none" else "cpu")
        zero = setup.zero.model_copy(update={"offload_optimizer": OffloadOptimizer(), "offload_param": on_host})
        setup = replace(setup, config=setup.config.model_copy(update={"zero_optimization": zero}))
    return _follow_equal_blocks(tensors, setup, recomputes)


@lru_cache(maxsize=32)
def _follow_equal_blocks(tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool) -> list[Gathers]:
    num_blocks = _blocks_to_follow(tensors, setup)
    if num_blocks < tensors.architecture.n_layer:
        few = replace(tensors, architecture=replace(tensors.architecture, n_layer=num_blocks))
        moments = _repeat_blocks(_follow(few, setup, recomputes), few, tensors.architecture.n_layer)
        if moments is not None:
            return moments
    return _follow(tensors, setup, recomputes)


def _blocks_to_follow(tensors: ParameterTensors, setup: ZeroSetup) -> int:
    """Return how many blocks show all that happens in a micro-step: in the middle of a deep model it repeats.

    DeepSpeed looks ahead and keeps parameters within three numbers of elements, at the beginning and at the end.
    """
    model = tensors.architecture
    zero = setup.zero
    is_uniform = not tensors.frozen and not model.other_blocks
    if not is_uniform or zero.stage3_model_persistence_threshold < model.num_parameters:
        return model.n_layer
    window = max(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance, zero.stage3_prefetch_bucket_size)
    return 2 * -(-window // model.block_parameters) + 2 * _ALIKE


def _repeat_blocks(moments: list[Gathers], tensors: ParameterTensors, n_layer: int) -> list[Gathers] | None:
    """Return the moments of a model of `n_layer` blocks from those of the same with fewer.

    The middle block is repeated in both passes; None if its neighbours are not like it.
    """
    num_blocks = tensors.architecture.n_layer
    added_blocks = n_layer - num_blocks
    layers = tensors.gradient_order
    moments_of_block = sum(layer[0].block == 0 for layer in layers)
    layers_after_blocks = layers[: -len(tensors.architecture.before_blocks)]
    moments_after_blocks = sum(layer[0].block is None for layer in layers_after_blocks)
    begin_of_forward = 1
    begin_of_backward = num_blocks + 4 + moments_after_blocks + tensors.tied
    # The backward pass first: what is inserted there moves nothing of the forward pass.
    for begin, count in ((begin_of_backward, moments_of_block), (begin_of_forward, 1)):
        first = begin + num_blocks // 2 * count
        change = moments[first + count].plus(moments[first], -1)
        near = range(first - _ALIKE // 2 * count, first + _ALIKE // 2 * count)
        if any(moments[place + count] != moments[place].plus(change) for place in near):
            return None
        repeated = [
            moments[first + place % count].plus(change, place // count) for place in range(added_blocks * count)
        ]
        later = [moment.plus(change, added_blocks) for moment in moments[first:]]
        moments = moments[:first] + repeated + later
    return moments


def count_gathers(tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool) -> tuple[Gathers, Gathers]:
    """Return the all-gathers of a micro-step's forward and backward pass, without persistent parameters."""
    moments = follow_gathers(tensors, setup, recomputes)
    forward = moments[tensors.architecture.n_layer + 3]
    return forward, moments[-1].plus(forward, -1)


def _follow(tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool) -> list[Gathers]:
    coordinator = _Coordinator(tensors, setup, recomputes)
    moments: list[Gathers] = []
    began = Gathers()
    for action, module in coordinator.events:
        if action == "fetch":
            coordinator.fetch(module)
        elif action == "release":
            coordinator.release(module)
        else:
            moments.append(coordinator.end_moment(began))
            began = coordinator.begin_moment()
    # Parameters that are gathered before the embeddings run are alive when they do.
    return [*moments[1:], coordinator.end_moment(began)]


def _trace(tensors: ParameterTensors, recomputes: bool) -> Iterator[_Event]:
    """Yield the events of a micro-step. A module that contains others has no parameters, and only fetches.

    Gradients end at the first layer that is trained. Those before it run no backward pass.
    """
    model = tensors.architecture
    passive = _without_backward(tensors)
    modules = {place: tuple(tensor.index for tensor in own) for place, own in tensors.of_layer.items()}
    before = [modules.get((None, layer.name), ()) for layer in model.before_blocks if layer.name]
    *norms, head = (modules.get((None, layer.name), ()) for layer in model.after_blocks if layer.name)
    moment: _Event = ("moment", ())
    yield from (("fetch", ()), moment, *_through(before, "fetch", "release"))
    for block in range(model.n_layer):
        yield moment
        yield from _block(modules, block, model.layers_of(block), "fetch", "release")
    yield from (moment, *_through(norms, "fetch", "release"), ("fetch", head), moment, ("release", head))
    yield from (moment, ("fetch", ()))
    # The head always runs one, though the frozen table that it may share runs none as embedding.
    after = _through((head, *norms[::-1]), "fetch", "moment", "release")
    yield from _without(passive.difference(head), after)
    frozen = frozenset(tensor.index for tensor in tensors.frozen_tensors)
    recomputed: set[int] = set()
    for block in reversed(range(model.n_layer)):
        layers = model.layers_of(block)
        indices = {index for layer in layers for index in modules.get((block, layer.name), ())}
        backward = _without(passive, _block(modules, block, layers, "fetch", "moment", "release"))
        if not recomputes or passive.issuperset(indices):
            yield from backward
            continue
        yield from _keeping(frozen, _block(modules, block, layers, "fetch", "release"))
        yield from _keeping(frozen, backward)
        recomputed |= indices & frozen
    # The embeddings take no input with a gradient, so DeepSpeed releases them only at the end.
    yield from _without(passive, _through(before[::-1], "fetch", "moment"))
    yield from _without(passive, _through(before[::-1], "release"))
    yield "release", tuple(recomputed)
    yield moment


def _without_backward(tensors: ParameterTensors) -> frozenset[int]:
    """Return the parameters of layers whose input and weights need no gradients."""
    frozen = {tensor.index for tensor in tensors.frozen_tensors}
    passive = set[int]()
    has_gradients = not frozen
    for place, layer in tensors.architecture.all_layers() if frozen else ():
        own = [tensor.index for tensor in tensors.of_layer.get((place, layer.name), ()) if layer.name]
        # Embeddings read tokens: what is trained before them does not matter.
        is_first = place is None and layer in tensors.architecture.before_blocks
        if own and frozen.issuperset(own) and (is_first or not has_gradients):
            passive.update(own)
        has_gradients |= not frozen.issuperset(own)
    return frozenset(passive)


def _without(passive: frozenset[int], events: Iterable[_Event]) -> Iterable[_Event]:
    """Return the events without fetches and releases of `passive` parameters; their moments stay."""
    if not passive:
        return events
    return (event for event in events if event[0] == "moment" or passive.isdisjoint(event[1]))


def _keeping(held: frozenset[int], events: Iterable[_Event]) -> Iterable[_Event]:
    """Return the events without releases of `held` parameters.

    Those that are frozen and gathered for a recomputation belong to the module whose backward pass is running: the
    model (fetch_sub_module, update_recompute_parameters).
    """
    if not held:
        return events
    return (
        (action, tuple(index for index in module if index not in held) if action == "release" else module)
        for action, module in events
    )


def _through(modules: Iterable[_Module], *actions: _Action) -> Iterator[_Event]:
    for module in modules:
        yield from ((action, module) for action in actions if module or action == "fetch")


def _block(
    modules: Mapping[tuple[int | None, str], _Module], block: int, layers: Sequence[Layer], *actions: _Action
) -> Iterator[_Event]:
    """Yield the events of a block, in reverse order where gradients appear; a module before those that it contains."""
    entered = {""}
    of_block = modules.get((block, ""), ())
    yield "fetch", of_block
    for layer in layers[::-1] if "moment" in actions else layers:
        if not layer.name:
            continue
        outer = layer.name.rpartition(".")[0]
        while outer not in entered:
            entered.add(outer)
            yield "fetch", ()
            outer = outer.rpartition(".")[0]
        own = modules.get((block, layer.name), ())
        for action in actions:
            if own or action == "fetch":
                if action == "moment":
                    times = len(layer.in_gradient_order(own))
                else:
                    times = 1
                yield from [(action, own)] * times
    yield from _through([of_block], *actions[1:])


@dataclass
class _AllGather:
    """A coalesced all-gather: its flat tensor lives until the last of its parameters has been waited for."""

    flat_bytes: int
    waiting: set[int]
    """Parameters that have not been waited for."""
    is_copied: bool = False
    """True when the parameters have storages of their own."""


class _Coordinator:
    """Fetches and releases modules, from `reset_step` on. Parameters are named by their indices."""

    def __init__(self, tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool) -> None:
        self.peak_bytes = 0
        """Largest memory since the moment began."""
        self._settled_bytes = 0
        """Largest memory since then after a fetch."""
        self._calls = 0
        self._gathered_elements = 0
        self._live_bytes = 0
        self._setup = setup
        self._has_copies = setup.shard_ranks == 1 or setup.zero.offload_param.device != "none"
        """True if a parameter of which the rank has all is copied for use."""
        self._elements = [tensor.elements for tensor in tensors.all]
        self._ranks = [setup.ranks_of(tensor) for tensor in tensors.all]
        trace = list(_trace(tensors, recomputes))
        fetched = [module for action, module in trace if action == "fetch"]
        self._elements_before = self._count_elements_before(fetched)
        """Elements of all modules before each step of the trace."""
        # Parameters that stay gathered matter for distances alone.
        persistent = persistent_parameters(tensors.all, setup)
        moving = {
            module: tuple(index for index in module if index not in persistent) for _, module in {*trace, ("fetch", ())}
        }
        self.events = [(action, moving[module]) for action, module in trace]
        self._queue = deque((index, step) for step, module in enumerate(fetched) for index in moving[module])
        """(parameter, step of a use) of every use that no prefetch has passed."""
        self._uses: dict[int, deque[int]] = {index: deque() for index, _ in self._queue}
        """Steps of the coming uses of each parameter."""
        for index, step in self._queue:
            self._uses[index].append(step)
        self._passed = dict.fromkeys(self._uses, -1)
        """Step of the last use of a parameter that has left the queue."""
        if setup.accumulates:
            self._copies = {}
        else:
            self._copies = second_copies(tensors.trainable, setup)
        """Bytes of hpZ's copies that have not been made."""
        self._away = set(self._uses)
        """Parameters that are not gathered."""
        self._live: dict[int, int] = {}
        """Bytes of each gathered parameter that has a storage."""
        self._pending: dict[int, _AllGather] = {}
        """All-gathers that a parameter waits for."""
        self._step = 0
        """Steps of the trace so far."""
        self._available = 0
        """Elements that are gathered, as DeepSpeed counts them."""

    def _count_elements_before(self, modules: list[_Module]) -> list[int]:
        sizes = {module: sum(self._elements[index] for index in module) for module in set(modules)}
        return list(accumulate((sizes[module] for module in modules), initial=0))

    def begin_moment(self) -> Gathers:
        """Return what has been gathered, and begin to measure the peak again."""
        self.peak_bytes = self._live_bytes
        self._settled_bytes = self._live_bytes
        return Gathers(self._calls, self._gathered_elements, self._live_bytes)

    def end_moment(self, began: Gathers) -> Gathers:
        """Return the moment with the largest memory since it began."""
        return began._replace(peak_bytes=self.peak_bytes, settled_bytes=self._settled_bytes)

    def fetch(self, module: _Module) -> None:
        """fetch_sub_module: gather what the module needs, then prefetch in the order of the trace."""
        if module:
            self._gather([index for index in module if index in self._away])
            for index in module:
                self._wait(index)
                self._uses[index].popleft()
            while self._queue and self._queue[0][1] <= self._step:  # uses that no prefetch has passed
                self._take_from_queue()
        zero = self._setup.zero
        room = min(zero.stage3_max_live_parameters - self._available, zero.stage3_prefetch_bucket_size)
        prefetched: list[int] = []
        while self._queue and room > 0:
            index = self._take_from_queue()
            if index in self._away and index not in prefetched:
                prefetched.append(index)
                room -= self._elements[index]
        if prefetched:
            self._gather(prefetched)
        self._settled_bytes = max(self._settled_bytes, self._live_bytes)
        self._step += 1

    def _take_from_queue(self) -> int:
        index, step = self._queue.popleft()
        self._passed[index] = step
        return index

    def release(self, module: _Module) -> None:
        """release_sub_module: free parameters that no prefetch has passed and whose next use is far.

        The distance is the elements of the modules before the next use (__params_to_release).
        """
        for index in module:
            if index not in self._live or self._passed[index] > self._step or self._is_used_soon(index):
                continue
            self._hold(self._copies.pop(index, 0))
            self._live_bytes -= self._live.pop(index)
            self._available -= self._elements[index]
            self._away.add(index)

    def _is_used_soon(self, index: int) -> bool:
        uses = self._uses[index]
        if not uses:
            return False
        distance = self._elements_before[uses[0]] - self._elements_before[self._step]
        return distance < self._setup.zero.stage3_max_reuse_distance

    def _gather(self, indices: list[int]) -> None:
        """Gather parameters, those of each group of ranks together."""
        for ranks in {self._ranks[index]: None for index in indices}:
            self._gather_from(ranks, [index for index in indices if self._ranks[index] == ranks])

    def _gather_from(self, ranks: int, indices: list[int]) -> None:
        """Gather one parameter into its storage, or several into a flat tensor out of which they are copied."""
        self._available += sum(self._elements[index] for index in indices)
        self._away.difference_update(indices)
        if ranks == 1:
            if self._has_copies:
                self._store(indices)
            return
        elements = sum(padded(self._elements[index], ranks) for index in indices)
        self._calls += 1
        self._gathered_elements += elements
        flat_bytes = tensor_bytes(elements, self._setup.config.model_dtype)
        self._hold(flat_bytes)
        if self._setup.zero.offload_param.device != "none":  # the rank's own part comes from the host
            own_bytes = tensor_bytes(elements // ranks, self._setup.config.model_dtype)
            self.peak_bytes = max(self.peak_bytes, self._live_bytes + own_bytes)
        if len(indices) == 1:
            self._live[indices[0]] = flat_bytes
        else:
            self._pending.update(dict.fromkeys(indices, _AllGather(flat_bytes, set(indices))))

    def _wait(self, index: int) -> None:
        """AllGatherCoalescedHandle.wait: the first wait copies every parameter out of the flat tensor."""
        gather = self._pending.pop(index, None)
        if gather is None:
            return
        if not gather.is_copied:
            gather.is_copied = True
            self._store(gather.waiting)
        gather.waiting.remove(index)
        if not gather.waiting:
            self._live_bytes -= gather.flat_bytes

    def _store(self, indices: Iterable[int]) -> None:
        """Allocate parameters one by one."""
        for index in indices:
            self._live[index] = tensor_bytes(self._elements[index], self._setup.config.model_dtype)
            self._hold(self._live[index])

    def _hold(self, num_bytes: int) -> None:
        self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
