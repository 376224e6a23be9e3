"""How long a rank takes for arithmetic in which it waits for no other rank.

Below stage 3 a forward pass exchanges nothing: it is timed as a whole. At stage 3 every module waits for weights; the
output head, once it has its own, computes alone. One forward pass is timed after each logged step, with a hook that
goes when it is over; on a GPU by events, which nobody waits for until they are long past.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_Mark = float | torch.cuda.Event


class ArithmeticProbe:
    """Of this rank's engine."""

    def __init__(self, engine: DeepSpeedEngine, zero_stage: int) -> None:
        self._module: nn.Module = engine.module.head if zero_stage == 3 else engine.module
        self._handles: list[RemovableHandle] = []
        self._begin: _Mark | None = None
        self._end: _Mark | None = None

    def arm(self) -> None:
        """Time the next forward pass of training."""
        self._remove()
        self._begin = self._end = None
        # Behind DeepSpeed's own hook, which gathers; and before the one that lets go.
        self._handles = [
            self._module.register_forward_pre_hook(self._enter),
            self._module.register_forward_hook(self._leave, prepend=True),
        ]

    def read(self) -> float:
        """Seconds of what was timed last; 0 for nothing. Waits for the device where it has just happened."""
        if self._begin is None or self._end is None:
            return 0.0
        if isinstance(self._begin, float) or isinstance(self._end, float):
            return float(self._end) - float(self._begin)  # type: ignore[arg-type]  # both are of one kind
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1000

    def _enter(self, module: nn.Module, _inputs: object) -> None:
        if module.training and self._begin is None:
            self._begin = _mark()

    def _leave(self, module: nn.Module, _inputs: object, _output: object) -> None:
        if module.training and self._begin is not None:
            self._end = _mark()
            self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _mark() -> _Mark:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
