"""The table that --profile prints: parts of a step, measured beside what `llmscale plan` reckons with. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmscale.training.profiling.trace_shares import PARTS, TraceShares

#: What the throughput model knows as one.
_TOGETHER = {"norms": "norms and other operations", "other operations": "norms and other operations"}


def table_lines(shares: TraceShares, num_steps: int, predicted: Mapping[str, float]) -> Iterator[str]:
    """`predicted`: seconds of a step by part, as llmscale.planning.step_time names them; parts that are not in it are
    none of the model's."""
    yield f"{'part':<18}{'share':>8}{'ms a step':>12}{'plan, ms':>12}"
    for part in PARTS:
        seconds = shares.seconds[part]
        measured = f"{seconds / shares.wall_s:>8.1%}{_ms(seconds / num_steps):>12}"
        yield f"{part:<18}{measured}{_predicted(part, predicted):>12}"
    total = _ms(sum(predicted.values())) if predicted else "-"
    yield f"{'a step':<18}{1:>8.1%}{_ms(shares.wall_s / num_steps):>12}{total:>12}"
    if "norms and other operations" in predicted:
        yield "plan reckons norms and other operations as one: its number stands beside the latter"


def _predicted(part: str, predicted: Mapping[str, float]) -> str:
    name = _TOGETHER.get(part, part)
    return "-" if part == "norms" or name not in predicted else _ms(predicted[name])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"
