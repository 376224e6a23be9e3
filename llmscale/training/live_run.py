"""A run while it trains, in three parts: what is fixed, the engine, and its files. And actions after steps.

Ranks that slow down the others; and the exchange of losses and timings that finds them.

A step keeps its loss and gradient norm on the device. At logged steps, where the host synchronises anyway, the losses
of all steps since the last one and every rank's timings go through the all-reduce that the logged loss needs. So all
ranks know every step, without an additional synchronisation or message.

Ranks wait for each other in every step, so the time of a step does not tell who is slow. A rank does two things alone:
it waits for its own data, and it computes before its first exchange.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from llmscale.checkpoint.manifest import History
from llmscale.checkpoint.run_state import RunState
from llmscale.config.resolve import ResolvedRun
from llmscale.config.run_config import RunConfig
from llmscale.data.loader import Feed, MicroBatch
from llmscale.data.validation import ValidationSplit
from llmscale.engine.collectives import gather
from llmscale.engine.compilation import BlockCompiler
from llmscale.engine.process_group import World
from llmscale.memory.estimate import MemoryEstimate
from llmscale.training.metrics import MetricsLog
from llmscale.training.publish_run import RunPublisher
from llmscale.training.run_folder import RunFolderClaim
from llmscale.training.sample_stream import SampleStream
from llmscale.training.start import Start
from llmscale.training.step_metrics import StepMeter

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from llmscale.config.resolve import ResolvedStep


@dataclass(frozen=True)
class Run:
    """Everything that is fixed from the first step of a start, or of a rollback, to the last."""

    start: Start
    world: World
    validation: tuple[ValidationSplit, ...]
    """Validation splits; empty without validation."""
    history: History
    """History that the steps to come belong to."""
    estimate: MemoryEstimate
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
    detail: Callable[[str], None]
    """Writes one line to start.txt on rank 0, and prints it with --verbose."""
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

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        self._run, self._engine, self._io = run, engine, io

    def begin(self, step: int) -> None:  # noqa: B027  most need no beginning
        """Training begins after `step`."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Return whether to run after `step`, counted from 1; equal on all ranks if the action is collective."""

    @abstractmethod
    def run(self, result: StepResult) -> None:
        """Run the action."""

    def close(self) -> None:  # noqa: B027  most need no end
        """The session ends, perhaps by an error on this rank alone: no collectives."""


#: Steps kept between two logged ones; of more, the oldest are not judged.
_MAX_STEPS = 1024
SlowPhase = Literal["data wait", "arithmetic"]
#: Readings in the median that is judged: a rank is slow if most of them are.
READINGS = 8
#: Ratio from which a rank is slow.
SLOW_RATIO = 1.25


class RankTimes(NamedTuple):
    """Timings of one rank, in seconds."""

    step_s: float
    """Time per step in the previous logging interval."""
    data_wait_s: float
    """Wait for data per step in the previous logging interval."""
    arithmetic_s: float
    """Time of a forward pass, or a part of one, without waiting for other ranks; 0 if not measured."""


@dataclass(frozen=True)
class RecentStep:
    """One step, equal on every rank."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    """Mean over the global batch, in nats per token."""
    grad_norm: float | None
    """Global norm before clipping; None if DeepSpeed computed none."""


@dataclass(frozen=True)
class LoggedWindow:
    """Everything that the ranks exchange at a logged step."""

    steps: tuple[RecentStep, ...]
    """Steps since the last logged one, the newest last."""
    rank_times: tuple[RankTimes, ...]
    """Timings by rank."""
    extra: tuple[float, ...]
    """Means over the ranks of the caller's scalars."""


class RecentSteps:
    """This rank's steps since the last exchange."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.losses: deque[Tensor] = deque(maxlen=_MAX_STEPS)
        """This rank's mean losses, scalars on the device."""
        self.norms: deque[Tensor | float | None] = deque(maxlen=_MAX_STEPS)
        """Global gradient norms, on the device where DeepSpeed leaves them there."""
        self.window = LoggedWindow((), (), ())
        """The result of the last exchange."""

    def exchange(self, step: int, times: RankTimes, extra: Sequence[Tensor] = ()) -> LoggedWindow:
        """Average the losses since the last call over all ranks and collect their timings, in one all-reduce.

        `step` is the newest step; `extra` are further scalars to average. Collective. Synchronises with the device.
        """
        ranks, num_steps = self._world.world_size, len(self.losses)
        means = torch.stack([*self.losses, *extra]).float() / ranks
        timings = torch.zeros(ranks, len(times))
        timings[self._world.rank] = torch.tensor(times)  # the other rows are the other ranks'
        packed = torch.cat((means, timings.flatten().to(means.device)))
        dist.all_reduce(packed)
        values, norms = packed[: len(means)].tolist(), _as_floats(self.norms)
        first = step - num_steps + 1
        self.window = LoggedWindow(
            tuple(RecentStep(first + i, values[i], norms[i]) for i in range(num_steps)),
            tuple(RankTimes(*row) for row in packed[len(means) :].view_as(timings).tolist()),
            tuple(values[num_steps:]),
        )
        self.losses.clear()
        self.norms.clear()
        return self.window


