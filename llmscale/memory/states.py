"""Count the bytes that ZeRO holds on a rank at each moment of a step, as the estimate asks for them. No torch.

`complete`: gradients that are complete; `handing` beside it: those of a layer that is handing its gradients over.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from llmscale.architecture.layers import ParameterTensor, ParameterTensors
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.gathers import follow_gathers, persistent_parameters, second_copies
from llmscale.memory.zero_setup import ZeroSetup


class Added(NamedTuple):
    """Bytes beside those that stay between steps."""

    parameters: float = 0.0
    gradients: float = 0.0
    buckets: float = 0.0
    temporaries: float = 0.0

    def with_more(self, other: Added) -> Added:
        """Return the sum."""
        # Spelt out: estimates of large models do this thousands of times.
        return Added(
            parameters=self.parameters + other.parameters,
            gradients=self.gradients + other.gradients,
            buckets=self.buckets + other.buckets,
            temporaries=self.temporaries + other.temporaries,
        )

    @property
    def breakdown(self) -> Breakdown:
        return Breakdown(
            parameters_bytes=math.ceil(self.parameters),
            gradients_bytes=math.ceil(self.gradients),
            buckets_bytes=math.ceil(self.buckets),
            temporaries_bytes=math.ceil(self.temporaries),
        )


NOTHING = Added()

#: (gradients of a block that are complete, those being handed over, between all-gathers) at each moment of its
#: backward pass.
Handed = tuple[tuple[float, float, bool], ...]


def largest_addition(options: Iterable[Added]) -> Added:
    return max(options, key=sum, default=NOTHING)


def resident_bytes(parameters: float, gradients: float = 0, optimizer: float = 0, buckets: float = 0) -> Breakdown:
    """Return what stays between steps."""
    return Breakdown(
        parameters_bytes=math.ceil(parameters),
        gradients_bytes=math.ceil(gradients),
        optimizer_bytes=math.ceil(optimizer),
        buckets_bytes=math.ceil(buckets),
    )


def layers_in_order(tensors: ParameterTensors) -> list[tuple[ParameterTensor, ...]]:
    """Return the parameters of each layer as gradients appear: a tied table at the head, and () at the look-up."""
    table = (tensors.table,)
    if not tensors.tied:
        return list(tensors.gradient_order)
    return [table, *(() if layer == table else layer for layer in tensors.gradient_order)]


class Gathered:
    """Bytes of parameters that stage 3 has gathered, beside persistent ones, through a micro-step."""

    def __init__(self, tensors: ParameterTensors, setup: ZeroSetup, recomputes: bool) -> None:
        passes = tensors.architecture.n_layer + 3
        persistent = persistent_parameters(tensors.all, setup)
        copies = second_copies(tensors.all, setup)
        # Copies that hpZ has made in earlier micro-steps.
        lasting = copies.keys() - persistent
        if not setup.accumulates:  # those of frozen parameters, which no step makes invalid
            lasting &= {tensor.index for tensor in tensors.frozen_tensors}
        held = sum(copies[index] for index in lasting)
        moments = follow_gathers(tensors, setup, recomputes)
        self.forward = [moment.peak_bytes + held for moment in moments[:passes]]
        # The logits are gone when the head is released, and copied for hpZ.
        self.forward[-1] = moments[passes - 1].live_bytes + held
        self._peaks = [moment.peak_bytes + held for moment in moments[passes:]]
        self._live = [moment.live_bytes + held for moment in moments[passes:]]
        self.settled_forward = [moment.settled_bytes + held for moment in moments[:passes]]
        self._settled = [moment.settled_bytes + held for moment in moments[passes:]]
        sizes = (sum(tensor.elements for tensor in layer) for layer in layers_in_order(tensors))
        self._complete = list(accumulate(sizes, initial=0))

    def _at(self, complete: float) -> int:
        """Return the first interval that begins with `complete` gradients, or the last one with fewer."""
        place = bisect_left(self._complete, complete)
        is_there = place < len(self._complete) and self._complete[place] == complete
        if is_there:
            return place
        return max(0, place - 1)

    def peak(self, complete: float) -> float:
        """Return the largest bytes from the moment at which `complete` gradients are there until the next ones are."""
        return self._peaks[self._at(complete)]

    def settled(self, complete: float) -> float:
        """Return the largest bytes of this time between all-gathers."""
        return self._settled[self._at(complete)]

    def live(self, complete: float) -> float:
        """Return the bytes while DeepSpeed takes the last of `complete` gradients."""
        return self._live[self._at(complete)]

    @cached_property
    def largest(self) -> float:
        """Largest bytes of the backward pass."""
        return max(*self._peaks, *self._live)

    @property
    def after_backward(self) -> float:
        """Bytes that are still gathered when the backward pass is over."""
        return self._live[-1]

    @property
    def at_end(self) -> float:
        """While DeepSpeed takes the last gradients."""
        return self._live[len(self._complete) - 1]


@dataclass
class States:
    """Bytes on the GPU: what stays between steps, and additions to it."""

    resident: Breakdown
    step: Added
    end: Added
    """Largest after the last gradient."""
    gradients: Callable[[float], Added]
    """After a number of gradients, `before` included."""
    handing: Callable[[float, float], Added]
    """While a layer hands its gradients over, beside `gradients`."""
    before: Added = NOTHING
    """From the beginning of a forward pass: what earlier micro-steps have left."""
    gathered: Gathered | None = None
    trained: Callable[[float], float] = float
    """Return how many of a number of gradients belong to trained parameters."""
    moving_bytes: float = 0.0
    """Bytes of the largest reduction, and of sums that reductions free."""
    host_bytes: float = 0.0
    nvme_bytes: float = 0.0
    known: dict[tuple[float, Handed], tuple[list[Added], list[float]]] = field(default_factory=dict)
    """Results of `in_block`."""

    def in_forward(self, place: int, *, is_settled: bool = False) -> Added:
        """Return the addition in the forward pass of the embeddings (0), a block (from 1), the final norm, the loss.

        `is_settled`: between all-gathers.
        """
        if self.gathered is None:
            return self.before
        gathered = self.gathered.settled_forward if is_settled else self.gathered.forward
        return self.before._replace(parameters=self.before.parameters + gathered[place])

    def in_block(self, complete: float, handed: Handed) -> tuple[list[Added], list[float]]:
        """Return the additions, and the bytes of each, at the moments of a block that begins after some gradients.

        Other lengths and micro-batches of the same states ask for the same again.
        """
        if (complete, handed) not in self.known:
            added = [
                self.in_backward(complete + before, handing, is_settled=is_settled)
                for before, handing, is_settled in handed
            ]
            self.known[complete, handed] = added, list(map(sum, added))
        return self.known[complete, handed]

    @cached_property
    def most_in_forward(self) -> float:
        """Bytes that no addition in a forward pass exceeds."""
        return sum(self.before) + (max(self.gathered.forward) if self.gathered else 0)

    def most_in_block(self, handing: float) -> float:
        """Return bytes that no addition in blocks exceeds, whose layers hand over at most `handing` gradients."""
        added = sum(self.gradients(math.inf)) + sum(self.handing(math.inf, handing)) + self.moving_bytes
        return added + (self.gathered.largest if self.gathered else 0)

    def in_backward(self, complete: float, handing: float = 0, *, is_settled: bool = False) -> Added:
        """Return the addition after `complete` gradients, while a layer hands others over.

        `is_settled`: between all-gathers.
        """
        begin = self.trained(complete)
        added = self.gradients(begin)
        if handing:
            added = added.with_more(self.handing(begin, self.trained(complete + handing) - begin))
        if self.gathered is None:
            return added
        if handing:
            gathered = self.gathered.live(complete + handing)
        elif is_settled:
            gathered = self.gathered.settled(complete)
        else:
            gathered = self.gathered.peak(complete)
        return added._replace(parameters=added.parameters + gathered)
