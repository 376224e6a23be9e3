"""metrics.jsonl, the console line, and wandb: one record per logged step, written by the main rank only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from llmscale.evaluate.task_scores import show_value
from llmscale.files.append import AppendFile
from llmscale.training.run_folder import METRICS_NAME
from llmscale.training.wandb_run import WandbLog
from llmscale.untrusted.terminal import make_visible_line, print_visible


@dataclass(frozen=True)
class StepMetrics:
    """What one logged step says."""

    step: int
    """Optimizer steps done, this one included."""
    tokens_seen: int
    """Tokens trained on since step 0, over all ranks."""
    loss: float
    """Mean over the global batch, in nats per token, without the z-loss; null in metrics.jsonl when it is NaN or
    infinite."""
    z_loss: float | None
    """--z-loss times the mean squared log-sum-exp of the logits, over every rank's last micro-batch; None without."""
    lr: float
    grad_norm: float | None
    """Global norm before clipping; infinite when the step was skipped, which is null in metrics.jsonl."""
    loss_scale: float | None
    """fp16 only."""
    skipped_steps: int
    """Steps that DeepSpeed skipped because of overflow, since this process started."""
    tokens_per_second: float
    """All ranks, since the last logged step; validation, sampling and checkpoints not counted."""
    tokens_per_second_per_device: float
    mfu: float | None
    """Model FLOPs utilisation, a fraction; None on hardware whose peak is unknown."""
    peak_memory_bytes: int
    """Device memory on a GPU, resident memory of the main rank's process on a CPU."""
    data_wait_s: float
    """Seconds per step, as are the next three."""
    forward_backward_s: float
    optimizer_step_s: float
    other_s: float
    eta_s: float
    """Seconds to the end of the run at the present speed."""
    loss_by_set: dict[str, float] | None = None
    """Of a mix: nats per token of the step's samples of each set that had some."""


class MetricsLog:
    """Writes records to the run folder, the console and, when given one, a wandb run. For the main rank.

    Nothing that goes wrong with any of them ends training.
    """

    def __init__(
        self,
        run_folder: Path,
        total_steps: int,
        wandb_log: WandbLog | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises OSError while the run folder is not this run's; what is logged then waits in memory."""
        self._total_steps, self._wandb = total_steps, wandb_log
        # Unbuffered: a record is on its way to the disk when the step is over, whatever happens next.
        self._file = AppendFile(run_folder / METRICS_NAME, check=check)
        self._step = 0

    def log_step(self, metrics: StepMetrics) -> None:
        """Record a training step."""
        # Most runs have one set, and no such key.
        record = {key: value for key, value in asdict(metrics).items() if key != "loss_by_set" or value is not None}
        self._write({"kind": "train", **record})
        print(format_step(metrics, self._total_steps), flush=True)
        if self._wandb:
            values = {f"train/{key}": value for key, value in asdict(metrics).items() if value is not None}
            self._wandb.log(values, step=metrics.step)

    def log_validation(
        self,
        step: int,
        loss: float,
        num_samples: int,
        loss_by_set: Mapping[str, float] | None = None,
        bits_per_byte: float | None = None,
    ) -> None:
        """Record a validation: loss in nats per token over num_samples sequences, and of each set of a mix."""
        by_set = dict(loss_by_set or {})
        of_sets = {"loss_by_set": by_set} if by_set else {}
        values = {"loss": loss, **({} if bits_per_byte is None else {"bits_per_byte": bits_per_byte})}
        self._write({"kind": "validation", "step": step, **values, "num_samples": num_samples, **of_sets})
        print(
            f"step {step:>6}/{self._total_steps} | validation loss {loss:.4f} over {num_samples} sequences"
            + "".join(f" | {name} {value:.4f}" for name, value in by_set.items()),
            flush=True,
        )
        if self._wandb:
            self._wandb.log({f"validation/{key}": value for key, value in {**values, **by_set}.items()}, step=step)

    def log_evaluation(self, step: int, task: str, values: Mapping[str, float], num_items: int) -> None:
        """Record a task's results."""
        record = {"kind": "evaluation", "step": step, "task": task, "values": dict(values), "num_items": num_items}
        self._write(record)
        shown = "".join(f" | {name} {show_value(value)}" for name, value in values.items())
        print(
            f"step {step:>6}/{self._total_steps} | {make_visible_line(task)}{shown} over {num_items} items", flush=True
        )
        if self._wandb:
            self._wandb.log({f"evaluation/{task}/{name}": value for name, value in values.items()}, step=step)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Record text of the model; `text` begins with the prompt."""
        self._write({"kind": "sample", "step": step, "prompt": prompt, "text": text})
        print_visible(f"step {step:>6}/{self._total_steps} | sample: {text!r}", flush=True)

    def log_event(self, event: str, **values: object) -> None:
        """Record anything that is not a measurement: start, resume, save, stop."""
        self._write({"kind": "event", "event": event, **values})

    def close(self) -> None:
        """Make everything durable, close it, and warn of what is missing."""
        self._file.close()
        if self._wandb:
            self._wandb.finish()

    def _write(self, record: dict[str, object]) -> None:
        self._step = int(str(record.get("step", self._step)))
        # JSON has no NaN and no infinity; a gradient norm is infinite whenever fp16 overflows.
        self._file.append(json.dumps(_finite(record), allow_nan=False).encode() + b"\n", self._step)


def _finite(value: object) -> object:
    """The same with null for what is NaN or infinite, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return {key: _finite(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def format_step(m: StepMetrics, total_steps: int) -> str:
    """The console line of one step."""
    scale = "" if m.loss_scale is None else f" | scale {m.loss_scale:g}"
    skipped = f" | skipped {m.skipped_steps}" if m.skipped_steps else ""
    z_loss = "" if m.z_loss is None else f" | z-loss {m.z_loss:.2e}"
    norm = "-" if m.grad_norm is None else f"{m.grad_norm:.3f}"
    mfu = "-" if m.mfu is None else f"{m.mfu:.1%}"
    return (
        f"step {m.step:>6}/{total_steps} | loss {m.loss:.4f}{z_loss} | lr {m.lr:.2e} | norm {norm}{scale}{skipped} "
        f"| {m.tokens_per_second:,.0f} tok/s ({m.tokens_per_second_per_device:,.0f}/device) | mfu {mfu} "
        f"| mem {m.peak_memory_bytes / 2**30:.2f} GiB | eta {format_duration(m.eta_s)}"
    )


def format_duration(seconds: float) -> str:
    """Seconds as 45s, 3m20s, 5h07m or 2d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
