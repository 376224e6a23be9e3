from __future__ import annotations

import math
from dataclasses import replace

import pytest

from llmscale.config.presets import PRESETS
from llmscale.errors import ConfigError
from llmscale.planning.scaling import (
    BESIROGLU,
    HOFFMANN,
    HOFFMANN_ROUNDED,
    KAPLAN,
    LARGEST,
    LAWS,
    PF_DAY_FLOPS,
    GoalKind,
    Interval,
    ParametricLaw,
    Point,
    central,
    dense_equivalent,
    expansion_of,
    inference_flops,
    interval_of,
    law_rows,
    law_with_experts,
    nearest_preset,
    optimal_point,
    suggest_shape,
    training_flops,
)

#: Gopher's budget, which Chinchilla spent on 70B parameters and 1.4T tokens.
CHINCHILLA = 5.76e23


def test_rounding_the_exponents_moves_the_optimum() -> None:
    rounded = HOFFMANN_ROUNDED.optimal_parameters(CHINCHILLA)
    assert rounded < 0.85 * HOFFMANN.optimal_parameters(CHINCHILLA)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("flops", [1e18, 1e21, CHINCHILLA])
def test_the_optimum_is_the_lowest_point_of_its_iso_flop_curve(law: ParametricLaw, flops: float) -> None:
    best = law.optimal_parameters(flops)
    assert training_flops(best, law.optimal_tokens(flops)) == pytest.approx(flops)
    for size in (0.9 * best, 1.1 * best):
        assert law.loss(size, flops / (6 * size)) > law.optimal_loss(flops)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_every_way_back_to_the_budget(law: ParametricLaw) -> None:
    optimum = Point(law.optimal_parameters(1e22), law.optimal_tokens(1e22), law.optimal_loss(1e22))
    for kind, value in (
        ("flops", 1e22),
        ("parameters", optimum.num_parameters),
        ("tokens", optimum.tokens),
        ("loss", optimum.loss),
    ):
        assert vars(optimal_point(law, kind, value)) == pytest.approx(vars(optimum), rel=1e-9)
    assert law.tokens_for_loss(7e9, law.loss(7e9, 1e12)) == pytest.approx(1e12)


def test_a_small_model_never_reaches_a_large_ones_loss() -> None:
    assert BESIROGLU.tokens_for_loss(124e6, 2.0) is None


def test_a_loss_below_the_texts_own_entropy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a loss of 1\.8 .* no model gets below 1\.82\. Choose a higher loss"):
        optimal_point(BESIROGLU, "loss", 1.8)
    with pytest.raises(ConfigError, match=r"needs no training"):
        optimal_point(BESIROGLU, "loss", 1e5)


def test_the_covariance_has_the_published_standard_errors() -> None:
    # Besiroglu et al. 2024: A 124.58, B 1293.23, E .03, alpha .02, beta .02.
    assert BESIROGLU.covariance is not None
    ln_a, ln_b, ln_e = (math.sqrt(BESIROGLU.covariance[i][i]) for i in range(3))
    assert 482.01 * ln_a == pytest.approx(124.58, rel=0.05)
    assert 2085.43 * ln_b == pytest.approx(1293.23, rel=0.4)  # far from small: the logarithm's is not the number's
    assert 1.8172 * ln_e == pytest.approx(0.03, abs=0.005)
    assert math.sqrt(BESIROGLU.covariance[3][3]) == pytest.approx(0.02, abs=0.005)
    assert math.sqrt(BESIROGLU.covariance[4][4]) == pytest.approx(0.02, abs=0.005)


def test_the_delta_method_agrees_with_sampling() -> None:
    import numpy as np

    assert BESIROGLU.covariance is not None
    samples = np.random.default_rng(0).multivariate_normal(BESIROGLU.coefficients, BESIROGLU.covariance, 4000)
    sizes = [replace(BESIROGLU, coefficients=tuple(map(float, row))).optimal_parameters(CHINCHILLA) for row in samples]
    interval = BESIROGLU.interval(lambda law: law.optimal_parameters(CHINCHILLA))
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(sizes, [0.1, 0.9])), rel=0.03)


def test_errors_without_their_correlation_would_say_nothing() -> None:
    variances = BESIROGLU.covariance
    assert variances is not None
    diagonal = tuple(tuple(v if i == j else 0.0 for j, v in enumerate(row)) for i, row in enumerate(variances))
    alone = replace(BESIROGLU, covariance=diagonal).interval(lambda law: law.optimal_parameters(CHINCHILLA))
    assert alone is not None and alone.high / alone.value > 4


