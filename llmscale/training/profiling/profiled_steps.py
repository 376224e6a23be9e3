"""Which steps --profile means. No torch."""

from __future__ import annotations

from llmscale.config.command_line import parse_step_range

#: A trace has some thousand events per step and rank, which somebody wants to open.
MOST_STEPS = 50


def parse_profiled(text: str) -> tuple[int, int]:
    """(A, B) of A:B. Raises ConfigError."""
    return parse_step_range("--profile", text, "a trace is written", MOST_STEPS)
