"""The optimum when the model will also be used: smaller and trained longer (Sardana et al. 2024, arXiv:2401.00448).

Least 6 N D_train + w 2 N D_inference among the models that reach one loss. Along that loss, D_train follows from N, so
one number is searched. No torch.
"""

from __future__ import annotations

import math

from llmscale.planning.flops import inference_flops, training_flops
from llmscale.planning.scaling_laws import ParametricLaw, Point

#: Golden section: the bracket shrinks by this factor each time; 40 times leave 4e-9 of it.
_GOLDEN = (math.sqrt(5) - 1) / 2
_SECTIONS = 40


def find_lifetime_optimum(
    law: ParametricLaw, loss: float, inference_tokens: float, inference_weight: float = 1.0
) -> Point:
    """The cheapest way to `loss` with that many tokens of inference after it.

    `inference_weight`: what a FLOP of inference costs in FLOPs of training (training MFU over inference MFU on the same
    GPUs). Raises ConfigError when no model reaches the loss.
    """
    optimum = law.optimal_parameters(law.flops_for_loss(loss))
    smallest = _smallest_parameters(law, loss)

    def cost(share: float) -> float:
        """Of the model `share` of the way, in logarithms, from the smallest possible to the training optimum."""
        parameters = smallest * (optimum / smallest) ** share
        tokens = law.tokens_for_loss(parameters, loss)
        if tokens is None:
            return math.inf
        return training_flops(parameters, tokens) + inference_weight * inference_flops(parameters, inference_tokens)

    # Inference only ever makes the model smaller, and the cost has one valley.
    low, high = 0.0, 1.0
    for _ in range(_SECTIONS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if cost(left) <= cost(right) else (left, high)
    parameters = smallest * (optimum / smallest) ** ((low + high) / 2)
    tokens = law.tokens_for_loss(parameters, loss)
    if tokens is None:  # not reached: the valley lies above the smallest model
        tokens = law.optimal_tokens(law.flops_for_loss(loss))
    return Point(parameters, tokens, loss)


def _smallest_parameters(law: ParametricLaw, loss: float) -> float:
    """The size that would reach the loss with endless data: A / N^alpha = loss - E."""
    ln_a, _, _, alpha, _ = law.coefficients
    return math.exp((ln_a - math.log(loss - law.irreducible_loss)) / alpha)
