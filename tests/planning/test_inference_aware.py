from __future__ import annotations

from dataclasses import replace

import pytest

from llmscale.planning.flops import inference_flops
from llmscale.planning.inference_aware import find_lifetime_optimum
from llmscale.planning.scaling_laws import BESIROGLU, HOFFMANN_ROUNDED

#: Sardana et al. 2024 use Hoffmann's coefficients with these exponents.
SARDANA = replace(HOFFMANN_ROUNDED, coefficients=(*HOFFMANN_ROUNDED.coefficients[:3], 0.336, 0.283))


def test_figure_1_of_sardana_et_al() -> None:
    """13B quality and 2T tokens of inference: 7B instead, 1.7e22 FLOPs or 17 % less."""
    budget = SARDANA.flops_for_parameters(13e9)
    found = find_lifetime_optimum(SARDANA, SARDANA.optimal_loss(budget), 2e12)
    before = budget + inference_flops(13e9, 2e12)
    assert found.num_parameters == pytest.approx(7e9, rel=0.01)
    total = found.flops + inference_flops(found.num_parameters, 2e12)
    assert before - total == pytest.approx(1.7e22, rel=0.01)
    assert 1 - total / before == pytest.approx(0.17, abs=0.005)


def test_it_reaches_the_loss_it_was_asked_for() -> None:
    found = find_lifetime_optimum(BESIROGLU, 2.1, 1e13)
    assert BESIROGLU.loss(found.num_parameters, found.tokens) == pytest.approx(2.1)


def test_nothing_around_it_is_cheaper() -> None:
    found = find_lifetime_optimum(BESIROGLU, 2.1, 1e13)
    for size in (0.9 * found.num_parameters, 1.1 * found.num_parameters):
        tokens = BESIROGLU.tokens_for_loss(size, 2.1)
        assert tokens is not None
        assert 6 * size * tokens + 2 * size * 1e13 > found.flops + 2 * found.num_parameters * 1e13


def test_next_to_no_inference_is_the_training_optimum() -> None:
    budget = BESIROGLU.flops_for_loss(2.1)
    found = find_lifetime_optimum(BESIROGLU, 2.1, 1.0)
    assert found.num_parameters == pytest.approx(BESIROGLU.optimal_parameters(budget), rel=0.001)


def test_more_inference_and_dearer_inference_make_it_smaller() -> None:
    sizes = [find_lifetime_optimum(BESIROGLU, 2.1, served).num_parameters for served in (1e11, 1e12, 1e13)]
    assert sizes == sorted(sizes, reverse=True)
    dear = find_lifetime_optimum(BESIROGLU, 2.1, 1e12, inference_weight=10.0)
    assert dear.num_parameters == pytest.approx(sizes[2], rel=1e-3)
