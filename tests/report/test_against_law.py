from __future__ import annotations

import math

import pytest

from llmscale.planning.scaling import BESIROGLU, HOFFMANN, Interval
from llmscale.report.charts import expect


def test_is_the_law_at_the_runs_size() -> None:
    expected_loss = expect(124_000_000, 50257, 1e8, 1e10)
    assert expected_loss.tokens[-1] == pytest.approx(1e10)
    assert expected_loss.loss[-1] == pytest.approx(BESIROGLU.loss(124_000_000, 1e10))
    assert isinstance(expected_loss.final, Interval)
    assert expected_loss.final.low < expected_loss.loss[-1] < expected_loss.final.high
    assert all(best <= loss for best, loss in zip(expected_loss.optimal_loss, expected_loss.loss, strict=True))
    assert not expected_loss.is_extrapolation


def test_compute_optimal_models_are_as_good_as_the_best() -> None:
    flops = 1e21
    size, tokens = BESIROGLU.optimal_parameters(flops), BESIROGLU.optimal_tokens(flops)
    expected_loss = expect(round(size), 50257, tokens / 10, tokens)
    assert expected_loss.optimal_loss[-1] == pytest.approx(expected_loss.loss[-1], rel=1e-6)
    assert expected_loss.optimal_parameters == pytest.approx(size, rel=1e-6)


def test_says_nothing_above_a_uniform_guess() -> None:
    expected_loss = expect(1_000_000, 4096, 1e3, 1e9)
    assert expected_loss.tokens and expected_loss.tokens[0] > 1e3
    assert max(expected_loss.loss) < math.log(4096)
    assert not expect(1_000_000, 4096, 1e3, 1e5).tokens
    assert expected_loss.is_extrapolation


def test_a_law_without_errors_has_no_range() -> None:
    assert isinstance(expect(124_000_000, 50257, 1e8, 1e8, HOFFMANN).final, float)
