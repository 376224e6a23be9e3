"""Records of steps: metrics and sensors every --log-every steps; the pace of a start, and what compiling gave.

Routers of experts at logged steps: their metrics, each expert's load, and a warning of one that has collapsed.

Ranks wait for each other in every step, so the time of a step does not tell who is slow. A rank does two things alone:
it waits for its own data, and it computes before its first exchange.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from llmscale.config.hardware import model_flops_utilisation
from llmscale.engine.collectives import gather
from llmscale.engine.device_memory import peak_memory_bytes
from llmscale.engine.loss_scale import loss_scale
from llmscale.engine.process_group import World
from llmscale.model.experts import BALANCE, ENTROPY, MOVED, Z_SQUARED
from llmscale.terminal.human_numbers import format_duration
from llmscale.training.live_run import (
    Engine,
    LoggedWindow,
    RankTimes,
    Run,
    RunIO,
    StepAction,
    StepResult,
)
from llmscale.training.metrics import MetricsLog
from llmscale.training.run_folder import METRICS_NAME, clear_failure
from llmscale.training.step_metrics import Pause, StepMetrics, StepTimes

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from llmscale.config.resolve import ResolvedStep

#: In the first seconds of a start, a step is logged that would end longer than this after the last logged one.
_EARLY_S = 300.0
_LINE_S = 10.0
#: Step of this start after which its pace is known, or its second if steps take longer than this.
_PACE_STEP = 3
_SLOW_S = 5.0
#: Steps that are compared with eager ones: compiled blocks save little of each.
_COMPILED_STEPS = 20
#: Seconds from which the length of a run is worth a line, and from which another key is.
_SHORT_S = 60.0
_LONG_S = 600.0
#: Gain of compiled blocks that a break-even is given for where the run has no eager steps: torchtitan's.
_USUAL_GAIN = 1 / 7
#: A router has collapsed when an expert is unused, or gets nearly all tokens, for this number of steps and of readings.
PATIENCE_STEPS = 100
MIN_READINGS = 5
NEARLY_ALL = 0.95
#: Loads relative to the mean: an expert is unused below the first; one with nearly all tokens has at least the second.
_UNUSED = 1e-3
_OVERLOADED = 1.5
#: Tokens per expert and step below which an expert may have none by chance.
_MIN_TOKENS = 10
#: Factor between the steps whose loads are recorded expert by expert: a table may have 10,000 numbers.
_TABLE_GROWTH = 1.25
#: Experts and blocks that a warning names.
_MAX_NAMES = 4
#: Readings in the median that is judged: a rank is slow if most of them are.
READINGS = 8
#: Ratio from which a rank is slow.
SLOW_RATIO = 1.25


def read_gpu(device: torch.device) -> dict[str, float]:
    """Return the state of a GPU within milliseconds, by NVML through torch: fields of StepMetrics.

    NVML's binding is nvidia-ml-py (`pip install -e '.[nvml]'`). What it, the driver or the GPU does not tell is left
    out. Power is of the last second on most GPUs; utilisation is the fraction of the last sampling period (up to a
    second) in which a kernel ran, and says nothing of how well.
    """
    readings: dict[str, float] = {}
    if device.type == "cuda":
        for name, query, per_unit in (
            ("power_w", torch.cuda.power_draw, 1000),
            ("temperature_c", torch.cuda.temperature, 1),
            ("gpu_utilisation", torch.cuda.utilization, 100),
        ):
            # ModuleNotFoundError without the binding, RuntimeError without a driver, NVML's own.
            with suppress(Exception):
                readings[name] = query(device) / per_unit
    return readings


class LogSteps(StepAction):
    """Logs every --log-every steps, the first and the last: the one place where the host waits for the device.

    In the first five minutes of a start also by the clock of rank 0, at least every ten seconds if steps are shorter.
    """

    def __init__(
        self, run: Run, engine: Engine, io: RunIO, watchers: Sequence[Callable[[int, LoggedWindow], None]] = ()
    ) -> None:
        """`watchers` are called with every logged step and the exchanged window."""
        super().__init__(run, engine, io)
        self._watchers = watchers
        self._sequence_losses: deque[Tensor] = deque(maxlen=run.resolved.plan.gradient_accumulation_steps)
        if run.stream.mix:
            engine.deepspeed.module.head.sequence_losses = self._sequence_losses
        self._routers = RouterLog(run, engine, io)
        self._probe = ArithmeticProbe(engine.deepspeed, run.resolved)
        self._logged = run.first_step
        """Last logged step."""
        self._added = -1
        """Newest step that the clock has added."""
        self._began_s = self._last_line_s = self._boundary_s = time.monotonic()
        self._interval: StepTimes | None = None
        """Timings of the previous logging interval. Ranks exchange these: the exchange itself is part of the next."""

    def begin(self, step: int) -> None:
        if self._io.log:
            clear_failure(self._run.config.run)
            self._io.log.begin(step, **self._run.history.as_dict(), **_facts(self._run))

    def due(self, step: int) -> bool:
        run = self._run
        return step % run.config.log_every == 0 or step in (run.first_step + 1, run.resolved.total_steps, self._added)

    def due_by_clock(self) -> bool:
        """Return on rank 0 whether to log the next step, if it takes as long as the last. Call it once a step."""
        now = time.monotonic()
        before = self._boundary_s
        self._boundary_s = now
        is_late = 2 * now - before - self._last_line_s > _LINE_S
        return self._io.log is not None and now - self._began_s < _EARLY_S and is_late

    def add(self, step: int) -> None:
        """Log a step that all ranks have agreed on."""
        self._added = step

    def run(self, result: StepResult) -> None:
        run = self._run
        io = self._io
        self._last_line_s = time.monotonic()
        z_squared = self._engine.deepspeed.module.head.z_squared
        before = result.step - 1
        # The mean over this rank's micro-steps, weighted as the loss is.
        if z_squared is None:
            means = []
        else:
            means = [z_squared * run.loss_weight(before) / run.micro_steps(before)]
        last = self._interval
        times = RankTimes(0.0, 0.0, 0.0)
        if last is not None:
            times = RankTimes(last.step_s, last.data_wait_s, self._probe.read())
        window = self._engine.recent.exchange(result.step, times, means)
        z_loss = run.resolved.loss.z_loss * window.extra[0] if window.extra else None
        by_set = None
        if run.stream.mix and result.micro_batches:
            by_set = per_source_loss(run, result, list(self._sequence_losses)[-len(result.micro_batches) :])
        routers = self._routers.read(result.step)
        self._interval = self._engine.meter.read()
        if run.world.world_size > 1:
            self._probe.arm()
        if io.log is not None:
            newest = window.steps[-1]
            metrics = self._metrics(result.step, newest.loss, z_loss, by_set, newest.grad_norm, self._interval)
            io.log.log_step(replace(metrics, **routers))
        for watch in self._watchers:
            watch(result.step, window)

    def _metrics(
        self,
        step: int,
        loss: float,
        z_loss: float | None,
        by_set: dict[str, float] | None,
        norm: float | None,
        interval: StepTimes,
    ) -> StepMetrics:
        run = self._run
        resolved = self._run.resolved
        # A batch ramp changes the tokens of a step within an interval.
        seen = run.tokens_seen(step)
        begun = min(self._logged, step - 1)
        rate = (seen - run.tokens_seen(begun)) / (step - begun) / interval.step_s
        self._logged = step
        per_device = rate / run.world.world_size
        is_16bit = resolved.precision != "fp32"
        shape = resolved.shape
        seq_len = None
        if resolved.plan.lengths is not None:
            seq_len = run.seq_len(step - 1)
            shape = replace(shape, seq_len=seq_len)
        return StepMetrics(
            step=step,
            tokens_seen=seen,
            loss=loss,
            z_loss=z_loss,
            loss_by_set=by_set,
            lr=resolved.schedule.learning_rate(step - 1),
            grad_norm=norm,
            loss_scale=loss_scale(self._engine.deepspeed),
            skipped_steps=self._engine.skipped_steps,
            tokens_per_second=rate,
            tokens_per_second_per_device=per_device,
            mfu=model_flops_utilisation(per_device, shape.flops_per_token, run.world.device_name, is_16bit),
            peak_memory_bytes=peak_memory_bytes(),
            data_wait_s=interval.data_wait_s,
            forward_backward_s=interval.forward_backward_s,
            optimizer_step_s=interval.optimizer_step_s,
            other_s=interval.other_s,
            eta_s=(run.tokens_seen(resolved.total_steps) - seen) / rate,
            paused_s=interval.paused_s,
            seq_len=seq_len,
            **read_gpu(run.world.device),
        )


class ReportPace(StepAction):
    """Tells once how long the run takes, and whether compiling its blocks pays. For rank 0.

    Its clock begins after the first step, which compiles and allocates.
    """

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        super().__init__(run, engine, io)
        self._began = 0.0
        self._has_length = run.config.minutes is not None
        self._has_gain = engine.compiler is None

    def due(self, step: int) -> bool:
        return not (self._has_length and self._has_gain)

    def run(self, result: StepResult) -> None:
        count = result.step - self._run.first_step - 1
        if count == 0:
            self._began = self._clock(result)
            return
        is_known = count + 1 >= _PACE_STEP or time.perf_counter() - self._began > _SLOW_S
        if is_known and not self._has_length:
            self._has_length = True
            self._report_length(result.step, self._rate(result))
        if count == _COMPILED_STEPS and not self._has_gain:
            self._has_gain = True
            self._report_gain(result.step, self._rate(result))

    def _clock(self, result: StepResult) -> float:
        """Return the seconds of this start without its pauses. Synchronises with the device."""
        float(result.loss)
        paused_s = sum(self._engine.meter.spent_s.get(name, 0.0) for name in get_args(Pause))
        return time.perf_counter() - paused_s

    def _rate(self, result: StepResult) -> float:
        """Return the tokens per second since the first step. Synchronises with the device."""
        tokens = self._run.tokens_seen(result.step) - self._run.tokens_seen(self._run.first_step + 1)
        return tokens / (self._clock(result) - self._began)

    def _report_length(self, step: int, rate: float) -> None:
        run = self._run
        world = self._run.world
        left_s = (run.tokens_seen(run.resolved.total_steps) - run.tokens_seen(step)) / rate
        if left_s < _SHORT_S:
            return
        if world.world_size > 1:
            devices = f"{world.world_size} x {world.device_name}"
        else:
            devices = world.device_name
        if left_s > _LONG_S:
            shorter = "; --minutes N would end it in time, with a schedule of its own"
        else:
            shorter = ""
        self._io.report(
            f"time: about {format_duration(left_s)} are left for {run.resolved.shape.num_parameters:,} parameters on "
            f"{devices} at {rate:,.0f} tokens/s{shorter}"
        )

    def _report_gain(self, step: int, rate: float) -> None:
        run = self._run
        compiler = self._engine.compiler
        assert compiler is not None
        step_s = (run.tokens_seen(step) - run.tokens_seen(step - 1)) / rate
        compile_s = compiler.compile_s
        eager = _eager_rate(run)
        gain = _USUAL_GAIN if eager is None else rate / eager - 1
        if gain > 0:
            pays_after = math.ceil(compile_s / (step_s * gain))
        else:
            pays_after = None
        if eager is None:
            words = f"no eager steps of this run to compare: a gain of {gain:.0%} pays after {pays_after:,} steps"
        elif pays_after is None:
            words = f"eager, this run had {eager:,.0f}: --compile off is at least as fast"
        else:
            words = f"eager, this run had {eager:,.0f}: compiling has paid after {pays_after:,} steps"
        self._io.report(f"blocks: compiled in {compile_s:.1f} s, {rate:,.0f} tokens/s; {words}")
        self._io.log_event(
            "compilation",
            step=step,
            compile_s=round(compile_s, 1),
            tokens_per_second=round(rate),
            eager_tokens_per_second=None if eager is None else round(eager),
            pays_after_steps=pays_after,
            is_measured=eager is not None,
        )


def _eager_rate(run: Run) -> float | None:
    """Return the median tokens/s of the run's last eager start on as many of the same devices, or None."""
    here = {key: value for key, value in _facts(run).items() if key in ("world_size", "micro_batch_size", "device")}
    rates: list[float] = []
    is_alike = False
    with suppress(OSError, ValueError), open(run.config.run / METRICS_NAME, encoding="utf-8") as file:
        for record in map(json.loads, file):
            if record.get("event") == "start":
                is_alike = record.get("compile") == "off" and here.items() <= record.items()
                rates = [] if is_alike else rates
            elif is_alike and record["kind"] == "train":
                rates.append(record["tokens_per_second"])
    # The first step of a start allocates.
    if len(rates) > 1:
        return median(rates[1:])
    return None


