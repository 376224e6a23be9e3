from __future__ import annotations

import math

import pytest

from llmscale.planning.scaling import BESIROGLU, HOFFMANN, Interval
from llmscale.report.charts import expect


def test_is_the_law_at_the_runs_size() -> None:
    found = expect(124_000_000, 50257, 1e8, 1e10)
    assert found.tokens[-1] == pytest.approx(1e10)
    assert found.loss[-1] == pytest.approx(BESIROGLU.loss(124_000_000, 1e10))
    assert isinstance(found.final, Interval)
    assert found.final.low < found.loss[-1] < found.final.high
    assert all(best <= loss for best, loss in zip(found.optimal_loss, found.loss, strict=True))
    assert not found.is_extrapolation


def test_compute_optimal_models_are_as_good_as_the_best() -> None:
    flops = 1e21
    size, tokens = BESIROGLU.optimal_parameters(flops), BESIROGLU.optimal_tokens(flops)
    found = expect(round(size), 50257, tokens / 10, tokens)
    assert found.optimal_loss[-1] == pytest.approx(found.loss[-1], rel=1e-6)
    assert found.optimal_parameters == pytest.approx(size, rel=1e-6)


def test_says_nothing_above_a_uniform_guess() -> None:
    found = expect(1_000_000, 4096, 1e3, 1e9)
    assert found.tokens and found.tokens[0] > 1e3
    assert max(found.loss) < math.log(4096)
    assert not expect(1_000_000, 4096, 1e3, 1e5).tokens
    assert found.is_extrapolation


def test_a_law_without_errors_has_no_range() -> None:
    assert isinstance(expect(124_000_000, 50257, 1e8, 1e8, HOFFMANN).final, float)
