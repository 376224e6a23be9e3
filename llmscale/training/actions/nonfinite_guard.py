"""A run whose loss, gradients or weights are no longer numbers says where that begins, and ends with one clear error
when it lasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.checkpoint.manifest import checkpoints_folder
from llmscale.engine.collectives import gather
from llmscale.engine.nonfinite_search import NonfiniteParameters, NonfiniteSearch
from llmscale.engine.train_step import loss_scale
from llmscale.errors import TrainingError
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun
from llmscale.training.loss_scale_history import LossScaleHistory

#: Steps in a row that may be lost. One bad batch costs one step: DeepSpeed skips it, the weights stay as they were. Ten
#: different batches in a row are not to blame.
PATIENCE_STEPS = 10
#: Parameters that an event names; a line names the first few.
_MOST_NAMES, _LINE_NAMES = 8, 3
_TRY = {
    "loss": "lower --lr, lengthen the warm-up, or look at the samples",
    "gradients": "lower --lr, lengthen the warm-up, or look at the samples",
    "loss scale": "lower --lr, or use --precision bf16, which has no scale",
}


class EndWhenLost(StepAction):
    """End a run whose steps teach the model nothing any more: note each, and judge where the device is waited for
    anyway.

    The first time that something is wrong, every rank alike looks for it through the whole of the next step
    (engine/nonfinite_search.py), which costs that step a little and others nothing. It is looked for again when all has
    been well in between.
    """

    def __init__(self, live: LiveRun, judges_at: Callable[[int], bool]) -> None:
        self._live, self._judges_at = live, judges_at
        self._lost = LostSteps(live.world.device)
        self._scales = LossScaleHistory()
        self._is_fp16 = live.run.resolved.precision == "fp16"
        self._skipped = live.skipped_steps
        self._search: tuple[NonfiniteSearch, str, int] | None = None
        """In the step that runs, why, and the step that was the first."""
        self._is_told = False
        self._first_names = ""

    def due(self, step: int) -> bool:
        return True

    def act(self, done: DoneStep) -> None:
        # fp16 skips many steps in a row while it looks for its scale, and has an end of its own: the smallest scale.
        self._lost.note(done.loss, done.was_skipped and not self._is_fp16)
        if self._search is not None:
            self._end_search()
            self._judge(done.step)
        elif self._judges_at(done.step):
            self._judge(done.step)

    def close(self) -> None:
        if self._search is not None:
            self._search[0].close()

    def _judge(self, step: int) -> None:
        """Collective; every rank comes to the same."""
        worst = self._lost.worst_in_a_row()
        self._scales.add(step, loss_scale(self._live.engine))
        if worst >= PATIENCE_STEPS and self._is_told:
            what = f"last {worst} steps had a loss or a gradient that is NaN or infinite"
            raise _diverged(what, step, self._live.run.config.run, self._first_names)
        found = self._find(step, worst)
        if found is None:
            self._is_told = False
        elif not self._is_told:
            self._is_told = True
            self._search = (NonfiniteSearch(self._live.engine, self._live.compiler), *found)

    def _find(self, step: int, worst: int) -> tuple[str, int] | None:
        """What is wrong since the last time, and the step that it began with; None while all is well."""
        skipped, self._skipped = self._live.skipped_steps - self._skipped, self._live.skipped_steps
        recent = self._live.recent.window.steps
        bad = [known.step for known in recent if not math.isfinite(known.loss)]
        if self._judges_at(step) and bad:
            return "loss", bad[0]
        if self._scales.has_collapsed:
            return "loss scale", step
        if worst or (skipped and not self._is_fp16):
            return "gradients", max(1, step - max(worst, 1) + 1)
        return None

    def _end_search(self) -> None:
        """Say and record what the step that has just run showed. Collective."""
        assert self._search is not None
        search, cause, step = self._search
        self._search = None
        live, of_ranks = self._live, gather(self._live.world.control, search.end())
        ranks = [rank for rank, found in enumerate(of_ranks) if found.forward or found.backward]
        found = of_ranks[ranks[0]] if ranks else NonfiniteParameters((), ())
        names = list((found.forward or found.backward)[:_MOST_NAMES])
        where = "forward" if found.forward else "backward"
        self._first_names = ", ".join(names[:_LINE_NAMES])
        first = f"first in {self._first_names} ({where} pass, rank {ranks[0]})" if names else "gone at the next step"
        scales = f"; {self._scales.describe()}" if self._is_fp16 else ""
        what = "the loss scale has collapsed" if cause == "loss scale" else f"{cause} NaN or infinite"
        live.report(f"WARNING: step {step}: {what}, {first}{scales}. Try: {_TRY[cause]}")
        if live.log:
            live.log.log_event(
                "nonfinite",
                step=step,
                cause=cause,
                parameters=names,
                **{"pass": where if names else None},
                ranks=ranks,
                loss_scale=loss_scale(live.engine),
                loss_scale_history=self._scales.changes,
                advice=_TRY[cause],
            )


class LostSteps:
    """Counts, on the device and without waiting for it, how many steps in a row taught the model nothing."""

    def __init__(self, device: torch.device) -> None:
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    def note(self, loss: Tensor, skipped: bool) -> None:
        """One step is done; it is lost when its loss (a scalar) is NaN or infinite, or when DeepSpeed skipped it."""
        lost = ~torch.isfinite(loss) | skipped
        self._in_a_row = torch.where(lost, self._in_a_row + 1, 0)

    def worst_in_a_row(self) -> int:
        """The most of any rank. Collective; waits for the device."""
        worst = self._in_a_row.clone()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return int(worst)


def check_weights(weights: Iterable[Tensor], group: dist.ProcessGroup, step: int, run_folder: Path) -> None:
    """Raise TrainingError on every rank when a weight of any is NaN or infinite: such weights never recover, and a
    checkpoint of them would push out a good one. Collective over a host-side group."""
    broken = not all(bool(weight.isfinite().all()) for weight in weights)
    if any(gather(group, broken)):
        raise _diverged("weights are NaN or infinite, and are not saved", step, run_folder)


def _diverged(what: str, step: int, run_folder: Path, first_names: str = "") -> TrainingError:
    where = f" It began in {first_names}." if first_names else ""
    return TrainingError(
        f"step {step}: the {what}. Lower --lr, lengthen the warm-up or check the data, and go back to an earlier "
        f"checkpoint (--resume {checkpoints_folder(run_folder)}/step-...; those after it are kept as abandoned), or "
        f"start anew when there is none.{where}"
    )