def per_source_loss(run: Run, result: StepResult, sequence_losses: Sequence[Tensor]) -> dict[str, float]:
    """Return the loss in nats per token of each dataset of a mixture that has samples in this step. Collective.

    `sequence_losses`: this rank's loss of each sequence, [sequences] per micro-step.
    """
    names = run.start.sets.names
    ids = np.concatenate([batch.sample_ids.numpy() for batch in result.micro_batches])
    pairs = zip(result.micro_batches, sequence_losses, strict=True)
    counted = [losses for batch, losses in pairs if not batch.is_filler]
    # A sample may be cut into several sequences.
    losses = torch.cat(counted or [torch.empty(0)]).double().view(len(ids), -1 if counted else 1).mean(1).cpu().numpy()
    shares = [batch.target_shares() for batch in result.micro_batches if not batch.is_filler]
    owners = run.stream.set_of(ids)
    sums = [np.bincount(owners, of_sample, len(names)) for of_sample in (losses, np.concatenate([*shares, []]))]
    # Over all ranks: [sums, targets in samples], each by dataset.
    totals = np.sum(gather(run.world.control, [part.tolist() for part in sums]), axis=0)
    return {name: total / count for name, total, count in zip(names, *totals.tolist(), strict=True) if count}


def _facts(run: Run) -> dict[str, object]:
    """Return the facts about this start that a report needs and the next start may change."""
    resolved = run.resolved
    sets = run.start.sets
    return {
        "startup_s": sum(run.startup_s.values()),
        "world_size": run.world.world_size,
        "zero_stage": resolved.zero_stage,
        "precision": resolved.precision,
        "micro_batch_size": resolved.plan.micro_batch_size,
        "device": run.world.device_name,
        "compile": run.start.compilation.setting,
        "estimated_bytes": run.estimate.allocated_bytes,
        "tokenizer": sets.manifest.tokenizer,
        # A mixture has no single ratio: its weights may change from stage to stage.
        "bytes_per_token": None if sets.recipe else sets.manifest.bytes_per_target("train"),
    }


