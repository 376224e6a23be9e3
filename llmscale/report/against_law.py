"""A run beside what Chinchilla's law expects of a model of its size. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmscale.planning.flops import training_flops
from llmscale.planning.scaling_laws import BESIROGLU, FITTED_PARAMETERS, Interval, ParametricLaw

_POINTS = 65


@dataclass(frozen=True)
class Expectation:
    """What a law says of N parameters after each number of tokens."""

    law: str
    source: str
    num_parameters: int
    tokens: tuple[float, ...]
    """Ascending, evenly in the logarithm; only where the law expects less than a uniform guess: below, it says
    nothing. Empty where it says nothing of the whole run."""
    loss: tuple[float, ...]
    """Nats per token of a model of this size."""
    optimal_loss: tuple[float, ...]
    """Of the best model for the same training FLOPs, 6 N D."""
    final: Interval | float
    """Of this size after the last token; an 80 % interval of the fit's errors where they are published."""
    optimal_parameters: float
    """Of the best model for the run's FLOPs."""
    optimal_tokens: float
    is_extrapolation: bool
    """The size is beyond those that the fit rests on."""


def expect(
    num_parameters: int, vocab_size: int, first_tokens: float, last_tokens: float, law: ParametricLaw = BESIROGLU
) -> Expectation:
    """What `law` expects of a run from its first record to its last; both numbers of tokens are above 0."""
    uniform = math.log(vocab_size)
    ratio = last_tokens / first_tokens
    spaced = [first_tokens * ratio ** (index / (_POINTS - 1)) for index in range(_POINTS)]
    tokens = tuple(count for count in spaced if law.loss(num_parameters, count) < uniform)
    flops = training_flops(num_parameters, last_tokens)
    low, high = FITTED_PARAMETERS
    final = law.interval(lambda moved: moved.loss(num_parameters, last_tokens))
    return Expectation(
        law=law.name,
        source=law.source,
        num_parameters=num_parameters,
        tokens=tokens,
        loss=tuple(law.loss(num_parameters, count) for count in tokens),
        optimal_loss=tuple(law.optimal_loss(training_flops(num_parameters, count)) for count in tokens),
        final=final or law.loss(num_parameters, last_tokens),
        optimal_parameters=law.optimal_parameters(flops),
        optimal_tokens=law.optimal_tokens(flops),
        is_extrapolation=not low <= num_parameters <= high,
    )
