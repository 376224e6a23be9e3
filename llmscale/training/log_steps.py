"""Records of steps: metrics and sensors every --log-every steps.

Routers of experts at logged steps: their metrics, each expert's load, and a warning of one that has collapsed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from llmscale.config.hardware import model_flops_utilisation
from llmscale.engine.collectives import gather
from llmscale.engine.device_memory import peak_memory_bytes
from llmscale.engine.train_step import loss_scale
from llmscale.model.experts import BALANCE, ENTROPY, MOVED, Z_SQUARED
from llmscale.training.live_run import (
    ArithmeticProbe,
    Engine,
    LoggedWindow,
    RankTimes,
    Run,
    RunIO,
    StepAction,
    StepResult,
)
from llmscale.training.run_folder import clear_failure
from llmscale.training.step_metrics import StepMetrics, StepTimes


@dataclass(frozen=True)
class GpuReading:
    """State of a GPU."""

    power_w: float | None = None
    """Power, of NVML's last second on most GPUs."""
    temperature_c: float | None = None
    gpu_utilisation: float | None = None
    """Fraction of NVML's last sampling period (up to a second) in which a kernel ran; says nothing of how well."""


def read_gpu(device: torch.device) -> GpuReading:
    """Return the state of a GPU within milliseconds, by NVML through torch; nothing of another device.

    NVML's binding is nvidia-ml-py (`pip install -e '.[nvml]'`). What it, the driver or the GPU does not tell is None.
    """
    if device.type != "cuda":
        return GpuReading()
    milliwatts, percentage = _ask(torch.cuda.power_draw, device), _ask(torch.cuda.utilization, device)
    return GpuReading(
        power_w=None if milliwatts is None else milliwatts / 1000,
        temperature_c=_ask(torch.cuda.temperature, device),
        gpu_utilisation=None if percentage is None else percentage / 100,
    )


def _ask(query: Callable[[torch.device], int], device: torch.device) -> int | None:
    try:
        return query(device)
    except Exception:  # ModuleNotFoundError without the binding, RuntimeError without a driver, NVML's own
        return None


class LogSteps(StepAction):
    """Logs every --log-every steps, the first and the last: the one place where the host waits for the device."""

    def __init__(
        self, run: Run, engine: Engine, io: RunIO, watchers: Sequence[Callable[[int, LoggedWindow], None]] = ()
    ) -> None:
        """`watchers` are called with every logged step and the exchanged window."""
        self._run, self._engine, self._io, self._watchers = run, engine, io, watchers
        self._sequence_losses: deque[Tensor] = deque(maxlen=run.resolved.plan.gradient_accumulation_steps)
        if run.stream.mix:
            engine.deepspeed.module.head.sequence_losses = self._sequence_losses
        self._routers = RouterLog(run, engine, io)
        self._probe = ArithmeticProbe(engine.deepspeed, run.resolved)
        self._logged = run.first_step
        """Last logged step."""
        self._interval: StepTimes | None = None
        """Timings of the previous logging interval. Ranks exchange these: the exchange itself is part of the next."""

    def begin(self, step: int) -> None:
        if self._io.log:
            clear_failure(self._run.config.run)
            self._io.log.begin(step, **self._run.history.as_dict(), **_facts(self._run))

    def due(self, step: int) -> bool:
        run = self._run
        return step % run.config.log_every == 0 or step in (run.first_step + 1, run.resolved.total_steps)

    def run(self, result: StepResult) -> None:
        run, io = self._run, self._io
        z_squared, before = self._engine.deepspeed.module.head.z_squared, result.step - 1
        # The mean over this rank's micro-steps, weighted as the loss is.
        means = [] if z_squared is None else [z_squared * run.loss_weight(before) / run.micro_steps(before)]
        last, times = self._interval, RankTimes(0.0, 0.0, 0.0)
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
        run, resolved = self._run, self._run.resolved
        # A batch ramp changes the tokens of a step within an interval.
        seen, begun = run.tokens_seen(step), min(self._logged, step - 1)
        rate = (seen - run.tokens_seen(begun)) / (step - begun) / interval.step_s
        self._logged = step
        per_device = rate / run.world.world_size
        is_16bit = resolved.precision != "fp32"
        shape, seq_len = resolved.shape, None
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
            **asdict(read_gpu(run.world.device)),
        )


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
    owners = run.stream.set_of(ids)
    sums = [np.bincount(owners, weights, minlength=len(names)) for weights in (losses, np.ones(len(ids)))]
    # Over all ranks: [sums, counts], each by dataset.
    totals = np.sum(gather(run.world.control, [part.tolist() for part in sums]), axis=0)
    return {name: total / count for name, total, count in zip(names, *totals.tolist(), strict=True) if count}


def _facts(run: Run) -> dict[str, object]:
    """Return the facts about this start that a report needs and the next start may change."""
    resolved, sets = run.resolved, run.start.sets
    return {
        "startup_s": sum(run.startup_s.values()),
        "world_size": run.world.world_size,
        "zero_stage": resolved.zero_stage,
        "precision": resolved.precision,
        "micro_batch_size": resolved.plan.micro_batch_size,
        "device": run.world.device_name,
        "estimated_bytes": run.estimate.allocated_bytes,
        "tokenizer": sets.manifest.tokenizer,
        # A mixture has no single ratio: its weights may change from stage to stage.
        "bytes_per_token": None if sets.recipe else sets.manifest.splits["train"].bytes_per_token,
    }


#: A router has collapsed when an expert is unused, or gets nearly all tokens, for this number of steps and of readings.
PATIENCE_STEPS, MIN_READINGS, NEARLY_ALL = 100, 5, 0.95
#: Loads relative to the mean: an expert is unused below the first; one with nearly all tokens has at least the second.
_UNUSED, _OVERLOADED = 1e-3, 1.5
#: Tokens per expert and step below which an expert may have none by chance.
_MIN_TOKENS = 10
#: Factor between the steps whose loads are recorded expert by expert: a table may have 10,000 numbers.
_TABLE_GROWTH = 1.25
#: Experts and blocks that a warning names.
_MAX_NAMES = 4


class RouterLog:
    """Reads `GPT.routing` at logged steps."""

    def __init__(self, run: Run, engine: Engine, io: RunIO) -> None:
        self._run, self._engine, self._io = run, engine, io
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
        shape, loss = self._run.resolved.shape, self._run.resolved.loss
        sums = routing.double().cpu().numpy()
        loads, tokens = sums[:, : shape.num_experts], sums[0, : shape.num_experts].sum() / shape.experts_per_token
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
        loss, shape = self._run.resolved.loss, self._run.resolved.shape
        blocks = [self._blocks[row] for row in rows]
        others = f"; so have those of blocks {_listed(blocks[1:])}" if len(blocks) > 1 else ""
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
    more = f" and {len(numbers) - _MAX_NAMES} more" if len(numbers) > _MAX_NAMES else ""
    return f"{', '.join(map(str, numbers[:_MAX_NAMES]))}{more}"
