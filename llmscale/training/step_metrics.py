"""Metrics of a logged step, each declared once with its unit, column and chart; and the clock. No torch."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from llmscale.terminal.human_numbers import format_duration

if TYPE_CHECKING:
    from llmscale.engine.train_step import PhaseTimer

#: Interruptions of training.
Pause = Literal["saving", "evaluating", "starting", "profiling"]


@dataclass(frozen=True)
class Chart:
    """A chart of the report."""

    section: str
    title: str
    unit: str
    factor: float = 1.0
    """Value in `unit` of a recorded value of 1."""
    is_smoothed: bool = True
    is_positive: bool = False
    """True if values of 0 and below are left out."""
    is_stepped: bool = False
    log_axis: Literal["never", "wide", "always"] = "never"
    """When the axis is logarithmic; wide: if the values are far apart."""
    is_pictured: bool = False
    """True if --png and --svg draw it, too."""
    note: str = ""
    """Sentence below the chart."""


@dataclass(frozen=True)
class Metric:
    """The ways in which a number of a logged step is shown. Trackers get every number under its name."""

    line: str | Callable[[Any], str] = ""
    """Its part of the console line with what separates it, a format or a function; empty: none."""
    without: str = ""
    """The part in place of None."""
    chart: Chart | None = None
    """Its own chart; None if none, or one that report/charts.py draws from several numbers."""
    is_column: bool = True
    """False if the report does not read it."""


def metric(
    line: str | Callable[[Any], str] = "",
    *,
    without: str = "",
    chart: Chart | None = None,
    is_column: bool = True,
    **default: Any,
) -> Any:
    """Declare a metric. With `default=None` it is missing from metrics.jsonl where it has no value."""
    return field(metadata={"metric": Metric(line, without, chart, is_column)}, **default)


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of one logged step, in the order of the console line."""

    step: int
    """Optimizer steps done, this one included."""
    tokens_seen: int = metric()
    """Tokens trained on since step 0, over all ranks."""
    loss: float = metric(" | loss {:.4f}")
    """Mean over the global batch, in nats per token, without the z-loss; null in metrics.jsonl if NaN or infinite."""
    z_loss: float | None = metric(" | z-loss {:.2e}", chart=Chart("Optimisation", "Auxiliary z-loss", "nats per token"))
    """--z-loss times the mean squared log-sum-exp of the logits, over the global batch; None without."""
    lr: float = metric(
        " | lr {:.2e}", chart=Chart("Optimisation", "Learning rate", "per step", is_smoothed=False, is_pictured=True)
    )
    grad_norm: float | None = metric(
        " | norm {:.3f}",
        without=" | norm -",
        chart=Chart(
            "Optimisation", "Gradient norm", "before clipping", is_positive=True, log_axis="wide", is_pictured=True
        ),
    )
    """Global norm before clipping; infinite if the step was skipped, null in metrics.jsonl."""
    loss_scale: float | None = metric(
        " | scale {:g}",
        chart=Chart(
            "Optimisation",
            "Loss scale",
            "fp16",
            is_smoothed=False,
            is_positive=True,
            is_stepped=True,
            log_axis="always",
            is_pictured=True,
        ),
    )
    """Loss scale of fp16; None in other precisions."""
    skipped_steps: int = metric(lambda count: f" | skipped {count}" if count else "", is_column=False)
    """Steps that DeepSpeed skipped because of overflow since step 0, over all starts."""
    expert_load_min: float | None = metric(
        " | experts {:.2f}",
        default=None,
        chart=Chart("Experts", "Load of the idlest expert", "times the mean, worst block"),
    )
    """Tokens of the idlest expert of any block, over the mean of its block; None without experts."""
    expert_load_max: float | None = metric(
        " to {:.2f}",
        default=None,
        chart=Chart("Experts", "Load of the busiest expert", "times the mean, worst block"),
    )
    """Tokens of the busiest expert of any block, over the mean of its block; None without experts."""
    expert_load_mean: float | None = metric(default=None)
    """Tokens of each block's busiest expert over the mean of the block, mean over blocks; None without experts."""
    router_entropy: float | None = metric(default=None, chart=Chart("Experts", "Entropy of routers", "nats per token"))
    """Entropy of the routers' scores for a token, nats, mean over tokens and blocks; None without experts."""
    router_loss: float | None = metric(
        default=None, chart=Chart("Experts", "Loss of routers", "nats per token, beside the loss")
    )
    """Balance loss and z-loss of routers, weighted, summed over blocks; None without experts."""
    tokens_moved: float | None = metric(
        ", {:.1%} moved",
        default=None,
        chart=Chart("Experts", "Tokens moved by the routers' biases", "%", factor=100),
    )
    """Fraction of tokens that the routers' biases send to other experts; None without biases."""
    tokens_per_second: float = metric(
        " | {:,.0f} tok/s",
        chart=Chart("Speed and memory", "Throughput", "tokens per second, all ranks", is_pictured=True),
    )
    """Speed of all ranks since the last logged step, without validation, sampling and checkpoints."""
    tokens_per_second_per_device: float = metric(" ({:,.0f}/device)", is_column=False)
    mfu: float | None = metric(
        " | mfu {:.1%}",
        without=" | mfu -",
        chart=Chart(
            "Speed and memory", "Model FLOPs utilisation", "% of the hardware's peak", factor=100, is_pictured=True
        ),
    )
    """Model FLOPs utilisation, a fraction; None on hardware whose peak is unknown."""
    peak_memory_bytes: int = metric(lambda num_bytes: f" | mem {num_bytes / 2**30:.2f} GiB")
    """Device memory on a GPU, resident memory of rank 0's process on a CPU."""
    data_wait_s: float = metric()
    """Seconds per step, like the next three."""
    forward_backward_s: float = metric()
    optimizer_step_s: float = metric()
    other_s: float = metric()
    eta_s: float = metric(lambda seconds: f" | eta {format_duration(seconds)}", is_column=False)
    """Seconds to the end of the run at the present speed."""
    paused_s: dict[str, float] = field(default_factory=dict)
    """Seconds since the last logged step outside of steps, by Pause."""
    loss_by_set: dict[str, float] | None = None
    """Nats per token of each dataset of a mixture that has samples in this step."""
    seq_len: int | None = metric(default=None, is_column=False)
    """Tokens of a sequence in a run whose sequences grow."""
    power_w: float | None = metric(default=None, chart=Chart("GPU of rank 0", "Power", "W"))
    """Power of rank 0's GPU (training/log_steps.py); None without NVML, like the next two."""
    temperature_c: float | None = metric(default=None, chart=Chart("GPU of rank 0", "Temperature", "°C"))
    gpu_utilisation: float | None = metric(
        default=None, chart=Chart("GPU of rank 0", "Utilisation", "% of the time with a kernel", factor=100)
    )

    def as_record(self) -> dict[str, object]:
        """Return the fields of a record in metrics.jsonl."""
        record = asdict(self)
        return {key: value for key, value in record.items() if value is not None or key not in _LEFT_OUT}


