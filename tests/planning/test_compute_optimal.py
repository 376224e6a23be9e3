from __future__ import annotations

import pytest

from llmscale.errors import ConfigError
from llmscale.planning.compute_optimal import GoalKind, optimal_point
from llmscale.planning.scaling_laws import BESIROGLU


@pytest.mark.parametrize(("kind", "value"), [("flops", 1e21), ("parameters", 7e9), ("tokens", 1e12), ("loss", 2.2)])
@pytest.mark.parametrize("inference_tokens", [0.0, 1e12])
def test_the_point_is_what_was_asked_for(kind: GoalKind, value: float, inference_tokens: float) -> None:
    found = optimal_point(BESIROGLU, kind, value, inference_tokens)
    measured = {
        "flops": found.flops,
        "parameters": found.num_parameters,
        "tokens": found.tokens,
        "loss": found.loss,
    }[kind]
    assert measured == pytest.approx(value, rel=1e-5)
    assert BESIROGLU.loss(found.num_parameters, found.tokens) == pytest.approx(found.loss)


def test_inference_keeps_a_training_budget_and_makes_the_model_smaller() -> None:
    without = optimal_point(BESIROGLU, "flops", 1e22)
    served = optimal_point(BESIROGLU, "flops", 1e22, inference_tokens=1e13)
    assert served.flops == pytest.approx(without.flops, rel=1e-5)
    assert served.num_parameters < 0.5 * without.num_parameters
    assert served.tokens > 2 * without.tokens


@pytest.mark.parametrize("inference_tokens", [0.0, 1e12])
def test_a_loss_that_cannot_be_reached_is_refused(inference_tokens: float) -> None:
    with pytest.raises(ConfigError, match="cannot be reached"):
        optimal_point(BESIROGLU, "loss", 1.5, inference_tokens)