class RouterLog:
    """Reads `GPT.routing` at logged steps."""

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        self._run = run
        self._engine = engine
        self._io = io
        shape = run.resolved.shape
        self._blocks = [block for block in range(shape.n_layer) if shape.is_sparse(block)]
        self._detector = CollapseDetector(len(self._blocks), shape.num_experts)
        self._next_table = 0.0

    def read(self, step: int) -> dict[str, Any]:
        """Return the routers' fields of StepMetrics on rank 0; none without experts. Collective."""
        routing = self._engine.deepspeed.module.routing
        if routing is None:
            return {}
        routing = routing.clone()
        dist.all_reduce(routing)
        if self._io.log is None:
            return {}
        shape = self._run.resolved.shape
        loss = self._run.resolved.loss
        sums = routing.double().cpu().numpy()
        loads = sums[:, : shape.num_experts]
        tokens = sums[0, : shape.num_experts].sum() / shape.experts_per_token
        relative = loads / loads.mean(1, keepdims=True)
        if step >= self._next_table or step == self._run.resolved.total_steps:
            self._next_table = step * _TABLE_GROWTH
            self._io.log.log_event("expert_load", step=step, blocks=self._blocks, loads=relative.round(2).tolist())
        self._warn(step, loads, tokens)
        balance = loss.balance_loss * sums[:, BALANCE].sum() * self._run.seq_len(step - 1) / tokens
        values = {
            "router_loss": balance + loss.router_z_loss * sums[:, Z_SQUARED].sum() / tokens,
            "expert_load_max": relative.max(),
            "expert_load_mean": relative.max(1).mean(),
            "expert_load_min": relative.min(),
            "router_entropy": sums[:, ENTROPY].mean() / tokens,
        }
        if shape.router_bias:
            values["tokens_moved"] = sums[:, MOVED].mean() / tokens
        return {name: float(value) for name, value in values.items()}

    def _warn(self, step: int, loads: NDArray[np.float64], tokens: float) -> None:
        collapse = self._detector.add(step, loads, tokens)
        if collapse is None:
            return
        rows, experts, what, since = collapse
        loss = self._run.resolved.loss
        shape = self._run.resolved.shape
        blocks = [self._blocks[row] for row in rows]
        if len(blocks) > 1:
            others = f"; so have those of blocks {_listed(blocks[1:])}"
        else:
            others = ""
        raised = f"balance_loss (now {loss.balance_loss:g})"
        if shape.router_bias:
            raised = f"router_bias_speed (now {loss.router_bias_speed:g})"
        self._io.report(
            f"WARNING: step {step}: the router of block {blocks[0]} has collapsed: {what} "
            f"expert{'s' if len(experts) > 1 else ''} {_listed(experts)} of {shape.num_experts} since step {since}"
            f"{others}. Raise {raised}, give router_z_loss 1e-3, lower the learning rate or lengthen the warm-up, from "
            "a checkpoint before that"
        )
        assert self._io.log is not None
        self._io.log.log_event("collapsed_router", step=step, blocks=blocks, experts=experts, what=what, since=since)


