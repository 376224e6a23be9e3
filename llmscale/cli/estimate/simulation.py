"""`llmscale estimate --dry-run`: the real engine on fake tensors, beside the closed form."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmscale.architecture.shape import GPTShape
from llmscale.cli.estimate.table import CATEGORIES, align, breakdown_cells, gib
from llmscale.config.resolve import resolve_step
from llmscale.errors import ConfigError
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.estimate import PHASES, RESERVED_PER_ALLOCATED
from llmscale.planning.largest_micro_batch import Fit

if TYPE_CHECKING:
    from llmscale.dry_run.engine import DryRun


@dataclass(frozen=True)
class Simulation:
    """One row, counted and calculated."""

    fit: Fit
    dry_run: DryRun

    @property
    def phases(self) -> dict[str, tuple[Breakdown, Breakdown]]:
        """Phase -> (dry run, closed form)."""
        counted = {"forward": self.dry_run.forward, "backward": self.dry_run.backward, "step": self.dry_run.step}
        return {phase: (counted[phase], self.fit.estimate.phase(phase)) for phase in PHASES}

    def as_dict(self) -> dict[str, object]:
        """JSON values."""
        return {
            "zero_stage": self.fit.strategy.zero_stage,
            "seconds": self.dry_run.seconds,
            "resident": self.dry_run.resident.as_dict(),
            "least_gpu_bytes": self.dry_run.least_gpu_bytes,
            "phases": {
                phase: {"dry_run": counted.as_dict(), "closed_form": calculated.as_dict()}
                for phase, (counted, calculated) in self.phases.items()
            },
        }


def simulate(fit: Fit, shape: GPTShape) -> Simulation:
    """Imports torch and DeepSpeed. Raises ConfigError where they are missing, or for NVMe offload."""
    # DeepSpeed's logger writes to stdout, which belongs to the answer. Warnings are about fake tensors and old names.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from llmscale.engine.silence_libraries import quiet_libraries

            quiet_libraries()
            from llmscale.dry_run.engine import dry_run
        except ImportError as error:
            raise ConfigError(f"--dry-run needs {error.name}: `pip install 'llmscale[train]'`.") from None
        result = dry_run(resolve_step(fit.ds, shape, fit.plan, fit.strategy.checkpointing))
    return Simulation(fit, result)


def simulation_lines(simulation: Simulation) -> Iterator[str]:
    """Both breakdowns of each phase, GiB."""
    fit = simulation.fit
    yield (
        f"dry run: {fit.strategy.describe()}, micro-batch {fit.plan.micro_batch_size}; the real DeepSpeed engine on "
        f"fake tensors as rank 0 of {fit.plan.ranks.world_size}, {simulation.dry_run.seconds:.0f} s"
    )
    head = ["", "phase", "by", *CATEGORIES, "allocated", "difference"]
    table: list[list[str]] = []
    phases = simulation.phases
    for phase, (counted, calculated) in phases.items():
        difference = calculated.total_bytes / counted.total_bytes - 1
        table.append(["", phase, "dry run", *breakdown_cells(counted), gib(counted.total_bytes), ""])
        numbers = [*breakdown_cells(calculated), gib(calculated.total_bytes), f"{difference:+.1%}"]
        table.append(["", "", "closed form", *numbers])
    yield from align(head, table)
    least, peak = simulation.dry_run.least_gpu_bytes, max(counted.total_bytes for counted, _ in phases.values())
    yield (
        f"  least that the caching allocator can do with: {gib(least)} GiB, {least / peak - 1:+.1%} "
        f"(assumed above: {RESERVED_PER_ALLOCATED - 1:+.0%})"
    )
