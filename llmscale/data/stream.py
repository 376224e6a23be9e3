"""Samples of a prepared dataset or a mixture by step, for a loop of any kind: a function of seed and step.

The state of a stream is the number of steps done. Nothing is kept of workers, epochs or ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from llmscale.data.loader import Feed, FeedPlan, MicroBatch, rank_sample_ids
from llmscale.data.mixture import MixedOrder, MixedShards, TrainingSets, open_training_sets, place_stages
from llmscale.data.order.sample_order import (
    MovedOrder,
    OrderSettings,
    RankLayout,
    StreamOrder,
    build_order,
    join_ranges,
    stream_positions,
)
from llmscale.data.shards.token_shards import TokenShards, WindowReader, are_targets, ids_of
from llmscale.errors import ConfigError, DataError

#: Label that torch's and transformers' losses leave out.
IGNORED = -100
#: Name of the number of steps in a state.
_STEP = "step"
#: Positions that a stream leaves out, in a state.
_SKIPPED = "skipped"
#: Next micro-batch of a worker, in the state that a StatefulDataLoader asks it for.
_PLACE = "place"


class Batch(NamedTuple):
    """One forward pass of one rank."""

    tokens: Tensor
    """int64 [micro_batch, seq_len + 1]."""
    labels: Tensor
    """The tokens, -100 where they do not count in the loss: transformers' models shift them themselves."""
    weight: float
    """Factor of the loss before backward, so that the mean over ranks and micro-batches is the global batch's.

    0 for a filler; 1 where the micro-batches divide evenly.
    """
    sample_ids: Tensor
    """int64 [micro_batch]; none for a filler."""


class _HasSteps(Protocol):
    """A stream or a sampler, whose state is a step."""

    step: int
    identity: dict[str, Any]