class CollapseDetector:
    """Judges readings one after the other, until one router has collapsed."""

    def __init__(self, blocks: int, experts: int) -> None:
        self._first = np.full((2, blocks, experts), -1)
        """First step of a series in which an expert is unused, or gets nearly all tokens; -1 outside of one."""
        self._readings = np.zeros_like(self._first)
        self._is_done = False

    def add(self, step: int, loads: NDArray[np.float64], tokens: float) -> tuple[list[int], list[int], str, int] | None:
        """Judge the tokens per expert [blocks, experts] of a step of `tokens`.

        Returns the rows of blocks whose router has collapsed; and of the first of them the experts, what they get, and
        since when. Returns that once.
        """
        if self._is_done or loads.mean() < _MIN_TOKENS:
            return None
        mean = loads.mean(1, keepdims=True)
        # Where most experts are chosen, each gets nearly all tokens.
        states = np.stack((loads < _UNUSED * mean, (loads >= NEARLY_ALL * tokens) & (loads >= _OVERLOADED * mean)))
        self._first = np.where(states, np.where(self._first < 0, step, self._first), -1)
        self._readings = np.where(states, self._readings + 1, 0)
        collapsed = states & (step - self._first >= PATIENCE_STEPS) & (self._readings >= MIN_READINGS)
        if not collapsed.any():
            return None
        self._is_done = True
        rows = np.flatnonzero(collapsed.any((0, 2))).tolist()
        kind = int(not collapsed[0, rows[0]].any())
        experts = np.flatnonzero(collapsed[kind, rows[0]]).tolist()
        what = (
            f"less than {_UNUSED:g} of the mean load has gone to",
            f"over {NEARLY_ALL:.0%} of the tokens have gone to",
        )[kind]
        return rows, experts, what, int(self._first[kind, rows[0]][experts].max())


