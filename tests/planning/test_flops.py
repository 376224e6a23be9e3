from __future__ import annotations

import pytest

from llmscale.planning.flops import PF_DAY_FLOPS, affordable_tokens, inference_flops, training_flops


def test_gpt3_is_3640_petaflop_days() -> None:
    # Brown et al. 2020, table D.1: 174,600M parameters, 300B tokens, 3.14e23 FLOPs, 3.64e3 PF-days.
    flops = training_flops(174.6e9, 300e9)
    assert flops == pytest.approx(3.14e23, rel=0.002)
    assert flops / PF_DAY_FLOPS == pytest.approx(3640, rel=0.001)


def test_a_petaflop_day_on_one_a100_in_fp32() -> None:
    assert PF_DAY_FLOPS == 8.64e19
    assert round(PF_DAY_FLOPS / 19.5e12) == 4_430_769


def test_tokens_that_a_budget_affords_cost_the_budget() -> None:
    assert training_flops(7e9, affordable_tokens(1e21, 7e9)) == pytest.approx(1e21)


def test_inference_is_a_third_of_training() -> None:
    assert inference_flops(7e9, 1e12) == pytest.approx(training_flops(7e9, 1e12) / 3)
