"""Runs of torch that an estimate asks for: recordings of blocks without a table, and --dry-run."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from llmscale.architecture.shape import GPTShape
from llmscale.config.bundled_files import install_command
from llmscale.errors import ConfigError
from llmscale.memory.activations.recorded import NotRecorded, cache_folder, table_of, write_recordings
from llmscale.memory.activations.symbols import BlockBranch, EndsBranch
from llmscale.memory.breakdown import Breakdown
from llmscale.memory.estimate import PHASES
from llmscale.planning.search import Candidate

Answer = TypeVar("Answer")
#: Seconds to record one branch on one core.
_BRANCH_S = 1.5
#: Seconds to import torch and DeepSpeed.
_IMPORT_S = 5


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


def with_recordings(answer: Callable[[], Answer], model: str) -> Answer:
    """Return the result of `answer`, after recording and keeping the blocks that no table has.

    `model`: the user's flags of the model, for messages. Raises ConfigError without torch.
    """
    known: set[BlockBranch | EndsBranch] = set()
    while True:
        try:
            return answer()
        except NotRecorded as missing:
            branches = missing.branches
            # A recording that cannot be read back would be made again without end.
            if known.intersection(branches):
                raise
            known.update(branches)
            _record(branches, model)


def _record(branches: Sequence[BlockBranch | EndsBranch], model: str) -> None:
    with quiet_torch(
        f"{model} makes blocks whose memory is in no table. To record it from the model itself, an estimate"
    ):
        seconds = _IMPORT_S + _BRANCH_S * len(branches)
        _say(f"{model}: blocks that are in no table. Recording their memory once, about {seconds:.0f} s ...")
        began = time.perf_counter()
        from llmscale.dry_run.gpt_recording import record_branch
        from llmscale.dry_run.recording import pack_branches

        gc.collect()
        gc.freeze()  # a trace collects garbage often, and the libraries' objects need not be visited
        try:
            found = {
                (table_of(branch), branch.key): json.dumps(pack_branches({branch.key: record_branch(branch)}))
                for branch in branches
            }
        finally:
            gc.unfreeze()
        write_recordings(found)
        _say(f"recorded in {time.perf_counter() - began:.0f} s, kept in {cache_folder()}")


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


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


def compare_with_dry_run(fit: Candidate, shape: GPTShape) -> Comparison:
    """Run the real engine on fake tensors. Raises ConfigError without torch or DeepSpeed, and for NVMe offload."""
    with quiet_torch("--dry-run"):
        from llmscale.dry_run.engine import dry_run

        return Comparison(fit, dry_run(fit.step, fit.machines.capability))