def test_resamples_give_the_interval_in_place_of_the_covariance() -> None:
    ln_a, ln_b, ln_e, alpha, beta = BESIROGLU.coefficients
    moved = [(ln_a, ln_b, ln_e + 0.01 * number, alpha, beta) for number in range(-50, 51)]
    law = replace(BESIROGLU, resamples=tuple(moved))
    interval = law.interval(lambda law: law.irreducible_loss)
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx([law.irreducible_loss * math.exp(end) for end in (-0.4, 0.4)])
    # A resample for which the optimum overflows counts as very large.
    wild = (700.0, -700.0, ln_e, 1e-3, 1e-3)
    interval = replace(law, resamples=(*moved, *[wild] * 5)).interval(lambda law: law.optimal_parameters(CHINCHILLA))
    assert interval is not None and interval.high == pytest.approx(interval.value)
    interval = replace(law, resamples=(*moved, *[wild] * 50)).interval(lambda law: law.optimal_parameters(CHINCHILLA))
    assert interval is not None and interval.high == LARGEST


@pytest.mark.parametrize("count", [1, 2, 10, 51, 400])
def test_an_interval_is_between_the_quantiles(count: int) -> None:
    import numpy as np

    samples = np.random.default_rng(0).standard_normal(count)
    interval = interval_of(0.0, [*samples, math.nan, math.inf])
    assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(samples, [0.1, 0.9])))
    assert interval_of(0.0, [math.nan]) == Interval(0.0, -math.inf, math.inf)


def test_no_interval_without_published_errors() -> None:
    assert HOFFMANN.interval(lambda law: law.optimal_parameters(1e21)) is None


def test_an_optimum_below_the_smallest_float_divides_nothing_by_zero() -> None:
    law = replace(BESIROGLU, coefficients=(-900.0, 7.0, 0.5, 0.5, 0.5))
    assert law.optimal_parameters(1e20) == 0
    assert law.optimal_tokens(1e20) > 1e300


def test_kaplans_law_grows_the_model_faster() -> None:
    # Table 6: N = 1.3e9 at one PF-day; a tenfold budget is 5.4 times the model, by Hoffmann's 3 times.
    assert KAPLAN.optimal_parameters(PF_DAY_FLOPS) == pytest.approx(1.3e9)
    assert KAPLAN.optimal_parameters(1e22) / KAPLAN.optimal_parameters(1e21) == pytest.approx(10**0.73)
    assert BESIROGLU.optimal_parameters(1e22) / BESIROGLU.optimal_parameters(1e21) < 3.4


@pytest.mark.parametrize(("kind", "value"), [("flops", 1e21), ("parameters", 7e9), ("tokens", 1e12), ("loss", 2.2)])
@pytest.mark.parametrize("inference_tokens", [1e9, 1e12])
def test_the_point_is_what_was_asked_for(kind: GoalKind, value: float, inference_tokens: float) -> None:
    optimum = optimal_point(BESIROGLU, kind, value, inference_tokens)
    measured = {
        "flops": optimum.flops,
        "parameters": optimum.num_parameters,
        "tokens": optimum.tokens,
        "loss": optimum.loss,
    }[kind]
    assert measured == pytest.approx(value, rel=1e-5)
    assert BESIROGLU.loss(optimum.num_parameters, optimum.tokens) == pytest.approx(optimum.loss)


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


#: Sardana et al. 2024 use Hoffmann's coefficients with these exponents.
SARDANA = replace(HOFFMANN_ROUNDED, coefficients=(*HOFFMANN_ROUNDED.coefficients[:3], 0.336, 0.283))


def test_figure_1_of_sardana_et_al() -> None:
    """13B quality and 2T tokens of inference: 7B instead, 1.7e22 FLOPs or 17 % less."""
    training = optimal_point(SARDANA, "parameters", 13e9)
    optimum = optimal_point(SARDANA, "loss", training.loss, 2e12)
    before = training.flops + inference_flops(13e9, 2e12)
    assert optimum.num_parameters == pytest.approx(7e9, rel=0.01)
    total = optimum.flops + inference_flops(optimum.num_parameters, 2e12)
    assert before - total == pytest.approx(1.7e22, rel=0.01)
    assert 1 - total / before == pytest.approx(0.17, abs=0.005)


def test_nothing_around_it_is_cheaper() -> None:
    optimum = optimal_point(BESIROGLU, "loss", 2.1, 1e13)
    for size in (0.9 * optimum.num_parameters, 1.1 * optimum.num_parameters):
        tokens = BESIROGLU.tokens_for_loss(size, 2.1)
        assert tokens is not None
        assert 6 * size * tokens + 2 * size * 1e13 > optimum.flops + 2 * optimum.num_parameters * 1e13


def test_more_inference_and_dearer_inference_make_it_smaller() -> None:
    served = (0.0, 1e11, 1e12, 1e13)
    sizes = [optimal_point(BESIROGLU, "loss", 2.1, tokens).num_parameters for tokens in served]
    assert sizes == sorted(sizes, reverse=True)
    dear = optimal_point(BESIROGLU, "loss", 2.1, 1e12, inference_weight=10.0)
    assert dear.num_parameters == pytest.approx(sizes[3], rel=1e-6)


