"""Loss spikes: detected, reported, and the checkpoint before them kept. See docs/watching.md.

A loss or a gradient norm is compared with the steps before it by a robust z-score,

    z = (value - median) / max(1.4826 x MAD, minimum share x |median|)

over the last WINDOW steps. MAD is the median of the absolute differences from the median: 1.4826 times it is the
standard deviation of a normal distribution (Hampel 1974; Iglewicz & Hoaglin 1993), and up to half of the steps may be
spikes before it moves. The minimum share keeps a curve that hardly varies from calling everything a spike.

NaN and infinity in losses, gradients or weights: where they begin, and the end of a run that cannot recover.
"""

from __future__ import annotations

import math
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmscale.checkpoint.inventory import find_checkpoints, pin_checkpoint
from llmscale.checkpoint.manifest import Checkpoint, checkpoints_folder
from llmscale.engine.collectives import gather
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.loss_scale import loss_scale
from llmscale.errors import CheckpointError, TrainingError
from llmscale.training.live_run import Engine, LoggedWindow, Run, RunIO, StepAction, StepResult
from llmscale.training.run_folder import notify_in_background
from llmscale.training.stop_request import StopRequest

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


#: Steps that a step is compared with, and the fewest of them.
WINDOW = 128
MIN_STEPS = 20
#: Scores of a spike: of the loss alone, or of the loss and the gradient norm together. A norm alone does not count:
#: clipping corrects it, and with small batches it happens every few hundred steps.
LOSS_Z = 8.0
BOTH_LOSS_Z = 4.0
BOTH_NORM_Z = 8.0
#: Steps below BOTH_LOSS_Z after which another spike is reported.
QUIET_STEPS = 10
_LOSS_MIN_SHARE = 0.01
_NORM_MIN_SHARE = 0.1
_NORMAL_MAD = 1.4826
#: The previous step made the weights that spiked: its batch is skipped too, and the checkpoint must be older.
_STEPS_BEFORE = 1
#: Consecutive bad steps that end a run. One bad batch costs one step, which DeepSpeed skips. Ten different batches in a
#: row are not to blame.
PATIENCE_STEPS = 10
#: Parameters that an event lists, and that a line lists.
_MAX_NAMES = 8
_MAX_LINE_NAMES = 3
#: Remembered changes of the loss scale.
_MAX_CHANGES = 24
#: A scale that is at most this, and has fallen by at least this factor, is about to reach its minimum, usually 1, where
#: DeepSpeed gives up.
_LOW_SCALE = 16.0
_FALL = 16.0
_ADVICE = {
    "loss": "lower --lr, lengthen the warm-up, or look at the samples",
    "gradients": "lower --lr, lengthen the warm-up, or look at the samples",
    "loss scale": "lower --lr, or use --precision bf16, which has no scale",
    # A scale that overflow does not lower, and one that waits out its hysteresis.
    "static scale": "lower fp16.loss_scale in the ds_config, or remove it for a dynamic scale, or use --precision "
    "bf16, which has none",
    "hysteresis": "lower fp16.hysteresis in the ds_config, or use --precision bf16, which has no scale",
}


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
        """Judge the next step, and return the spike that begins with it. NaN is left to training/loss_spikes.py."""
        if not math.isfinite(loss):
            return None
        loss_z = robust_z(loss, self._losses, _LOSS_MIN_SHARE)
        if grad_norm is None:
            norm_z = None
        else:
            norm_z = robust_z(grad_norm, self._norms, _NORM_MIN_SHARE)
        self._losses.append(loss)
        if grad_norm is not None and math.isfinite(grad_norm):
            self._norms.append(grad_norm)
        if loss_z is None:
            return None
        if loss_z >= LOSS_Z or (loss_z >= BOTH_LOSS_Z and (norm_z or 0.0) >= BOTH_NORM_Z):
            is_new = self._quiet >= QUIET_STEPS
            self._quiet = 0
            self.last_step = step
            if is_new:
                return Spike(step, loss, loss_z, grad_norm, norm_z)
            return None
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
        self._run = run
        self._io = io
        self._rollback = rollback
        self._stop = stop
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
        run = self._run
        io = self._io
        config = self._run.config
        self._rollback.finish_saving()
        before = checkpoint_before(run, spike.step)
        if before is None:
            outcome = "no checkpoint is older"
        else:
            outcome = _keep(before, spike.step)
        which = f"llmscale data which {shlex.quote(str(config.run))} --step {spike.step}"
        if spike.grad_norm is None:
            norm = ""
        else:
            norm = f", gradient norm {spike.grad_norm:.3g}{_sigmas(spike.grad_norm_z)}"
        io.report(
            f"WARNING: step {spike.step}: the loss leaps to {spike.loss:.4f}{_sigmas(spike.loss_z)}{norm}; {outcome}. "
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
    first = max(1, spike[0] - _STEPS_BEFORE)
    behind = spike[1] + 1
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


class StopOnNonfinite(StepAction):
    """Stop a run after `PATIENCE_STEPS` consecutive steps with a NaN or infinite loss or gradient.

    Every step is recorded on the device; the count is read at logged steps, where the host synchronises anyway, and
    after every step once one was bad. After the first bad step, hooks on every module find the first parameter affected
    during the next step. They do so again only after a good step.
    """

    def __init__(self, run: Run, engine: Engine, io: RunIO, judges_at: Callable[[int], bool]) -> None:
        """`judges_at` tells whether a step is logged."""
        super().__init__(run, engine, io)
        self._judges_at = judges_at
        self._counter = NonfiniteCounter(run.world.device)
        self._scale = loss_scale(engine.deepspeed)
        self._searches_scale = self._scale is not None and engine.deepspeed.dynamic_loss_scale()
        self._scales = LossScaleHistory()
        self._skipped = engine.skipped_steps
        self._num_taken = 0
        """Steps of this start that changed the weights."""
        self._search: tuple[NonfiniteSearch, str, int] | None = None
        """The search during the current step, its cause, and the first bad step."""
        self._is_reported = False
        self._first_names = ""

    def due(self, step: int) -> bool:
        return True

    def run(self, result: StepResult) -> None:
        before = self._scale
        self._scale = loss_scale(self._engine.deepspeed)
        # A skipped step that lowers fp16's scale belongs to the search for it; the smallest scale ends such a run.
        self._counter.add(result, skipped=result.was_skipped and self._scale == before)
        self._num_taken += not result.was_skipped
        if self._search is not None or self._is_reported or self._judges_at(result.step):
            self._judge(result)

    def close(self) -> None:
        if self._search is not None:
            self._search[0].close()

    def _judge(self, result: StepResult) -> None:
        """Raise TrainingError after too many bad steps, or begin or end a search. Collective; equal on every rank."""
        step = result.step
        worst = self._counter.max_consecutive()
        is_last = step == self._run.resolved.total_steps
        if self._search is not None:
            search, cause, begun = self._search
            self._search = None
            self._report_search(search, cause, begun, is_bad=worst > 0 or result.was_skipped)
        self._scales.add(step, self._scale)
        advice = self._advice("gradients" if torch.isfinite(result.loss) else "loss")
        if worst >= PATIENCE_STEPS and (self._is_reported or is_last):
            what = f"last {worst} steps had a loss or a gradient that is NaN or infinite"
            raise _diverged(what, step, self._run.config.run, advice, self._first_names)
        if is_last and not self._num_taken:
            raise TrainingError(
                f"step {step}: DeepSpeed skipped every step of this start, because gradients were NaN or infinite: "
                f"nothing was trained. {_capitalised(advice)}; a dynamic scale needs more steps."
            )
        new_cause = self._find_cause(step, worst)
        if new_cause is not None and not self._is_reported:
            if is_last:
                self._report(*new_cause, "no step follows that could tell where")
            else:
                self._search = (NonfiniteSearch(self._engine.deepspeed, self._engine.compiler), *new_cause)
        self._is_reported = new_cause is not None

    def _find_cause(self, step: int, worst: int) -> tuple[str, int] | None:
        """Return what went wrong since the last call and the step where it began, or None."""
        skipped = self._engine.skipped_steps - self._skipped
        self._skipped = self._engine.skipped_steps
        bad = [known.step for known in self._engine.recent.window.steps if not math.isfinite(known.loss)]
        if self._judges_at(step) and bad:
            return "loss", bad[0]
        if self._scales.has_collapsed:
            return "loss scale", step
        # A search waits by default for a second overflow before it lowers the scale.
        if worst > self._searches_scale or (skipped and not self._searches_scale):
            return "gradients", max(1, step - max(worst, 1) + 1)
        return None

    def _report_search(self, search: NonfiniteSearch, cause: str, step: int, *, is_bad: bool) -> None:
        """Report the findings of the step that just ended, which was bad too or not. Collective."""
        by_rank = gather(self._run.world.control, search.end())
        ranks = [rank for rank, (forward, backward) in enumerate(by_rank) if forward or backward]
        forward, backward = by_rank[ranks[0]] if ranks else ((), ())
        names = (forward or backward)[:_MAX_NAMES]
        self._first_names = ", ".join(names[:_MAX_LINE_NAMES])
        direction = "forward" if forward else "backward"
        if names:
            place = f"first in {self._first_names} ({direction} pass, rank {ranks[0]})"
        elif is_bad:
            place = "and again at the next step, in no gradient of a micro-batch but in their sum or norm"
        else:
            place = "gone at the next step"
        facts = {"parameters": names, "pass": direction if names else None, "ranks": ranks}
        self._report(cause, step, place, **facts)

    def _report(self, cause: str, step: int, place: str, **facts: object) -> None:
        """Print and record a cause, the step where it began, and where, with what a search has found."""
        if self._scale is not None:
            scales = f"; {self._scales.describe()}"
        else:
            scales = ""
        if cause == "loss scale":
            what = "the loss scale has collapsed"
        else:
            what = f"{cause} NaN or infinite"
        advice = self._advice(cause)
        self._io.report(f"WARNING: step {step}: {what}, {place}{scales}. Try: {advice}")
        of_search = {"parameters": [], "pass": None, "ranks": [], **facts}
        scale = {"loss_scale": self._scale, "loss_scale_history": list(self._scales)}
        self._io.log_event("nonfinite", step=step, cause=cause, **of_search, **scale, advice=advice)

    def _advice(self, cause: str) -> str:
        if cause == "gradients" and self._scale is not None:
            cause = "hysteresis" if self._searches_scale else "static scale"
        return _ADVICE[cause]


class NonfiniteCounter:
    """Counts consecutive bad steps on the device, without synchronising with it."""

    def __init__(self, device: torch.device) -> None:
        self._consecutive = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, result: StepResult, *, skipped: bool) -> None:
        """Add a step, bad if it was `skipped`, or if its loss or the norm that it was clipped by is NaN or infinite."""
        bad = ~torch.isfinite(result.loss) | skipped
        if result.grad_norm is not None and not result.was_skipped:
            # Clipping by an infinite norm leaves nothing of the gradient.
            bad = bad | ~torch.isfinite(torch.as_tensor(result.grad_norm, device=bad.device))
        self._consecutive = torch.where(bad, self._consecutive + 1, 0)

    def max_consecutive(self) -> int:
        """Return the largest count of any rank. Collective. Synchronises with the device."""
        worst = self._consecutive.clone()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return int(worst)


