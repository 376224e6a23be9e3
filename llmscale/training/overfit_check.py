"""Judge --overfit-batch: a model that cannot memorise one batch will not learn a dataset.

A model that ignores the context cannot get below the entropy of the batch's tokens,

    H = -sum over tokens t of p(t) ln p(t),

with p(t) the share of t among the targets. A loss far below H shows that positions, attention and gradients work.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from llmscale.engine.collectives import gather
from llmscale.terminal.human_numbers import count_nouns
from llmscale.training.live_run import Run, RunIO, StepAction, StepResult

#: Share of H at or below which a batch counts as learned, and the loss that suffices for repetitive text.
_LEARNED_SHARE, _LEARNED_LOSS = 0.5, 0.1
#: Relative fall below which a loss counts as unchanged.
_UNCHANGED = 0.02


class JudgeOverfit(StepAction):
    """Compares the last step's loss with the first step's, and reports the verdict."""

    def __init__(self, run: Run, io: RunIO) -> None:
        self._run, self._io = run, io
        self._first_loss = self._entropy = math.nan

    def due(self, step: int) -> bool:
        return step in (1, self._run.resolved.total_steps)

    def run(self, result: StepResult) -> None:
        """Read the loss of all ranks, and judge the last one. Collective. Synchronises with the device."""
        run, control = self._run, self._run.world.control
        loss = float(np.mean(gather(control, float(result.loss))))
        if result.step == 1:
            size = run.resolved.shape.padded_vocab_size
            batches = [batch.tokens[:, 1:].numpy().ravel() for batch in result.micro_batches if not batch.is_filler]
            counts = np.bincount(np.concatenate([np.empty(0, np.int64), *batches]), minlength=size)
            self._first_loss, self._entropy = loss, entropy(np.sum(gather(control, counts), axis=0))
        if result.step == run.resolved.total_steps:
            has_learned, why = judge_overfit(self._first_loss, loss, self._entropy)
            samples, steps = run.resolved.plan.global_batch_size, count_nouns(result.step, "step")
            verdict = f"{'learned' if has_learned else 'did not learn'}: the loss of the same {samples:,} samples {why}"
            self._io.report(f"{verdict} ({steps}, --lr {run.resolved.schedule.lr:g})")
            self._io.log_event("overfit", step=result.step, has_learned=has_learned, reason=why)


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy in nats of a distribution given by counts, [n]."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def judge_overfit(first: float, last: float, context_free: float) -> tuple[bool, str]:
    """Return whether a batch was learned, and what its loss did. Losses are in nats per token; `context_free` is H."""
    moved = f"from {first:.4f} to {last:.4f}"
    if not last <= first * (1 + _UNCHANGED):
        return False, f"rose {moved}. Lower --lr, or raise --warmup-steps"
    if last > first * (1 - _UNCHANGED):
        return False, f"stayed ({moved}). Likely causes: --lr is far too low, or no gradient reaches the weights"
    fell = f"fell {moved}, and a model that ignores the context stays above {context_free:.4f}"
    if last <= max(_LEARNED_SHARE * context_free, _LEARNED_LOSS):
        return True, fell
    if last < context_free:
        return False, f"{fell}. It learns, but has not memorised the batch: give more --steps, or another --lr"
    return False, (
        f"{fell}. Give more --steps or a higher --lr; if that does not help, attention or positions pass nothing on, "
        "or the targets do not follow from the context"
    )
