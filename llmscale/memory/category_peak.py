"""Live bytes by category while DeepSpeed's allocations are followed in order. No torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from llmscale.memory.breakdown import Breakdown

Kind = Literal["parameters", "gradients", "optimizer", "buckets", "temporaries"]


class Tally:
    """Takes allocations and releases, and remembers the moment with the most live bytes since the last `take_peak`."""

    def __init__(self) -> None:
        self._live: dict[Kind, int] = dict.fromkeys(
            ("parameters", "gradients", "optimizer", "buckets", "temporaries"), 0
        )
        self._peak, self._peak_bytes, self._bytes = dict(self._live), 0, 0

    def hold(self, kind: Kind, num_bytes: int) -> None:
        self._live[kind] += num_bytes
        self._bytes += num_bytes
        if self._bytes > self._peak_bytes:
            self._peak, self._peak_bytes = self._live.copy(), self._bytes

    def drop(self, kind: Kind, num_bytes: int) -> None:
        self._live[kind] -= num_bytes
        self._bytes -= num_bytes

    def touch(self, kind: Kind, num_bytes: int) -> None:
        """Allocate and release at once."""
        self.hold(kind, num_bytes)
        self.drop(kind, num_bytes)

    @property
    def now(self) -> Breakdown:
        return _breakdown(*self._live.values())

    @property
    def state(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """All that later peaks depend on."""
        return tuple(self._live.values()), tuple(self._peak.values())

    def take_peak(self) -> Breakdown:
        """The peak since the last call; what is alive now is where the next one starts."""
        peak = _breakdown(*self._peak.values())
        self._peak, self._peak_bytes = self._live.copy(), self._bytes
        return peak


@lru_cache(maxsize=4096)
def _breakdown(parameters: int, gradients: int, optimizer: int, buckets: int, temporaries: int) -> Breakdown:
    """In the order of `Kind`. Equal blocks of a model have equal peaks, one object for all of them."""
    return Breakdown(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        buckets_bytes=buckets,
        temporaries_bytes=temporaries,
    )
