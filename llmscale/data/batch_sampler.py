"""The order of samples for a map-style dataset of any kind, as torch's DataLoader takes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from llmscale.data.loader import FeedPlan, rank_sample_ids
from llmscale.data.order.sample_order import SampleOrder
from llmscale.data.stream import check_same_stream, share_of, weight_of
from llmscale.errors import ConfigError


class BatchSampler(Sampler[list[int]]):
    """Indices of one rank's micro-batches, step by step, over as many epochs as it takes.

    Every micro-batch but a filler occurs once among the ranks; `weights` says which are fillers. Iterating begins at
    `sampler.step`.
    """

    def __init__(self, order: SampleOrder, plan: FeedPlan, total_steps: int | None) -> None:
        """`plan` is the rank's share of a step."""
        self._order = order
        self._plan = plan
        self.total_steps = total_steps
        self.identity: dict[str, Any] = {
            "order": dict(order.identity("")),
            "global_batch": plan.global_batch_size,
        }
        """Values that a state must share with a sampler."""
        self.step = 0
        """Steps whose micro-batches were all handed out: a DataLoader with workers asks for more than it has given."""

    @property
    def micro_steps(self) -> int:
        """Micro-batches of every rank in a step: gradient_accumulation_steps."""
        return self._plan.gradient_accumulation_steps

    @property
    def weights(self) -> list[float]:
        """Return the factor of the loss of each micro-batch of a step: 0 for a filler (stream.Batch)."""
        weight = weight_of(self._plan)
        return [0.0 if ids[0] < 0 else weight for ids in self._ids(0)]

    def at(self, step: int) -> list[list[int]]:
        """Return this rank's micro-batches of a step, counted from 0, each as indices of samples. Raises IndexError."""
        if step < 0 or (self.total_steps is not None and step >= self.total_steps):
            raise IndexError(f"the sampler has no step {step}: it has {self.total_steps}, from 0 on")
        ids = self._ids(step)
        return [[int(index) for index in micro_batch] for micro_batch in np.where(ids < 0, ~ids, ids)]

    def __iter__(self) -> Iterator[list[int]]:
        while self.total_steps is None or self.step < self.total_steps:
            yield from self.at(self.step)
            self.step += 1

    def __len__(self) -> int:
        if self.total_steps is None:
            raise TypeError("a sampler without total_steps has no length")
        return max(0, self.total_steps - self.step) * self.micro_steps

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state after `step` steps: plain values, equal on every rank."""
        return {"step": step, **self.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of a state. Raises DataError if it is of another order or batch."""
        self.step = check_same_stream(self, state)

    def _ids(self, step: int) -> NDArray[np.int64]:
        """Return the sample ids of a step, int64 [micro_steps, micro_batch]; those of fillers are inverted."""
        ids = rank_sample_ids(self._order, self._plan, step * self._plan.global_batch_size)
        return ids.reshape(self.micro_steps, self._plan.micro_batch_size)


def batch_sampler(
    num_samples: int,
    *,
    global_batch: int,
    seed: int,
    micro_batch: int = 1,
    total_steps: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    shuffle: bool = True,
) -> BatchSampler:
    """Return the order of a dataset of `num_samples` for `DataLoader(dataset, batch_sampler=...)`.

    The arguments are those of `open_stream`. Raises ConfigError.
    """
    if num_samples < 1:
        raise ConfigError(f"num_samples = {num_samples}: it must be at least 1.")
    plan = share_of(global_batch, micro_batch, rank, world_size)
    return BatchSampler(SampleOrder([num_samples], seed=seed, shuffle=shuffle), plan, total_steps)