def share_of(global_batch: int, micro_batch: int, rank: int | None, world_size: int | None) -> FeedPlan:
    """Return a rank's share of a step: rank and ranks are torch.distributed's, the launcher's, or 0 of 1.

    Raises ConfigError for sizes that do not fit.
    """
    if world_size is None:
        is_joined = dist.is_available() and dist.is_initialized()
        if is_joined:
            world_size = dist.get_world_size()
            rank = dist.get_rank()
        else:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            rank = int(os.environ.get("RANK", "0"))
    for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch), ("world_size", world_size)):
        if value < 1:
            raise ConfigError(f"{name} = {value}: it must be at least 1.")
    if global_batch % micro_batch:
        raise ConfigError(f"global_batch {global_batch} is not a number of micro-batches of {micro_batch}.")
    if world_size > global_batch:
        raise ConfigError(f"global_batch {global_batch} is less than one sample for each of {world_size} ranks.")
    micro_steps = -(-global_batch // (micro_batch * world_size))
    # One node: which rank has which part of a step is nothing that a step depends on.
    return FeedPlan(RankLayout(rank or 0, (world_size,)), micro_batch, micro_steps, samples=global_batch)


def weight_of(plan: FeedPlan) -> float:
    """Return the weight of a micro-batch with samples."""
    places = plan.micro_batch_size * plan.gradient_accumulation_steps * plan.layout.data_parallel_size
    return places / plan.global_batch_size


def check_same_stream(own: _HasSteps, state: Mapping[str, Any]) -> int:
    """Return the step of a state. Raises DataError for one of other data, another order or another batch."""
    for key, value in own.identity.items():
        if state.get(key) != value:
            raise DataError(
                f"the state is of another stream: {key} was {str(state.get(key))[:80]} and is {str(value)[:80]}."
            )
    step = state.get(_STEP)
    if not isinstance(step, int) or step < 0:
        raise DataError(f"the state is damaged: its step is {str(step)[:40]!r}.")
    return step


def place_skips(skip_steps: Sequence[tuple[int, int]], global_batch: int) -> list[tuple[int, int]]:
    """Return the stream positions of ranges of steps. Raises ConfigError for a range without steps."""
    places: list[tuple[int, int]] = []
    for first, behind in skip_steps:
        if not 0 <= first < behind:
            raise ConfigError(f"skip_steps = ({first}, {behind}): the range must be [first, behind), from 0 on.")
        ends = np.array([first * global_batch, behind * global_batch - 1])
        begin, last = stream_positions(ends, join_ranges(places)).tolist()
        places.append((begin, last + 1))
    return places


class Stream(IterableDataset[Batch]):
    """Micro-batches of one rank, step by step.

    `stream.at(step)` are those of any step. Iterating begins at `stream.step`, and ends with `total_steps`. A
    DataLoader takes a stream with batch_size=None and any number of workers. They read ahead: note the state with
    `stream.state_at(step)` then, or let a StatefulDataLoader do it.
    """

    def __init__(
        self,
        sets: TrainingSets,
        plan: FeedPlan,
        *,
        seed: int,
        total_steps: int | None = None,
        shuffle: bool = True,
        skip_steps: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`plan` is the rank's share of a step. Raises ConfigError, DataError."""
        if sets.recipe is not None and total_steps is None:
            raise ConfigError(f"{sets.name} is a mixture, whose stages are parts of a run: give total_steps.")
        self._sets = sets
        self._shards: WindowReader | None = None
        self.plan = plan
        self.total_steps = total_steps
        skipped = place_skips(skip_steps, plan.global_batch_size)
        settings = OrderSettings(seed=seed, shuffle=shuffle)
        orders = [build_order(location, settings) for location in sets.locations]
        self.order: StreamOrder = orders[0]
        stages: list[list[Any]] = []
        size = plan.global_batch_size
        if sets.recipe is not None and total_steps is not None:
            placed = place_stages(sets.recipe, total_steps * size, size, skipped=join_ranges(skipped))
            self.order = MixedOrder(orders, placed)
            stages = [[stage.begin, list(stage.shares)] for stage in placed]
        if skipped:
            self.order = MovedOrder(self.order, partial(stream_positions, skipped=join_ranges(skipped)))
        self.skipped = [list(places) for places in skipped]
        """Stream positions that are left out, [first, after the last]."""
        self.identity: dict[str, Any] = {
            "data": sets.fingerprint,
            "order": [dict(order.identity("")) for order in orders],
            "stages": stages,
            "global_batch": size,
        }
        """Values that a state must share with a stream."""
        self.step = 0
        """Steps done: the next one's number, counted from 0."""
        self._place: int | None = None

    @property
    def global_batch(self) -> int:
        """Samples of a step over all ranks."""
        return self.plan.global_batch_size

    @property
    def micro_steps(self) -> int:
        """Forward passes of every rank in a step: gradient_accumulation_steps."""
        return self.plan.gradient_accumulation_steps

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """Return this rank's sample ids of a step, int64 [micro_steps, micro_batch]; those of fillers are inverted."""
        ids = rank_sample_ids(self.order, self.plan, step * self.global_batch)
        return ids.reshape(self.micro_steps, self.plan.micro_batch_size)

    def at(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of a step, counted from 0. Raises DataError, IndexError."""
        if not 0 <= step < self._end():
            raise IndexError(f"the stream has no step {step}: it has {self.total_steps}, from 0 on")
        return [self._read(ids) for ids in self.sample_ids(step)]

    def steps(self, first: int | None = None, *, num_workers: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of one step after the other from `first` on, read ahead by `num_workers` processes.

        Raises DataError, and MachineError when a worker was killed.
        """
        first = self.step if first is None else first
        feed = Feed(
            self._open(),
            self.order,
            self.plan,
            start_sample=first * self.global_batch,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
        )
        try:
            step = first
            while step < self._end():
                batches = [self._batch(next(feed)) for _ in range(self.micro_steps)]
                step += 1
                self.step = step
                yield batches
        finally:
            feed.close()

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        if worker is not None:
            yield from self._of_worker(worker.id, worker.num_workers)
            return
        while self.step < self._end():
            batches = self.at(self.step)
            self.step += 1
            yield from batches

    def _of_worker(self, number: int, count: int) -> Iterator[Batch]:
        """Yield every `count`th micro-batch: a DataLoader takes one of each worker in turn."""
        if self._place is None:
            place = self.step * self.micro_steps + number
        else:
            place = self._place
        while place < self._end() * self.micro_steps:
            step, micro_step = divmod(place, self.micro_steps)
            ids = self.sample_ids(step)[micro_step]
            place += count
            self._place = place
            yield self._read(ids)

    def __len__(self) -> int:
        if self.total_steps is None:
            raise TypeError("a stream without total_steps has no length")
        return max(0, self.total_steps - self.step) * self.micro_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain values, equal on every rank."""
        place = {} if self._place is None else {_PLACE: self._place}
        return {**self.state_at(self.step), **place}

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state after `step` steps."""
        return {_STEP: step, **self.identity, _SKIPPED: self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of a state. Raises DataError if it is of other data, another order or batch, or if steps
        that are done were skipped, or not, by then."""
        step = check_same_stream(self, state)
        before = state.get(_SKIPPED, [])
        here = int(stream_positions(np.array([step * self.global_batch]), join_ranges(map(tuple, before)))[0])
        if self.skipped[: len(before)] != before or any(begin < here for begin, _ in self.skipped[len(before) :]):
            raise DataError(
                f"the state is of another stream: it had skipped the positions {str(before)[:80]} at step {step}, and "
                f"this stream skips {str(self.skipped)[:80]}. Steps that are done cannot be skipped."
            )
        self.step = step
        self._place = state.get(_PLACE)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": None}  # workers open the files themselves

    def _end(self) -> float:
        if self.total_steps is None:
            return float("inf")
        return self.total_steps

    def _open(self) -> WindowReader:
        if self._shards is None:
            sets = self._sets
            of_one = sets.recipe is None
            if of_one:
                self._shards = TokenShards(sets.first, "train")
            else:
                self._shards = MixedShards(sets.locations, "train")
        return self._shards

    def _read(self, ids: NDArray[np.int64]) -> Batch:
        """Read one micro-batch: ids int64 [micro_batch], inverted for a filler."""
        shards = self._open()
        asked = np.where(ids < 0, ~ids, ids)
        if shards.has_mask:
            read = shards.read_marked(asked)
            mask = torch.from_numpy(are_targets(read))
        else:
            read = shards.read(asked)
            mask = None
        tokens = torch.from_numpy((ids_of(read) if shards.has_mask else read).astype(np.int64))
        return self._batch(MicroBatch(tokens, torch.from_numpy(ids[ids >= 0]), mask))

    def _batch(self, micro_batch: MicroBatch) -> Batch:
        tokens = micro_batch.tokens
        mask = micro_batch.is_target
        if mask is None:
            labels = tokens
        else:
            labels = tokens.where(mask, IGNORED)
        if micro_batch.is_filler:
            weight = 0.0
        else:
            weight = weight_of(self.plan)
        return Batch(tokens, labels, weight, micro_batch.sample_ids)


def open_stream(
    data: str | Path,
    *,
    global_batch: int,
    seed: int,
    micro_batch: int = 1,
    total_steps: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    shuffle: bool = True,
    skip_steps: Sequence[tuple[int, int]] = (),
) -> Stream:
    """Open a dataset made by `llmscale data prepare` (a folder or a URL), or a mixture's YAML, as a stream.

    Every step has `global_batch` samples, whatever the number of ranks, in forward passes of `micro_batch`. Rank and
    ranks are torch.distributed's, the launcher's, or 0 of 1. `skip_steps` are ranges [first, behind) whose batches are
    left out, each in the numbers that result from those before it. Raises ConfigError, DataError.
    """
    plan = share_of(global_batch, micro_batch, rank, world_size)
    sets = open_training_sets(str(data))
    return Stream(sets, plan, seed=seed, total_steps=total_steps, shuffle=shuffle, skip_steps=skip_steps)