#: Declarations by name.
METRICS: Mapping[str, Metric] = {
    entry.name: entry.metadata["metric"] for entry in fields(StepMetrics) if "metric" in entry.metadata
}
#: Fields that metrics.jsonl lacks without a value: of mixtures, growing sequences, experts and GPUs with NVML.
_LEFT_OUT = frozenset(entry.name for entry in fields(StepMetrics) if entry.default is None)


def format_step(m: StepMetrics, total_steps: int) -> str:
    """Return the console line of one step."""
    line = f"step {m.step:>6}/{total_steps}"
    for name, declared in METRICS.items():
        value = getattr(m, name)
        if value is None:
            line += declared.without
        else:
            line += declared.line.format(value) if isinstance(declared.line, str) else declared.line(value)
    return line


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

    def __init__(self, phases: PhaseTimer) -> None:
        self.phases = phases
        self._began = time.perf_counter()
        self._steps = 0
        self._paused_s: dict[str, float] = defaultdict(float)
        self.done_steps = 0
        """Optimizer steps of this start."""
        self.pausing_for: Pause | None = None
        """The current interruption of training."""
        self.spent_s: dict[str, float] = defaultdict(float)
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
            seconds = time.perf_counter() - began
            self.spent_s[what] += seconds
            self._paused_s[what] += seconds

    def read(self) -> StepTimes:
        """Return the averages of the interval that ends now, and begin the next.

        Call it after a synchronisation with the device.
        """
        now = time.perf_counter()
        steps = max(self._steps, 1)
        phases = self.phases.read()
        interval = StepTimes(
            step_s=(now - self._began - sum(self._paused_s.values())) / steps,
            data_wait_s=phases["data_wait"] / steps,
            forward_backward_s=phases["forward_backward"] / steps,
            optimizer_step_s=phases["optimizer_step"] / steps,
            paused_s=dict(self._paused_s),
        )
        self._began = now
        self._steps = 0
        self._paused_s.clear()
        for name in ("data_wait", "forward_backward", "optimizer_step", "other"):
            self.spent_s[name] += getattr(interval, f"{name}_s") * steps
        return interval
