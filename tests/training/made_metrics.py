"""What a logged step says, for tests of whoever is told."""

from __future__ import annotations

from dataclasses import replace

from llmscale.training.step_metrics import StepMetrics

_STEP = StepMetrics(
    step=20,
    tokens_seen=163_840,
    loss=3.14159,
    z_loss=None,
    lr=6e-4,
    grad_norm=0.5,
    loss_scale=None,
    skipped_steps=0,
    tokens_per_second=12_345.6,
    tokens_per_second_per_device=6_172.8,
    mfu=0.415,
    peak_memory_bytes=3 * 2**30,
    data_wait_s=0.01,
    forward_backward_s=0.5,
    optimizer_step_s=0.1,
    other_s=0.02,
    eta_s=3725,
)


def make_metrics(**changes: object) -> StepMetrics:
    """A step's metrics; `changes` say what differs."""
    return replace(_STEP, **changes)  # type: ignore[arg-type]  # values of its fields
