"""What each law finds best for one training budget. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmscale.planning.scaling_laws import KAPLAN, LAWS, Interval, ParametricLaw


@dataclass(frozen=True)
class LawRow:
    """One law's optimum."""

    name: str
    num_parameters: Interval | float
    """An interval where the law's errors are published."""
    tokens: Interval | float
    loss: Interval | float | None
    """None where the law's loss is of another text and tokenizer."""
    source: str


def law_rows(flops: float) -> list[LawRow]:
    """The re-fit, the original with exact and with rounded exponents, and Kaplan's."""
    size, tokens = KAPLAN.optimal_parameters(flops), KAPLAN.optimal_tokens(flops)
    return [*(_parametric_row(law, flops) for law in LAWS), LawRow(KAPLAN.name, size, tokens, None, KAPLAN.source)]


def _parametric_row(law: ParametricLaw, flops: float) -> LawRow:
    def with_range(quantity: Callable[[ParametricLaw], float]) -> Interval | float:
        return law.interval(quantity) or quantity(law)

    return LawRow(
        law.name,
        with_range(lambda moved: moved.optimal_parameters(flops)),
        with_range(lambda moved: moved.optimal_tokens(flops)),
        with_range(lambda moved: moved.optimal_loss(flops)),
        law.source,
    )


def central(value: Interval | float) -> float:
    """The value, with its range or without."""
    return value.value if isinstance(value, Interval) else value
