"""Which parameters stage 3 has gathered at each moment. No torch.

Follows deepspeed/runtime/zero/partitioned_param_coordinator.py, PartitionedParameterCoordinator, with a complete trace,
and Init.all_gather_coalesced in partition_parameters.py. Nothing waits: everything runs in the order of one stream.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from llmscale.architecture.layers import ParameterTensor
from llmscale.memory.category_peak import Tally
from llmscale.memory.states.stage3_trace import Pass, Stage3Trace
from llmscale.memory.zero_settings import ZeroSetup, tensor_bytes

_NEVER = -1


@dataclass
class _Gather:
    """One all-gather: a flat tensor that lives until the last of its parameters has been waited for."""

    flat_bytes: int
    waiting: set[int]
    done: bool = False


class Gathers(NamedTuple):
    """All-gathers of parameters."""

    calls: int = 0
    elements: int = 0
    """Of whole tensors, padded so that every rank has as many."""

    def plus(self, other: Gathers, times: int = 1) -> Gathers:
        """The sum with `times` the other."""
        return Gathers(self.calls + times * other.calls, self.elements + times * other.elements)


class Stage3Parameters:
    """Fetches and releases; what is gathered is held in `tally`, parameters that always stay excepted."""

    def __init__(self, trace: Stage3Trace, setup: ZeroSetup, tally: Tally) -> None:
        self._trace, self._setup, self._tally = trace, setup, tally
        used = [tensor for tensors in trace.parameters for tensor in tensors]
        self._elements = {tensor.index: tensor.elements for tensor in used}
        self._persistent = persistent_parameters(used, setup)
        self._persistent_alike = self._is_alike_in_all_blocks(self._persistent)
        self._live: dict[int, int] = {}
        """Gathered parameters and the bytes of a storage of their own."""
        self._flying: dict[int, _Gather] = {}
        self._users: dict[int, set[int]] = {}
        self.gathers = Gathers()
        """So far."""
        self._uncopied = second_copies(used, setup)
        """Parameters that have no second copy yet, and its bytes."""
        if setup.accumulates:
            # Those of the micro-steps before.
            gone = [self._uncopied.pop(index) for index in self._elements.keys() - self._persistent if self._uncopied]
            tally.hold("parameters", sum(gone))

    def begin(self) -> None:
        """reset_step, at the start of a forward pass."""
        self._step = self._releases = 0
        self._place = 0
        """In the trace's queue, of the next use that is neither prefetched nor passed over."""
        self.available = 0
        """Elements that are gathered."""
        self._marked: dict[int, int] = {}

    def fetch(self, module: int) -> None:
        """fetch_sub_module: gather what the module needs, then prefetch in the order of the trace."""
        needed = self._trace.parameters[module]
        if needed:
            away = [tensor for tensor in needed if self._is_away(tensor)]
            if away:
                self._gather(away)
            for tensor in needed:
                self._users.setdefault(tensor.index, set()).add(module)
                self._wait(tensor)
            self._pass_over(needed)
        self._prefetch()
        self._step += 1

    def _pass_over(self, needed: Iterable[ParameterTensor]) -> None:
        """What was not prefetched leaves the queue."""
        fresh = {tensor.index for tensor in needed if self._marked.get(tensor.index, _NEVER) < self._step}
        discarded: set[int] = set()
        queue = self._trace.queue
        while self._place < len(queue) and len(discarded) < len(fresh):
            tensor, step = queue[self._place]
            self._place += 1
            self._marked[tensor.index] = step
            discarded.add(tensor.index)

    def _prefetch(self) -> None:
        setup, queue, marked = self._setup, self._trace.queue, self._marked
        most = min(setup.zero.stage3_max_live_parameters - self.available, setup.zero.stage3_prefetch_bucket_size)
        chosen: dict[int, ParameterTensor] = {}
        elements = 0
        while self._place < len(queue) and elements < most:
            tensor, step = queue[self._place]
            self._place += 1
            marked[tensor.index] = max(marked.get(tensor.index, _NEVER), step)
            if self._is_away(tensor) and tensor.index not in chosen:
                chosen[tensor.index] = tensor
                elements += tensor.elements
        if chosen:
            self._gather(list(chosen.values()))

    def release(self, module: int) -> None:
        """release_sub_module: what is not used again within the reuse distance nor passed over by a prefetch."""
        used_soon = self._trace.used_soon[self._releases]
        self._releases += 1
        for tensor, is_used_soon in zip(self._trace.parameters[module], used_soon, strict=True):
            self._users[tensor.index].discard(module)
            if (
                tensor.index not in self._persistent
                and self._marked.get(tensor.index, _NEVER) <= self._step
                and not is_used_soon
            ):
                self._free(tensor)

    def _is_away(self, tensor: ParameterTensor) -> bool:
        index = tensor.index
        return index not in self._persistent and index not in self._live and index not in self._flying

    def _gather(self, tensors: list[ParameterTensor]) -> None:
        """One parameter is gathered into its own storage; several into a flat tensor, out of which they are copied.
        With one rank there is nothing to gather, and a copy only where the shards lie on the host."""
        self.available += sum(tensor.elements for tensor in tensors)
        dtype, ranks = self._setup.config.model_dtype, self._setup.shard_ranks
        from_host = self._setup.zero.offload_param.device != "none"
        if ranks == 1:
            for tensor in tensors:
                num_bytes = tensor_bytes(tensor.elements, dtype) if from_host else 0
                self._tally.hold("parameters", num_bytes)
                self._live[tensor.index] = num_bytes
            return
        shards = [shard_elements(tensor, ranks) for tensor in tensors]
        staged = sum(tensor_bytes(shard, dtype) for shard in shards) if from_host else 0
        self.gathers = self.gathers.plus(Gathers(1, sum(shards) * ranks))
        flat = tensor_bytes(sum(shards) * ranks, dtype)
        self._tally.hold("parameters", flat)
        self._tally.touch("temporaries", staged)
        if len(tensors) == 1:
            self._live[tensors[0].index] = flat
            return
        gather = _Gather(flat, {tensor.index for tensor in tensors})
        self._flying.update({tensor.index: gather for tensor in tensors})

    def _wait(self, tensor: ParameterTensor) -> None:
        """AllGatherCoalescedHandle.wait: the first wait copies every parameter out of the flat tensor."""
        gather = self._flying.pop(tensor.index, None)
        if gather is None:
            return
        if not gather.done:
            gather.done = True
            for index in sorted(gather.waiting):
                num_bytes = tensor_bytes(self._elements[index], self._setup.config.model_dtype)
                self._tally.hold("parameters", num_bytes)
                self._live[index] = num_bytes
        gather.waiting.discard(tensor.index)
        if not gather.waiting:
            self._tally.drop("parameters", gather.flat_bytes)

    def _free(self, tensor: ParameterTensor) -> None:
        if tensor.index in self._live and not self._users[tensor.index]:
            self._tally.hold("parameters", self._uncopied.pop(tensor.index, 0))
            self._tally.drop("parameters", self._live.pop(tensor.index))
            self.available -= tensor.elements

    @property
    def ahead(self) -> int:
        """Uses that were prefetched or passed over before their time."""
        return self._place - self._trace.uses_before[self._step]

    def state(self, block: int) -> Hashable:
        """With `available` and `ahead`, all that decides how this goes on before `block` runs, counted from it: blocks
        that begin alike are alike, as long as the trace is (`equal_blocks`)."""
        trace, step = self._trace, self._step

        def seen(index: int) -> tuple[int, int | None]:
            own = trace.block_of.get(index)
            return (index, None) if own is None else (index - block * trace.block_tensors, own - block)

        gathers = ((seen(index), gather) for index, gather in self._flying.items())
        return (
            frozenset((seen(index), num_bytes) for index, num_bytes in self._live.items()),
            frozenset((key, g.flat_bytes, g.done, frozenset(map(seen, g.waiting))) for key, g in gathers),
            frozenset((seen(index), frozenset(users)) for index, users in self._users.items() if users),
            frozenset((seen(index), mark - step) for index, mark in self._marked.items() if mark >= step),
        )

    def equal_blocks(self, passed: Pass, place: int) -> int:
        """How many of the blocks from `place` on find the trace like the block before, which began in the same state:
        the queue as far as it is read, what is used soon, and what stays gathered. The last block is not among them."""
        steps, releases = passed.count("fetch"), passed.count("release")
        uses_before = self._trace.uses_before
        uses = uses_before[self._step] - uses_before[self._step - steps]
        if self.ahead < 0 or not self._persistent_alike:
            return 0
        most = len(passed.blocks) - place - max(1, -(-self.ahead // uses))
        begins = range(self._releases, self._releases + most * releases, releases)
        used_soon = self._trace.used_soon[self._releases - releases : self._releases]
        alike = (self._trace.used_soon[begin : begin + releases] == used_soon for begin in begins)
        return sum(takewhile(bool, alike))

    def skip(self, passed: Pass, place: int, count: int) -> None:
        """As if `count` blocks from `place` on had run."""
        steps, trace = count * passed.count("fetch"), self._trace
        further = (passed.numbers[place + count] - passed.numbers[place]) * trace.block_tensors

        def moved(index: int) -> int:
            return index + further if index in trace.block_of else index

        self._place += trace.uses_before[self._step + steps] - trace.uses_before[self._step]
        self._marked = {moved(index): mark + steps for index, mark in self._marked.items() if mark >= self._step}
        self._step += steps
        self._releases += count * passed.count("release")
        self._live = {moved(index): num_bytes for index, num_bytes in self._live.items()}
        self._users = {moved(index): users for index, users in self._users.items() if users}
        for gather in {id(gather): gather for gather in self._flying.values()}.values():
            gather.waiting = set(map(moved, gather.waiting))
        self._flying = {moved(index): gather for index, gather in self._flying.items()}

    def _is_alike_in_all_blocks(self, indices: Iterable[int]) -> bool:
        trace = self._trace
        inside = {index for index in indices if index in trace.block_of}
        return inside == {
            index + block * trace.block_tensors
            for index in inside
            if trace.block_of[index] == 0
            for block in set(trace.block_of.values())
        }


def shard_elements(tensor: ParameterTensor, shard_ranks: int) -> int:
    """What each rank has of a parameter, the last one padded (Init._partition_param)."""
    return -(-tensor.elements // shard_ranks)


def second_copies(tensors: Iterable[ParameterTensor], setup: ZeroSetup) -> dict[int, int]:
    """Bytes of hpZ's copy of each parameter, by index: made when it is first released (_partition_param_sec), and given
    up at the end of the optimizer step. A rank has its part of a group's."""
    ranks, group = setup.shard_ranks, setup.zero.zero_hpz_partition_size
    if group == 1:
        return {}
    return {
        tensor.index: tensor_bytes(shard_elements(tensor, ranks) * ranks // group, setup.config.model_dtype)
        for tensor in tensors
    }


def persistent_parameters(tensors: Iterable[ParameterTensor], setup: ZeroSetup) -> dict[int, ParameterTensor]:
    """Parameters that stay gathered between steps (DeepSpeedZeRoOffload.mark_persistent_parameters)."""
    chosen: dict[int, ParameterTensor] = {}
    total = 0
    for index, tensor in sorted({tensor.index: tensor for tensor in tensors}.items()):
        if total + tensor.elements > setup.zero.stage3_model_persistence_threshold:
            continue
        if tensor.elements <= setup.zero.stage3_param_persistence_threshold:
            chosen[index] = tensor
            total += tensor.elements
    return chosen
