"""What charts draw: curves that are thinned out, and a law beside the loss."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmscale.planning.scaling import BESIROGLU
from llmscale.report.charts import expect, spread, thin


def test_few_values_are_all_kept() -> None:
    assert thin([3.0, 1.0, 2.0], 3).tolist() == [0, 1, 2]


def test_no_spike_and_no_gap_is_lost() -> None:
    values = np.sin(np.arange(100_000) / 5000)
    values[31_337], values[64_001], values[77_777] = 9.0, -9.0, math.nan
    indices = thin(values, 2000)
    assert {0, 31_337, 64_001, 77_777, 99_999} <= set(indices.tolist())
    assert len(indices) <= 2003
    assert (np.diff(indices) > 0).all()


def test_nothing_but_gaps() -> None:
    indices = thin([math.nan] * 5000, 100)
    assert indices[0] == 0 and indices[-1] == 4999 and len(indices) < 300


def test_even_indices_hold_both_ends() -> None:
    assert spread(5, 10).tolist() == [0, 1, 2, 3, 4]
    indices = spread(1_000, 10)
    assert indices[0] == 0 and indices[-1] == 999 and len(indices) == 10


def test_is_the_law_at_the_runs_size() -> None:
    expected_loss = expect(124_000_000, 50257, 1e8, 1e10)
    assert expected_loss.tokens[-1] == pytest.approx(1e10)
    assert expected_loss.loss[-1] == pytest.approx(BESIROGLU.loss(124_000_000, 1e10))
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
