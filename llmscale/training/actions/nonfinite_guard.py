"""A run whose loss or weights are no longer numbers ends with one clear error instead of training on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.checkpoint.manifest import checkpoints_folder
from llmscale.engine.collectives import gather
from llmscale.errors import TrainingError
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.live_run import LiveRun

#: Steps in a row that may be lost. One bad batch costs one step: DeepSpeed skips it, the weights stay as they were. Ten
#: different batches in a row are not to blame.
PATIENCE_STEPS = 10


class EndWhenLost(StepAction):
    """End a run whose steps teach the model nothing any more: note each, and judge where the device is waited for
    anyway."""

    def __init__(self, live: LiveRun, judges_at: Callable[[int], bool]) -> None:
        self._live, self._judges_at = live, judges_at
        self._lost = LostSteps(live.world.device)

    def due(self, step: int) -> bool:
        return True

    def act(self, done: DoneStep) -> None:
        # fp16 skips many steps in a row while it looks for its scale, and has an end of its own: the smallest scale.
        self._lost.note(done.loss, done.was_skipped and self._live.run.resolved.precision != "fp16")
        if self._judges_at(done.step):
            self._lost.check(done.step, self._live.run.config.run)


class LostSteps:
    """Counts, on the device and without waiting for it, how many steps in a row taught the model nothing."""

    def __init__(self, device: torch.device) -> None:
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    def note(self, loss: Tensor, skipped: bool) -> None:
        """One step is done; it is lost when its loss (a scalar) is NaN or infinite, or when DeepSpeed skipped it."""
        lost = ~torch.isfinite(loss) | skipped
        self._in_a_row = torch.where(lost, self._in_a_row + 1, 0)

    def check(self, step: int, run_folder: Path) -> None:
        """Raise TrainingError on every rank when PATIENCE_STEPS were lost on any. Collective; waits for the device."""
        worst = self._in_a_row.clone()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if worst >= PATIENCE_STEPS:
            what = f"last {int(worst)} steps had a loss or a gradient that is NaN or infinite"
            raise _diverged(what, step, run_folder)


def check_weights(weights: Iterable[Tensor], group: dist.ProcessGroup, step: int, run_folder: Path) -> None:
    """Raise TrainingError on every rank when a weight of any is NaN or infinite: such weights never recover, and a
    checkpoint of them would push out a good one. Collective over a host-side group."""
    broken = not all(bool(weight.isfinite().all()) for weight in weights)
    if any(gather(group, broken)):
        raise _diverged("weights are NaN or infinite, and are not saved", step, run_folder)


def _diverged(what: str, step: int, run_folder: Path) -> TrainingError:
    return TrainingError(
        f"step {step}: the {what}. Lower --lr, lengthen the warm-up or check the data, and go back to an earlier "
        f"checkpoint (--resume {checkpoints_folder(run_folder)}/step-...; those after it are kept as abandoned), or "
        "start anew when there is none."
    )
