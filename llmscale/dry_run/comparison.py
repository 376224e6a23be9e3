"""A row of an estimate beside its dry run."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmscale.config.bundled_files import install_command
from llmscale.errors import ConfigError
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.estimate import PHASES
from llmscale.planning.search import Candidate


@contextlib.contextmanager
def quiet_torch(needed_by: str) -> Iterator[None]:
    """Import torch and DeepSpeed without output on stdout. Raises ConfigError with `needed_by` if one is missing."""
    # DeepSpeed's logger writes to stdout, where the answer goes. Warnings are about fake tensors and old names.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from llmscale.engine.deepspeed_patches import quiet_libraries

            quiet_libraries()
            import deepspeed  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"{needed_by} needs {error.name}: `{install_command('train')}`.") from None
        yield


if TYPE_CHECKING:
    from llmscale.dry_run.engine import DryRun


@dataclass(frozen=True)
class Comparison:
    """A row of `llmscale estimate` with its dry run."""

    fit: Candidate
    dry_run: DryRun

    @property
    def phases(self) -> dict[str, tuple[Breakdown, Breakdown]]:
        """Return (dry run, closed form) by phase."""
        counted = {"forward": self.dry_run.forward, "backward": self.dry_run.backward, "step": self.dry_run.step}
        return {phase: (counted[phase], self.fit.estimate.phase(phase)) for phase in PHASES}


def compare_with_dry_run(fit: Candidate) -> Comparison:
    """Run the real engine on fake tensors. Raises ConfigError without torch or DeepSpeed, and for NVMe offload."""
    with quiet_torch("--dry-run"):
        from llmscale.dry_run.engine import dry_run

        return Comparison(fit, dry_run(fit.step, fit.cluster.gpu.capability))
