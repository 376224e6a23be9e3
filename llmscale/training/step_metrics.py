"""Metrics of a logged step, and the clock that measures them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from llmscale.engine.train_step import PhaseTimer

#: Interruptions of training.
Pause = Literal["saving", "evaluating", "starting", "profiling"]


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one logged step."""

    step: int
    """Optimizer steps done, this one included."""
    tokens_seen: int
    """Tokens trained on since step 0, over all ranks."""
    loss: float
    """Mean over the global batch, in nats per token, without the z-loss; null in metrics.jsonl if NaN or infinite."""
    z_loss: float | None
    """--z-loss times the mean squared log-sum-exp of the logits, over the global batch; None without."""
    lr: float
    grad_norm: float | None
    """Global norm before clipping; infinite if the step was skipped, null in metrics.jsonl."""
    loss_scale: float | None
    """Loss scale of fp16; None in other precisions."""
    skipped_steps: int
    """Steps that DeepSpeed skipped because of overflow since step 0, over all starts."""
    tokens_per_second: float
    """Speed of all ranks since the last logged step, without validation, sampling and checkpoints."""
    tokens_per_second_per_device: float
    mfu: float | None
    """Model FLOPs utilisation, a fraction; None on hardware whose peak is unknown."""
    peak_memory_bytes: int
    """Device memory on a GPU, resident memory of rank 0's process on a CPU."""
    data_wait_s: float
    """Seconds per step, like the next three."""
    forward_backward_s: float
    optimizer_step_s: float
    other_s: float
    eta_s: float
    """Seconds to the end of the run at the present speed."""
    paused_s: dict[str, float] = field(default_factory=dict)
    """Seconds since the last logged step outside of steps, by Pause."""
    loss_by_set: dict[str, float] | None = None
    """Nats per token of each dataset of a mixture that has samples in this step."""
    seq_len: int | None = None
    """Tokens of a sequence in a run whose sequences grow."""
    router_loss: float | None = None
    """Balance loss and z-loss of routers, weighted, summed over blocks; None without experts, like the next four."""
    expert_load_max: float | None = None
    """Tokens of the busiest expert of any block, over the mean of its block."""
    expert_load_mean: float | None = None
    """Tokens of each block's busiest expert over the mean of the block, mean over blocks."""
    expert_load_min: float | None = None
    """Tokens of the idlest expert of any block, over the mean of its block."""
    router_entropy: float | None = None
    """Entropy of the routers' scores for a token, nats, mean over tokens and blocks."""
    tokens_moved: float | None = None
    """Fraction of tokens that the routers' biases send to other experts; None without biases."""
    power_w: float | None = None
    """Power of rank 0's GPU (training/log_steps.py); None without NVML, like the next two."""
    temperature_c: float | None = None
    gpu_utilisation: float | None = None


#: Fields that metrics.jsonl lacks without a value: of mixtures, growing sequences, experts and GPUs with NVML.
OPTIONAL_FIELDS = (
    *("loss_by_set", "seq_len", "power_w", "temperature_c", "gpu_utilisation", "router_loss", "expert_load_max"),
    *("expert_load_mean", "expert_load_min", "router_entropy", "tokens_moved"),
)


def format_step(m: StepMetrics, total_steps: int) -> str:
    """Return the console line of one step."""
    scale = "" if m.loss_scale is None else f" | scale {m.loss_scale:g}"
    skipped = f" | skipped {m.skipped_steps}" if m.skipped_steps else ""
    z_loss = "" if m.z_loss is None else f" | z-loss {m.z_loss:.2e}"
    load = "" if m.expert_load_max is None else f" | experts {m.expert_load_min:.2f} to {m.expert_load_max:.2f}"
    load += "" if m.tokens_moved is None else f", {m.tokens_moved:.1%} moved"
    norm = "-" if m.grad_norm is None else f"{m.grad_norm:.3f}"
    mfu = "-" if m.mfu is None else f"{m.mfu:.1%}"
    return (
        f"step {m.step:>6}/{total_steps} | loss {m.loss:.4f}{z_loss} | lr {m.lr:.2e} | norm {norm}{scale}{skipped}"
        f"{load} | {m.tokens_per_second:,.0f} tok/s ({m.tokens_per_second_per_device:,.0f}/device) | mfu {mfu} "
        f"| mem {m.peak_memory_bytes / 2**30:.2f} GiB | eta {format_duration(m.eta_s)}"
    )


def format_duration(seconds: float) -> str:
    """Format seconds as 45s, 3m20s, 5h07m or 2d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


@dataclass(frozen=True)
class StepTimes:
    """Averages per step since the last reading, in seconds."""

    step_s: float
    data_wait_s: float
    forward_backward_s: float
    optimizer_step_s: float
    paused_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the whole interval outside of steps, by Pause."""

    @property
    def other_s(self) -> float:
        """Seconds outside all phases: votes, logging, Python."""
        return max(0.0, self.step_s - self.data_wait_s - self.forward_backward_s - self.optimizer_step_s)


class StepMeter:
    """Counts steps, and the seconds they took without pauses."""

    def __init__(self, device: torch.device) -> None:
        self.phases = PhaseTimer(device)
        self._began, self._steps = time.perf_counter(), 0
        self._paused_s: dict[str, float] = {}
        self.done_steps = 0
        """Optimizer steps of this start."""
        self.pausing_for: Pause | None = None
        """The current interruption of training."""
        self.spent_s: dict[str, float] = {}
        """Seconds of this start up to the last reading, by phase and pause."""

    def count_step(self) -> None:
        """Count one more optimizer step."""
        self._steps += 1
        self.done_steps += 1

    @contextmanager
    def pause(self, what: Pause) -> Iterator[None]:
        """Exclude the time inside from training."""
        began = time.perf_counter()
        self.phases.mark("other")
        self.pausing_for = what
        try:
            yield
        finally:
            self.pausing_for = None
            seconds = self._spend(what, time.perf_counter() - began)
            self._paused_s[what] = self._paused_s.get(what, 0.0) + seconds

    def _spend(self, what: str, seconds: float) -> float:
        self.spent_s[what] = self.spent_s.get(what, 0.0) + seconds
        return seconds

    def read(self) -> StepTimes:
        """Return the averages of the interval that ends now, and begin the next.

        Call it after a synchronisation with the device.
        """
        now, steps = time.perf_counter(), max(self._steps, 1)
        phases = self.phases.read()
        interval = StepTimes(
            step_s=(now - self._began - sum(self._paused_s.values())) / steps,
            data_wait_s=phases["data_wait"] / steps,
            forward_backward_s=phases["forward_backward"] / steps,
            optimizer_step_s=phases["optimizer_step"] / steps,
            paused_s=self._paused_s,
        )
        self._began, self._paused_s, self._steps = now, {}, 0
        for name in ("data_wait", "forward_backward", "optimizer_step", "other"):
            self._spend(name, getattr(interval, f"{name}_s") * steps)
        return interval
