"""What an estimate of DeepSpeed's own memory says. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from llmscale.config.deepspeed.schema import Dtype
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.zero_settings import BYTES_PER_ELEMENT


@dataclass(frozen=True)
class BackwardMoment:
    """A stretch of the backward pass."""

    parameters_done: int
    """Parameters whose gradients exist when it begins; the tied table counts as soon as the head has its gradient."""
    handover: Breakdown
    """Most that is live beyond the resident memory while DeepSpeed is handed the gradients that it begins with."""
    rest: Breakdown
    """The same from then on until the next gradient appears."""

    @property
    def extra(self) -> Breakdown:
        """The same in all of it."""
        return max(self.handover, self.rest, key=lambda extra: extra.total_bytes)


def fuller(moments: Sequence[BackwardMoment]) -> BackwardMoment:
    """The same stretch of several micro-steps, each part where most is live."""
    handover = max((moment.handover for moment in moments), key=lambda extra: extra.total_bytes)
    rest = max((moment.rest for moment in moments), key=lambda extra: extra.total_bytes)
    return BackwardMoment(moments[0].parameters_done, handover, rest)


@dataclass(frozen=True)
class StateMemory:
    """One rank's memory without activations, in the last micro-step of a step once the engine has settled."""

    resident: Breakdown
    """Between steps, on the GPU."""
    forward_course: tuple[Breakdown, ...]
    """Live beyond that while the forward pass runs the embeddings, each block in turn, the head until it has its
    weights, and its logits and the loss; with what earlier micro-steps have left. n_layer + 3 entries."""
    backward_course: tuple[BackwardMoment, ...]
    """The same for the backward pass, in the order of time."""
    step: Breakdown
    """Most that is live beyond the resident memory in the optimizer step."""
    host_bytes: int = 0
    """In host memory, by this rank."""
    nvme_bytes: int = 0
    """On disk, by this rank."""

    @property
    def forward(self) -> Breakdown:
        """Most that the forward pass adds."""
        return max(self.forward_course, key=lambda extra: extra.total_bytes)

    @property
    def backward(self) -> Breakdown:
        """Most that the backward pass adds."""
        return max((moment.extra for moment in self.backward_course), key=lambda extra: extra.total_bytes)

    @cached_property
    def parameters_done(self) -> list[int]:
        """Of each moment of the backward pass."""
        return [moment.parameters_done for moment in self.backward_course]

    @cached_property
    def backward_bytes(self) -> list[int]:
        """What each of those moments adds."""
        return [moment.extra.total_bytes for moment in self.backward_course]

    @cached_property
    def backward_rest_bytes(self) -> list[int]:
        """What each of them adds once its gradients were handed over."""
        return [moment.rest.total_bytes for moment in self.backward_course]


@dataclass
class HostMemory:
    """Adds up tensors in host memory."""

    pin_memory: bool
    num_bytes: int = 0

    def pinned(self, elements: int, dtype: Dtype) -> None:
        """A buffer that DeepSpeed page-locks where the config says so. PyTorch's allocator of page-locked memory hands
        out powers of two (aten/src/ATen/core/CachingHostAllocator.h)."""
        num_bytes = elements * BYTES_PER_ELEMENT[dtype]
        self.num_bytes += 1 << (num_bytes - 1).bit_length() if self.pin_memory and num_bytes else num_bytes

    def pageable(self, elements: int, dtype: Dtype) -> None:
        """Ordinary memory."""
        self.num_bytes += elements * BYTES_PER_ELEMENT[dtype]