def test_gpt3_is_3640_petaflop_days() -> None:
    # Brown et al. 2020, table D.1: 174,600M parameters, 300B tokens, 3.14e23 FLOPs, 3.64e3 PF-days.
    flops = training_flops(174.6e9, 300e9)
    assert flops == pytest.approx(3.14e23, rel=0.002)
    assert flops / PF_DAY_FLOPS == pytest.approx(3640, rel=0.001)


def test_each_law_spends_the_same_budget() -> None:
    for row in law_rows(1e22):
        assert 6 * central(row.num_parameters) * central(row.tokens) == pytest.approx(1e22)
        assert row.source


def test_only_the_refit_has_ranges() -> None:
    refit, original, _, kaplan = law_rows(1e22)
    assert isinstance(refit.num_parameters, Interval) and isinstance(refit.tokens, Interval)
    assert isinstance(original.num_parameters, float) and isinstance(original.loss, float)
    # Kaplan et al. 2020, table 5: the loss of 1 PF-day, and ten times as much compute.
    assert KAPLAN.optimal_loss(PF_DAY_FLOPS) == pytest.approx(3.1e8**0.050)
    assert kaplan.loss == pytest.approx(KAPLAN.optimal_loss(1e21) / 10**0.050)


GPTS = [name for name in PRESETS if name.startswith(("gpt2", "gpt3"))]


@pytest.mark.parametrize("name", GPTS)
def test_a_presets_own_size_is_nearest_to_it_or_to_its_twin(name: str) -> None:
    size = PRESETS[name].shape(50257).num_parameters
    size_of_preset = PRESETS[nearest_preset(size, 50257)].shape(50257).num_parameters
    assert size_of_preset == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize("size", [8e6, 30e6, 124e6, 355e6, 1.3e9, 2.7e9, 7e9, 13e9, 30e9, 72e9, 175e9, 1e12])
def test_shapes_have_the_size_and_sensible_numbers(size: float) -> None:
    shape = suggest_shape(size, 50257, 2048)
    assert shape.num_parameters == pytest.approx(size, rel=0.03)
    assert shape.n_embd % 128 == 0
    assert shape.head_dim in (64, 128)
    assert shape.n_head % 2 == 0
    if size > 5e9:
        # GPT-3's largest four have 128 wide for each layer.
        assert shape.n_head % 4 == 0
        assert 100 < shape.n_embd / shape.n_layer < 150


@pytest.mark.parametrize("size", [10e3, 31e3, 100e3, 250e3])
def test_models_of_a_ladder_are_narrower(size: float) -> None:
    shape = suggest_shape(size, 257, 256)
    assert shape.num_parameters == pytest.approx(size, rel=0.2) and shape.n_embd < 128


def test_gpt3_13b_is_found_again() -> None:
    shape = suggest_shape(PRESETS["gpt3-13b"].shape(50257).num_parameters, 50257, 2048)
    assert (shape.n_layer, shape.n_head, shape.n_embd) == (40, 40, 5120)


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"100K parameters are fewer than the 419,.* of one block of width 8"):
        suggest_shape(1e5, 50257, 2048)
    with pytest.raises(ConfigError, match=r"1e\+16 parameters are more than the largest shape here has \(26\.4T\)"):
        suggest_shape(1e16, 50257, 2048)


#: Table 4 of Ludziejewski et al. 2025: the joint law as L = m N^mu + n D^nu + c, by experts.
JOINT_TABLE = {
    1: (30.3640, 0.1817, 53.9838, 0.1965),
    2: (27.7982, 0.1780, 66.8401, 0.2065),
    8: (21.8330, 0.1676, 119.9126, 0.2338),
    32: (16.5424, 0.1557, 234.6726, 0.2652),
}


@pytest.mark.parametrize("experts", JOINT_TABLE)
def test_the_law_with_experts_is_that_of_the_papers_table(experts: int) -> None:
    ln_m, ln_n, ln_c, mu, nu = law_with_experts(experts).coefficients
    coefficients = math.exp(ln_m), mu, math.exp(ln_n), nu
    assert coefficients == pytest.approx(JOINT_TABLE[experts], rel=3e-3)
    assert math.exp(ln_c) == pytest.approx(1.3637)


def test_a_model_with_experts_is_as_good_as_a_dense_one_between_its_active_and_all_its_parameters() -> None:
    dense = PRESETS["gpt3-1.3b"].shape(50_257)
    sparse = replace(dense, bias=False, mlp_bias=False, num_experts=8, experts_per_token=1)
    assert expansion_of(dense) == 1 and expansion_of(sparse) == 8
    assert expansion_of(replace(sparse, experts_per_token=2, shared_expert_width=2 * dense.mlp_width)) == 2.5
    tokens = 20e9
    equal = dense_equivalent(sparse, tokens)
    assert sparse.active_parameters < equal < sparse.num_parameters
    losses = law_with_experts(8).loss(sparse.active_parameters, tokens), law_with_experts(1).loss(equal, tokens)
    assert losses[0] == pytest.approx(losses[1])
    assert dense_equivalent(dense, tokens) == dense.num_parameters
