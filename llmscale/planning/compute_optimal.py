"""The best model for a goal: the one point of the optimal ones that costs, has, reads or reaches what was asked. No
torch."""

from __future__ import annotations

import math
from typing import Literal

from llmscale.errors import ConfigError
from llmscale.planning.inference_aware import find_lifetime_optimum
from llmscale.planning.scaling_laws import ParametricLaw, Point

GoalKind = Literal["flops", "parameters", "tokens", "loss"]


#: Budgets between which a goal is looked for, FLOPs.
_LEAST, _MOST = 1e12, 1e32
_BISECTIONS = 40


def optimal_point(
    law: ParametricLaw, kind: GoalKind, value: float, inference_tokens: float = 0.0, inference_weight: float = 1.0
) -> Point:
    """The optimal model that costs `value` FLOPs to train, has that many parameters, reads that many tokens, or reaches
    that loss. Raises ConfigError when there is none.

    With inference it is the one that costs least over its life at the loss it reaches (Sardana et al. 2024): of those,
    too, there is one for every budget.
    """
    if not inference_tokens:
        return _training_optimum(law, kind, value)
    if kind == "loss":
        law.flops_for_loss(value)  # says what is wrong with it
        return find_lifetime_optimum(law, value, inference_tokens, inference_weight)
    low, high = math.log(_LEAST), math.log(_MOST)

    def point(ln_flops: float) -> Point:
        """The lifetime optimum that is as good as the compute-optimal model of that budget."""
        return find_lifetime_optimum(law, law.optimal_loss(math.exp(ln_flops)), inference_tokens, inference_weight)

    # Parameters, tokens and training FLOPs all grow as the loss falls.
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _measure(point(middle), kind) < value else (low, middle)
    found = point((low + high) / 2)
    if not math.isclose(_measure(found, kind), value, rel_tol=1e-3):
        raise ConfigError(f"no model of {value:.3g} {kind} is optimal for {inference_tokens:.3g} tokens of inference.")
    return found


def _training_optimum(law: ParametricLaw, kind: GoalKind, value: float) -> Point:
    flops = {
        "flops": lambda: value,
        "parameters": lambda: law.flops_for_parameters(value),
        "tokens": lambda: law.flops_for_tokens(value),
        "loss": lambda: law.flops_for_loss(value),
    }[kind]()
    return Point(law.optimal_parameters(flops), law.optimal_tokens(flops), law.optimal_loss(flops))


def _measure(point: Point, kind: GoalKind) -> float:
    return {
        "flops": point.flops,
        "parameters": point.num_parameters,
        "tokens": point.tokens,
        "loss": point.loss,
    }[kind]
