"""Which tensors are alive at each moment of a pass through the model, as a script that holds and drops them by name. No
torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["activation", "temporary", "cast"]


@dataclass(frozen=True)
class Moment:
    """Live bytes at one moment of a backward pass, by what they are."""

    activations_bytes: int
    """Made by the forward pass, or again by a recomputation."""
    temporaries_bytes: int
    """Gradients of activations, and work space of kernels."""
    casts_bytes: int
    """Weights in 16 bit that autocast made of fp32 ones."""
    gradient_parameters: int
    """Parameters whose gradients have appeared since the ledger was opened; their bytes are not in the sums above."""

    @property
    def total_bytes(self) -> int:
        return self.activations_bytes + self.temporaries_bytes + self.casts_bytes


class Ledger:
    """Live tensors by name, and every moment at which their sum grew."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._held: dict[str, tuple[Kind, int]] = {}
        self._bytes: dict[Kind, int] = {"activation": 0, "temporary": 0, "cast": 0}
        self._gradient_parameters = 0

    def keep(self, **activations: int) -> None:
        """Results of the forward pass appear, in bytes; those that are alive already stay as they are."""
        self._hold("activation", activations)

    def use(self, **temporaries: int) -> None:
        """Results of the backward pass appear, in bytes."""
        self._hold("temporary", temporaries)

    def cast(self, **weights: int) -> None:
        """16-bit copies of weights appear, in bytes."""
        self._hold("cast", weights)

    def gradient(self, parameters: int) -> None:
        """The gradients of so many parameters appear."""
        self._gradient_parameters += parameters
        self._record()

    def drop(self, *names: str) -> None:
        """The last reference goes; a name that is not held is passed over."""
        for name in names:
            if name in self._held:
                kind, size = self._held.pop(name)
                self._bytes[kind] -= size

    def rename(self, old: str, new: str) -> None:
        self._held[new] = self._held.pop(old)

    @property
    def now(self) -> Moment:
        kinds = self._bytes
        return Moment(kinds["activation"], kinds["temporary"], kinds["cast"], self._gradient_parameters)

    @property
    def peak_bytes(self) -> int:
        return max((moment.total_bytes for moment in self.moments), default=0)

    def _hold(self, kind: Kind, tensors: dict[str, int]) -> None:
        for name, size in tensors.items():
            if name not in self._held:
                self._held[name] = (kind, size)
                self._bytes[kind] += size
        self._record()

    def _record(self) -> None:
        self.moments.append(self.now)


def moments_that_matter(moments: list[Moment]) -> tuple[Moment, ...]:
    """Those that no later moment exceeds: gradients only become more, so a smaller earlier moment is never a peak."""
    kept: list[Moment] = []
    for moment in reversed(moments):
        if not kept or moment.total_bytes > kept[-1].total_bytes:
            kept.append(moment)
    return tuple(reversed(kept))
