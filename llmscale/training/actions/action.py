"""What an action is: something that happens at the end of some steps, such as logging or saving."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from llmscale.data.loader import MicroBatch


@dataclass(frozen=True)
class DoneStep:
    """What a step leaves behind."""

    step: int
    """Optimizer steps done, this one included."""
    micro_batches: list[MicroBatch]
    """What this rank trained on."""
    loss: Tensor
    """This rank's mean loss in nats per token: a scalar on the device, not read yet."""
    was_skipped: bool
    """DeepSpeed left the weights as they were, because of overflow."""


class StepAction(ABC):
    """Has its own state, and is told of the rest when it is built. Every rank calls every method at the same step."""

    def begin(self, step: int) -> None:  # noqa: B027  most have nothing to begin
        """Training begins after `step`, or its run folder had to be made again there."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether it happens after `step`, counted from 1; the same on every rank, unless nothing in it is done
        together."""

    @abstractmethod
    def act(self, done: DoneStep) -> None:
        """Let it happen."""

    def close(self) -> None:  # noqa: B027
        """The session ends, perhaps by an error on this rank alone: no collectives."""
