"""A run while it trains, in three parts: what is fixed, the engine, and its files. And what an action at steps is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from llmscale.checkpoint.manifest import History
from llmscale.checkpoint.run_state import RunState
from llmscale.config.resolve import ResolvedRun
from llmscale.config.run_config import RunConfig
from llmscale.data.loader import Feed, MicroBatch
from llmscale.data.validation import ValidationSplit
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.process_group import World
from llmscale.memory.estimate import MemoryEstimate
from llmscale.training.metrics import MetricsLog
from llmscale.training.publish_run import RunPublisher
from llmscale.training.run_folder import RunFolderClaim
from llmscale.training.sample_stream import SampleStream
from llmscale.training.start import Start
from llmscale.training.step_metrics import StepMeter
from llmscale.training.stragglers import RecentSteps

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class Run:
    """Everything that is fixed from the first step of a start, or of a rollback, to the last."""

    start: Start
    world: World
    validation: tuple[ValidationSplit, ...]
    """Validation splits; empty without validation."""
    history: History
    """History that the steps to come belong to."""
    estimate: MemoryEstimate | None
    """Estimate of one rank's GPU memory; None for an optimizer without one."""
    startup_s: dict[str, float]
    """Seconds per phase of the start."""

    @cached_property
    def config(self) -> RunConfig:
        return self.start.config

    @cached_property
    def resolved(self) -> ResolvedRun:
        return self.start.resolved

    @cached_property
    def stream(self) -> SampleStream:
        return self.start.stream

    @cached_property
    def state(self) -> RunState | None:
        """State of the checkpoint that it resumes; None for a new run."""
        return self.start.state

    @cached_property
    def first_step(self) -> int:
        """Optimizer steps done before this start."""
        return self.start.first_step

    def samples_seen(self, step: int) -> int:
        """Return the samples trained on since step 0 after `step` optimizer steps."""
        return self.stream.samples_after(step)

    def micro_steps(self, step: int) -> int:
        """Return this rank's forward passes of the step after `step` optimizer steps."""
        return self.resolved.plan.micro_steps(self.batch_size(step))

    def batch_size(self, step: int) -> int:
        """Return the sequences of the step after `step` optimizer steps, over all ranks."""
        return self.samples_seen(step + 1) - self.samples_seen(step)

    def loss_weight(self, step: int) -> float:
        """Return the weight of a micro-batch, not a filler, in the step after `step` optimizer steps."""
        return self.resolved.plan.loss_weight(self.batch_size(step))

    def seq_len(self, step: int) -> int:
        """Return the tokens of a sequence in the step after `step` optimizer steps."""
        return self.resolved.plan.length_after(self.samples_seen(step))

    def tokens_seen(self, step: int) -> int:
        """Return the tokens trained on since step 0 after `step` optimizer steps."""
        return self.samples_seen(step) * self.resolved.plan.seq_len


@dataclass(frozen=True)
class Engine:
    """Everything that a step changes on this rank."""

    deepspeed: DeepSpeedEngine
    compiler: BlockCompiler | None
    """Compiler of the blocks; None if they run eagerly."""
    configured_scaler: dict[str, float] | None
    """State with which fp16's loss scaler begins; None in other precisions."""
    feed: Feed
    meter: StepMeter
    recent: RecentSteps
    skipped_before: int
    """Steps that fp16 overflow skipped before this start."""

    @property
    def skipped_steps(self) -> int:
        """Steps that fp16 overflow has skipped since step 0."""
        return self.skipped_before + self.deepspeed.skipped_steps


@dataclass(frozen=True)
class RunIO:
    """The run's folder, log and console."""

    claim: RunFolderClaim
    """Claim on the run folder; rank 0 holds its lock until the session ends."""
    log: MetricsLog | None
    """Log on rank 0, None elsewhere."""
    wandb_run_id: str | None
    """Id of rank 0's wandb run; on other ranks, or without --wandb, the checkpoint's."""
    report: Callable[[str], None]
    """Prints one line on rank 0."""
    publisher: RunPublisher | None = None
    """Publisher of a run in a store."""

    def log_event(self, event: str, **values: object) -> None:
        """Record an event on rank 0."""
        if self.log:
            self.log.log_event(event, **values)


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step on this rank."""

    step: int
    """Optimizer steps done, this one included."""
    micro_batches: list[MicroBatch]
    """Batches that this rank trained on."""
    loss: Tensor
    """This rank's mean loss in nats per token: a scalar on the device, not read yet."""
    was_skipped: bool
    """True if DeepSpeed left the weights unchanged because of overflow."""
    grad_norm: Tensor | float | None = None
    """Global norm before clipping, not read yet; None if DeepSpeed computed none."""


class StepAction(ABC):
    """Something that happens after some steps, such as logging. Every rank calls every method at the same step."""

    def begin(self, step: int) -> None:  # noqa: B027  most need no beginning
        """Training begins after `step`, or its run folder was created again there."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Return whether to run after `step`, counted from 1; equal on all ranks if the action is collective."""

    @abstractmethod
    def run(self, result: StepResult) -> None:
        """Run the action."""

    def close(self) -> None:  # noqa: B027  most need no end
        """The session ends, perhaps by an error on this rank alone: no collectives."""