class LossScaleHistory(deque[tuple[int, float]]):
    """Changes of fp16's loss scale at the steps where it was read: (step, scale), the newest last."""

    def __init__(self) -> None:
        super().__init__(maxlen=_MAX_CHANGES)

    def add(self, step: int, scale: float | None) -> None:
        """Add the scale after `step`; None without fp16."""
        if scale is not None and (not self or self[-1][1] != scale):
            self.append((step, scale))

    @property
    def has_collapsed(self) -> bool:
        return bool(self) and self[-1][1] <= min(_LOW_SCALE, max(scale for _, scale in self) / _FALL)

    def describe(self) -> str:
        """Return the last few changes in one line."""
        return "loss scale " + " -> ".join(f"{scale:g} (step {step})" for step, scale in [*self][-6:])


class NonfiniteSearch:
    """Hooks on a model that find the first NaN or infinity of a forward or backward pass, until `end` or `close`.

    Works at every ZeRO stage, because it reads outputs of modules and gradients of whole parameters, before DeepSpeed
    reduces and shards them. Nothing is read until the pass is over. Compiled blocks run eagerly meanwhile, because
    torch.compile reuses their graph without asking for hooks of the modules inside (skip_nnmodule_hook_guards).
    """

    def __init__(self, engine: DeepSpeedEngine, compiler: BlockCompiler | None) -> None:
        model: nn.Module = engine.module
        self._compiler = compiler
        if compiler is not None:
            compiler.is_paused = True
        self._forward: list[tuple[str, Tensor]] = []
        self._backward: list[tuple[str, Tensor]] = []
        self._handles = []
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            own = [names[id(parameter)] for parameter in module.parameters(recurse=False) if id(parameter) in names]
            if own:
                self._handles.append(module.register_forward_hook(partial(self._note_output, own)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(partial(self._note_gradient, name)))

    def end(self) -> tuple[list[str], list[str]]:
        """Remove the hooks; return this rank's affected parameters, each list in the order of its pass.

        First the parameters of modules whose output held NaN or infinity, then those whose gradient did. Synchronises
        with the device.
        """
        self.close()
        return _names_of_bad(self._forward), _names_of_bad(self._backward)

    def close(self) -> None:
        """Remove the hooks without reading anything."""
        for handle in self._handles:
            handle.remove()
        if self._compiler is not None:
            self._compiler.is_paused = False

    def _note_output(self, names: Sequence[str], _module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            is_good = torch.isfinite(output.detach()).all()
            self._forward += [(name, is_good) for name in names]

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        self._backward.append((name, torch.isfinite(gradient).all()))


def _names_of_bad(noted: list[tuple[str, Tensor]]) -> list[str]:
    """Return the names whose flag is false, once each."""
    if noted:
        flags = torch.stack([is_good for _, is_good in noted]).tolist()
    else:
        flags = []
    return list(dict.fromkeys(name for (name, _), is_good in zip(noted, flags, strict=True) if not is_good))


def check_weights(weights: Iterable[Tensor], group: dist.ProcessGroup, step: int, run_folder: Path) -> None:
    """Raise TrainingError on every rank if a weight of any rank is NaN or infinite. Collective over a host-side group.

    Such weights never recover, and a checkpoint of them would displace a good one.
    """
    broken = not all(bool(weight.isfinite().all()) for weight in weights)
    if any(gather(group, broken)):
        raise _diverged("weights are NaN or infinite, and are not saved", step, run_folder, _ADVICE["loss"])


def _capitalised(advice: str) -> str:
    return advice[0].upper() + advice[1:]


def _diverged(what: str, step: int, run_folder: Path, advice: str, first_names: str = "") -> TrainingError:
    where = f" It began in {first_names}." if first_names else ""
    return TrainingError(
        f"step {step}: the {what}. {_capitalised(advice)}, and go back to an earlier checkpoint (--resume "
        f"{checkpoints_folder(run_folder)}/step-...; those after it are kept as abandoned), or start from scratch if "
        f"none exists.{where}"
    )
