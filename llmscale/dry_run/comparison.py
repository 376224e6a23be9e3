"""A row of `llmscale estimate` in the real engine on fake tensors, beside the closed form. No torch until it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmscale.architecture.shape import GPTShape
from llmscale.dry_run.on_demand import quiet_torch
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.step_peaks import PHASES
from llmscale.planning.largest_micro_batch import Fit

if TYPE_CHECKING:
    from llmscale.dry_run.engine import DryRun


@dataclass(frozen=True)
class Comparison:
    """One row, counted and calculated."""

    fit: Fit
    dry_run: DryRun

    @property
    def phases(self) -> dict[str, tuple[Breakdown, Breakdown]]:
        """Phase -> (dry run, closed form)."""
        counted = {"forward": self.dry_run.forward, "backward": self.dry_run.backward, "step": self.dry_run.step}
        return {phase: (counted[phase], self.fit.estimate.phase(phase)) for phase in PHASES}


def compare_with_dry_run(fit: Fit, shape: GPTShape) -> Comparison:
    """Imports torch and DeepSpeed. Raises ConfigError where they are missing, or for NVMe offload."""
    with quiet_torch("--dry-run"):
        from llmscale.dry_run.engine import dry_run

        return Comparison(fit, dry_run(fit.step, fit.machines.capability))
