"""Sizes and breakdowns in words. No torch."""

from __future__ import annotations

from llmscale.memory.breakdown import Breakdown

GIB = 2**30
MIB = 2**20


def format_size(num_bytes: float) -> str:
    """`1.25 GiB`, `312.4 GiB`, or `48.0 MiB` for what is small."""
    if abs(num_bytes) < GIB / 10:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) < 100 * GIB else f"{num_bytes / GIB:,.1f} GiB"


def describe_breakdown(breakdown: Breakdown) -> str:
    """`parameters 1.20 + gradients 0.60 + activations 3.41 GiB`; what rounds to nothing is left out."""
    unit, name = (GIB, "GiB") if breakdown.total_bytes >= GIB / 10 else (MIB, "MiB")
    parts = {key.removesuffix("_bytes"): value / unit for key, value in breakdown.as_dict().items()}
    return " + ".join(f"{key} {value:.2f}" for key, value in parts.items() if value >= 0.005) + f" {name}"
