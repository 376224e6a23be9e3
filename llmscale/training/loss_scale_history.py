"""What fp16's loss scale has done, and when it has collapsed. No torch."""

from __future__ import annotations

from collections import deque

#: Changes that are remembered.
_MOST = 24
#: At or below this, and this many times below where it has been, it is about to reach its floor, usually 1, where
#: DeepSpeed gives up: a few more overflows.
_LOW, _FALL = 16.0, 16.0


class LossScaleHistory:
    """Of the steps at which it was looked at."""

    def __init__(self) -> None:
        self._changes: deque[tuple[int, float]] = deque(maxlen=_MOST)

    def add(self, step: int, scale: float | None) -> None:
        """The scale after `step`; None without fp16."""
        if scale is not None and (not self._changes or self._changes[-1][1] != scale):
            self._changes.append((step, scale))

    @property
    def changes(self) -> list[tuple[int, float]]:
        """(step, scale), the newest last."""
        return list(self._changes)

    @property
    def has_collapsed(self) -> bool:
        if not self._changes:
            return False
        now, highest = self._changes[-1][1], max(scale for _, scale in self._changes)
        return now <= _LOW and now * _FALL <= highest

    def describe(self) -> str:
        """The last few in one line."""
        return "loss scale " + " -> ".join(f"{scale:g} (step {step})" for step, scale in self.changes[-6:])