def _as_floats(norms: Sequence[Tensor | float | None]) -> list[float | None]:
    """Copy all norms from the device at once."""
    if norms and all(isinstance(norm, Tensor) for norm in norms):
        stacked: list[float | None] = torch.stack([norm.detach().reshape(()) for norm in norms]).tolist()  # type: ignore[union-attr]
        return stacked
    return [None if norm is None else float(norm) for norm in norms]


class ArithmeticProbe:
    """Times one forward pass after each logged step, without waiting for other ranks.

    Below stage 3 a forward pass exchanges nothing and is timed completely. At stage 3 every module waits for its
    weights; the output head, once it has its own, computes alone. So it does where ranks divide sequences or experts,
    and blocks exchange tokens. On a GPU, events are read long after they happened.
    """

    def __init__(self, engine: DeepSpeedEngine, resolved: ResolvedStep) -> None:
        ranks = resolved.plan.ranks
        exchanges = resolved.zero_stage == 3 or max(ranks.sequence_parallel_size, ranks.expert_parallel_size) > 1
        self._module: nn.Module = engine.module.head if exchanges else engine.module
        self._handles: list[RemovableHandle] = []
        self._ends: list[Any] = []
        """Begin and end of the timed pass: events on a GPU, else seconds."""

    def arm(self) -> None:
        """Time the next forward pass of training."""
        self._remove()
        self._ends = []
        # After DeepSpeed's own hook, which gathers, and before the one that releases.
        self._handles = [
            self._module.register_forward_pre_hook(self._enter),
            self._module.register_forward_hook(self._leave, prepend=True),
        ]

    def read(self) -> float:
        """Return the seconds of the last timed pass, 0 before the first. Synchronises with a recent event."""
        if len(self._ends) < 2:
            return 0.0
        begin, end = self._ends
        if isinstance(begin, float):
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def _enter(self, module: nn.Module, _inputs: object) -> None:
        if module.training and not self._ends:
            self._ends.append(_now())

    def _leave(self, module: nn.Module, _inputs: object, _output: object) -> None:
        if module.training and self._ends:
            self._ends.append(_now())
            self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _now() -> float | torch.cuda.Event:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the median of the others."""

    rank: int
    phase: SlowPhase
    ratio: float
    """Duration of its arithmetic, or of a step because of its data, relative to normal."""


class StragglerDetector:
    """Remembers readings of all ranks, and the stragglers already named."""

    def __init__(self, world_size: int) -> None:
        self._ratios: dict[tuple[SlowPhase, int], deque[float]] = {
            (phase, rank): deque(maxlen=READINGS)
            for phase in ("data wait", "arithmetic")
            for rank in range(world_size if world_size > 1 else 0)
        }
        self._named: set[tuple[SlowPhase, int]] = set()

    def observe(self, phase: SlowPhase, seconds: Sequence[float], of_s: float | None = None) -> list[Straggler]:
        """Add a reading of each rank, and return the new stragglers.

        Without `of_s` the ratio is relative to the others' median. With it, the ratio tells how much longer something
        that takes `of_s` becomes.
        """
        stragglers = []
        for rank, own in enumerate(seconds):
            others = [*seconds[:rank], *seconds[rank + 1 :]]
            ratios = self._ratios.get((phase, rank))
            usual = median(others) if others else 0.0
            base = of_s if of_s is not None else usual
            if ratios is None or base <= 0.0:
                continue
            ratios.append(1 + (own - usual) / base)
            if len(ratios) < READINGS:
                continue
            is_slow = median(ratios) >= SLOW_RATIO
            if is_slow and (phase, rank) not in self._named:
                stragglers.append(Straggler(rank, phase, median(ratios)))
            (self._named.add if is_slow else self._named.discard)((phase, rank))
        return stragglers


class WatchStragglers:
    """Reports each straggler once, with its host."""

    def __init__(self, world: World, log: MetricsLog | None, report: Callable[[str], None]) -> None:
        self._world, self._log, self._report = world, log, report
        self._detector = StragglerDetector(world.world_size)

    def check(self, step: int, window: LoggedWindow) -> None:
        """Judge the timings exchanged at `step`. Collective."""
        times = window.rank_times
        # Ranks measure a step a little differently and must agree on the result: rank 0's measurement counts.
        stragglers = self._detector.observe("arithmetic", [time.arithmetic_s for time in times])
        stragglers += self._detector.observe("data wait", [time.data_wait_s for time in times], times[0].step_s)
        if not stragglers:
            return
        hosts = gather(self._world.control, os.uname().nodename)
        for slow in stragglers:
            host = hosts[slow.rank]
            cause = "waits for data: steps take" if slow.phase == "data wait" else "is slow: its arithmetic takes"
            where = f"rank {slow.rank} on host {host}"
            self._report(f"WARNING: step {step}: {where} {cause} {slow.ratio:.2f} times as long")
            if self._log:
                values = {"rank": slow.rank, "host": host, "ratio": slow.ratio, "phase": slow.phase}
                self._log.log_event("slow_rank", step=step, **values)
