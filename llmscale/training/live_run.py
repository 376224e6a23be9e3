"""A run on one rank once its engine is built and filled: what its steps, and all that happens at them, work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmscale.checkpoint.manifest import History
from llmscale.checkpoint.run_state import RunState
from llmscale.data.loader import Feed
from llmscale.data.validation import ValidationSplit
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.process_group import World
from llmscale.memory.estimate import MemoryEstimate
from llmscale.training.metrics import MetricsLog
from llmscale.training.recent_steps import RecentSteps
from llmscale.training.run_claim import RunFolderClaim
from llmscale.training.run_data import SampleStream
from llmscale.training.run_inputs import PreparedRun
from llmscale.training.spikes import SpikeRequests
from llmscale.training.throughput import StepMeter

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class LiveRun:
    """Built once per start by build_session.py."""

    run: PreparedRun
    world: World
    engine: DeepSpeedEngine
    compiler: BlockCompiler | None
    """Of the engine's blocks; None where they run eagerly."""
    configured_scaler: dict[str, float] | None
    """What fp16's loss scaler begins with; None in other precisions."""
    stream: SampleStream
    feed: Feed
    validation: tuple[ValidationSplit, ...]
    """Empty where nothing is validated on."""
    state: RunState | None
    """Of the checkpoint that it goes on from; None for a run that begins."""
    history: History
    """Of the steps to come."""
    claim: RunFolderClaim
    """On the run folder; the main rank holds its lock until the session ends."""
    log: MetricsLog | None
    """On the main rank only."""
    wandb_run_id: str | None
    """Of the main rank's run; elsewhere, or without --wandb, what the checkpoint says."""
    estimate: MemoryEstimate | None
    """Of one rank's GPU memory; None where there is none for the optimizer."""
    startup_s: dict[str, float]
    """Seconds per phase of the start."""
    meter: StepMeter
    recent: RecentSteps
    spikes: SpikeRequests
    report: Callable[[str], None]
    """Prints one line on the main rank."""

    @property
    def first_step(self) -> int:
        """Optimizer steps that were done before this start."""
        return self.state.step if self.state else 0

    @property
    def first_sample(self) -> int:
        """Samples that were seen before this start: its first step begins there."""
        return self.state.samples_seen if self.state else 0

    @property
    def skipped_steps(self) -> int:
        """Steps that fp16 overflow skipped since step 0, until now."""
        return (self.state.skipped_steps if self.state else 0) + self.engine.skipped_steps

    def samples_seen(self, step: int) -> int:
        """Samples trained on since step 0 when `step` optimizer steps are done."""
        return self.first_sample + (step - self.first_step) * self.run.resolved.plan.global_batch_size

    def tokens_seen(self, step: int) -> int:
        """The same in tokens."""
        return self.samples_seen(step) * self.run.resolved.plan.seq_len
