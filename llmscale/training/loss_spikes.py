"""Loss spikes: detected, reported, and the checkpoint before them kept. See docs/watching.md.

A loss or a gradient norm is compared with the steps before it by a robust z-score,

    z = (value - median) / max(1.4826 x MAD, minimum share x |median|)

over the last WINDOW steps. MAD is the median of the absolute differences from the median: 1.4826 times it is the
standard deviation of a normal distribution (Hampel 1974; Iglewicz & Hoaglin 1993), and up to half of the steps may be
spikes before it moves. The minimum share keeps a curve that hardly varies from calling everything a spike.
"""

from __future__ import annotations

import math
import shlex
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from llmscale.checkpoint.inventory import find_checkpoints, pin_checkpoint
from llmscale.checkpoint.manifest import Checkpoint
from llmscale.errors import CheckpointError
from llmscale.training.live_run import Run, RunIO
from llmscale.training.notify import notify_in_background
from llmscale.training.stop_request import StopRequest
from llmscale.training.stragglers import LoggedWindow

#: Steps that a step is compared with, and the fewest of them.
WINDOW, MIN_STEPS = 128, 20
#: Scores of a spike: of the loss alone, or of the loss and the gradient norm together. A norm alone does not count:
#: clipping corrects it, and with small batches it happens every few hundred steps.
LOSS_Z, BOTH_LOSS_Z, BOTH_NORM_Z = 8.0, 4.0, 8.0
#: Steps below BOTH_LOSS_Z after which another spike is reported.
QUIET_STEPS = 10
_LOSS_MIN_SHARE, _NORM_MIN_SHARE = 0.01, 0.1
_NORMAL_MAD = 1.4826
#: The previous step made the weights that spiked: its batch is skipped too, and the checkpoint must be older.
_STEPS_BEFORE = 1


@dataclass(frozen=True)
class Spike:
    """The first step of a spike."""

    step: int
    loss: float
    loss_z: float
    grad_norm: float | None
    grad_norm_z: float | None


class SpikeDetector:
    """Judges steps one after the other."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._quiet = QUIET_STEPS
        self.last_step: int | None = None
        """The newest step of the newest spike."""

    def add(self, step: int, loss: float, grad_norm: float | None) -> Spike | None:
        """Judge the next step, and return the spike that begins with it. NaN is left to training/nonfinite.py."""
        if not math.isfinite(loss):
            return None
        loss_z = robust_z(loss, self._losses, _LOSS_MIN_SHARE)
        norm_z = None if grad_norm is None else robust_z(grad_norm, self._norms, _NORM_MIN_SHARE)
        self._losses.append(loss)
        if grad_norm is not None and math.isfinite(grad_norm):
            self._norms.append(grad_norm)
        if loss_z is None:
            return None
        if loss_z >= LOSS_Z or (loss_z >= BOTH_LOSS_Z and (norm_z or 0.0) >= BOTH_NORM_Z):
            is_new, self._quiet, self.last_step = self._quiet >= QUIET_STEPS, 0, step
            return Spike(step, loss, loss_z, grad_norm, norm_z) if is_new else None
        self._quiet = self._quiet + 1 if loss_z < BOTH_LOSS_Z else 0
        return None


def robust_z(value: float, before: deque[float], min_share: float) -> float | None:
    """Return the robust z-score of `value` relative to the values before it; None while there are too few."""
    if len(before) < MIN_STEPS:
        return None
    known = np.array(before)
    median = float(np.median(known))
    spread = _NORMAL_MAD * float(np.median(np.abs(known - median)))
    return (value - median) / max(spread, min_share * abs(median), 1e-12)


@dataclass
class RollbackRequest:
    """Rank 0's request to roll back, until all ranks have voted on it."""

    rollback_from: tuple[int, int] | None = None
    """First and newest step of the spike to roll back from."""
    num_rollbacks: int = 0
    finish_saving: Callable[[], None] = lambda: None
    """Waits for the checkpoint that is being written in the background, perhaps the one before the spike."""


