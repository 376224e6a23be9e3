"""What one logged step says, and the line that says it. No torch."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Steps that DeepSpeed skipped because of overflow since step 0, over all starts."""
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