def _listed(numbers: list[int]) -> str:
    if len(numbers) > _MAX_NAMES:
        more = f" and {len(numbers) - _MAX_NAMES} more"
    else:
        more = ""
    return f"{', '.join(map(str, numbers[:_MAX_NAMES]))}{more}"


SlowPhase = Literal["data wait", "arithmetic"]


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


class StragglerDetector:
    """Remembers readings of all ranks, and the stragglers already named."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[SlowPhase, int], deque[float]] = defaultdict(lambda: deque(maxlen=READINGS))
        self._named: set[tuple[SlowPhase, int]] = set()

    def observe(self, phase: SlowPhase, seconds: Sequence[float], of_s: float | None = None) -> dict[int, float]:
        """Add a reading of each rank, and return the new stragglers: ranks slower than the others, with their ratios.

        Without `of_s` the ratio is relative to the others' median. With it, the ratio tells how much longer something
        that takes `of_s` becomes.
        """
        stragglers: dict[int, float] = {}
        for rank, own in enumerate(seconds if len(seconds) > 1 else ()):
            usual = median([*seconds[:rank], *seconds[rank + 1 :]])
            base = usual if of_s is None else of_s
            if base <= 0.0:
                continue
            ratios = self._ratios[phase, rank]
            ratios.append(1 + (own - usual) / base)
            if len(ratios) < READINGS:
                continue
            is_slow = median(ratios) >= SLOW_RATIO
            if is_slow and (phase, rank) not in self._named:
                stragglers[rank] = median(ratios)
            (self._named.add if is_slow else self._named.discard)((phase, rank))
        return stragglers


class WatchStragglers:
    """Reports each straggler once, with its host."""

    def __init__(self, world: World, log: MetricsLog | None, report: Callable[[str], None]) -> None:
        self._world = world
        self._log = log
        self._report = report
        self._detector = StragglerDetector()

    def check(self, step: int, window: LoggedWindow) -> None:
        """Judge the timings exchanged at `step`. Collective."""
        times = window.rank_times
        # Ranks measure a step a little differently and must agree on the result: rank 0's measurement counts.
        by_arithmetic = self._detector.observe("arithmetic", [time.arithmetic_s for time in times])
        by_data = self._detector.observe("data wait", [time.data_wait_s for time in times], times[0].step_s)
        if not by_arithmetic and not by_data:
            return
        hosts = gather(self._world.control, os.uname().nodename)
        for phase, cause, stragglers in (
            ("arithmetic", "is slow: its arithmetic takes", by_arithmetic),
            ("data wait", "waits for data: steps take", by_data),
        ):
            for rank, ratio in stragglers.items():
                where = f"rank {rank} on host {hosts[rank]}"
                self._report(f"WARNING: step {step}: {where} {cause} {ratio:.2f} times as long")
                if self._log:
                    values = {"rank": rank, "host": hosts[rank], "ratio": ratio, "phase": phase}
                    self._log.log_event("slow_rank", step=step, **values)