class WatchSpikes:
    """Judges on rank 0 every step since the last logged one; the ranks vote on rollback before the next step."""

    def __init__(self, run: Run, io: RunIO, rollback: RollbackRequest, stop: StopRequest) -> None:
        self._run, self._io, self._rollback, self._stop = run, io, rollback, stop
        self._detector = SpikeDetector()

    def check(self, step: int, window: LoggedWindow) -> None:
        """Judge the steps exchanged at a logged step. On rank 0."""
        for recent in window.steps:
            spike = self._detector.add(recent.step, recent.loss, recent.grad_norm)
            if spike is not None:
                self._report(spike)
        wanted = self._rollback.rollback_from
        if wanted is not None:
            self._rollback.rollback_from = (wanted[0], self._detector.last_step or wanted[1])

    def _report(self, spike: Spike) -> None:
        run, io, config = self._run, self._io, self._run.config
        self._rollback.finish_saving()
        before = checkpoint_before(run, spike.step)
        kept = "no checkpoint is older" if before is None else _keep(before, spike.step)
        which = f"llmscale data which {shlex.quote(str(config.run))} --step {spike.step}"
        norm = "" if spike.grad_norm is None else f", gradient norm {spike.grad_norm:.3g}{_sigmas(spike.grad_norm_z)}"
        io.report(
            f"WARNING: step {spike.step}: the loss leaps to {spike.loss:.4f}{_sigmas(spike.loss_z)}{norm}; {kept}. "
            f"After the next checkpoint, this shows its samples: {which}"
        )
        facts = {
            **asdict(spike),
            "samples": [which],
            "checkpoint": str(before.path) if before else None,
            "on_spike": config.on_spike,
        }
        io.log_event("loss_spike", **facts)
        notify_in_background(config.notify, config.run, "spike", {"total_steps": run.resolved.total_steps, **facts})
        if config.on_spike == "skip":
            self._rollback.rollback_from = self._rollback.rollback_from or (spike.step, spike.step)
        elif config.on_spike == "stop":
            self._stop.received.append(f"--on-spike stop: the loss spike at step {spike.step}")
            io.report(rollback_advice(run, before, (spike.step, spike.step)))


def _keep(before: Checkpoint, step: int) -> str:
    try:
        pin_checkpoint(before.path, f"before the loss spike at step {step}")
    except (OSError, CheckpointError) as error:
        return f"the checkpoint before it, {before.path.name}, cannot be kept: {error}"
    return f"the checkpoint before it, {before.path.name}, is kept"


def checkpoint_before(run: Run, step: int) -> Checkpoint | None:
    """Return the newest complete checkpoint of this history from before everything that led to the spike at `step`."""
    try:
        saved = find_checkpoints(run.config.run, run.history).current
    except CheckpointError:
        return None
    fit = (one for one in saved if one.step < step - _STEPS_BEFORE and one.is_whole())
    return next(fit, None)


def steps_to_skip(run: Run, spike: tuple[int, int]) -> str:
    """Return A:B of --skip-steps for a spike's first and newest step.

    A range of the same name that was applied means other samples now, so this one skips a step more.
    """
    first, behind = max(1, spike[0] - _STEPS_BEFORE), spike[1] + 1
    known = {skip.steps for skip in run.stream.skips}
    while f"{first}:{behind}" in known:
        behind += 1
    return f"{first}:{behind}"


def rollback_advice(run: Run, before: Checkpoint | None, spike: tuple[int, int]) -> str:
    """Return the flags that skip the spike's batches, in one line."""
    skip = f"--skip-steps {steps_to_skip(run, spike)}"
    if before is None:
        return f"to continue without its batches, start again with the same command, another --run and {skip}"
    return f"to continue without its batches, add to the same command: --resume {shlex.quote(str(before.path))} {skip}"


def _sigmas(z: float | None) -> str:
    return "" if z is None else f" ({z:+.1f} sigma)"
