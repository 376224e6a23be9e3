from __future__ import annotations

from dataclasses import replace

import pytest

from llmscale.config.hardware import get_gpu
from llmscale.config.interconnect import get_interconnect
from llmscale.config.presets import PRESETS
from llmscale.errors import ConfigError
from llmscale.planning.placement import GPUs
from llmscale.planning.run_plan import Goal, PlanRequest, make_plan
from llmscale.planning.scaling_laws import BESIROGLU, HOFFMANN, Interval

A100S = GPUs(get_gpu("a100-80gb"), 8, 1, get_interconnect("ib-200g"), None)


def request(kind: str, value: float, **changes) -> PlanRequest:
    plain = PlanRequest(Goal(kind, value), None, BESIROGLU, 50257, 2048, None, None)  # type: ignore[arg-type]
    return replace(plain, **changes)


def test_chinchillas_budget_is_about_70b_on_1_4t() -> None:
    plan = make_plan(request("flops", 5.76e23))
    assert plan.shape.num_parameters == pytest.approx(70e9, rel=0.05)
    assert plan.tokens == pytest.approx(1.4e12, rel=0.06)
    assert plan.flops == pytest.approx(5.76e23, rel=1e-4)
    assert isinstance(plan.loss, Interval) and plan.loss.low < plan.loss.value < plan.loss.high


def test_money_buys_gpu_hours_and_energy_and_inference_cost_by_them() -> None:
    priced = request("gpu_hours", 500.0, gpus=A100S, usd_per_gpu_hour=2.0, pue=1.5)
    plan = make_plan(priced)
    assert plan.gpu_hours is not None and plan.usd_per_flop is not None
    assert plan.cost_usd == pytest.approx(2 * plan.gpu_hours)
    assert plan.energy_kwh == pytest.approx(plan.gpu_hours * 400 * 1.5 / 1000)
    assert plan.usd_per_flop * plan.flops == pytest.approx(plan.cost_usd)
    free = make_plan(request("flops", 5.76e23))
    assert (free.energy_kwh, free.cost_usd, free.usd_per_flop) == (None, None, None)


def test_gpt2_on_10b_tokens_is_19073_steps() -> None:
    plan = make_plan(request("tokens", 10e9, shape=PRESETS["gpt2-124m"].shape(50257), seq_len=1024))
    assert (plan.steps, plan.tokens_per_step) == (19_073, 524_288)
    assert plan.preset == "gpt2-124m"


def test_gpt3_on_300b_tokens_costs_3640_petaflop_days() -> None:
    plan = make_plan(request("tokens", 300e9, shape=PRESETS["gpt3-175b"].shape(50257)))
    assert plan.flops / 8.64e19 == pytest.approx(3640, rel=0.005)


def test_a_budget_of_gpu_hours_is_spent_and_not_exceeded() -> None:
    plan = make_plan(request("gpu_hours", 500.0, gpus=A100S))
    assert plan.gpu_hours is not None and plan.hours is not None
    one_step_hours = plan.gpu_hours / plan.steps
    assert 500 - one_step_hours <= plan.gpu_hours <= 500 * (1 + 1e-9)
    assert plan.hours == pytest.approx(plan.gpu_hours / 8)
    # The model is the best one for the FLOPs that this bought.
    assert plan.shape.num_parameters == pytest.approx(BESIROGLU.optimal_parameters(plan.flops), rel=0.05)


def test_a_given_mfu_says_how_far_gpu_hours_go() -> None:
    slow = make_plan(request("gpu_hours", 500.0, gpus=replace(A100S, mfu=0.2)))
    fast = make_plan(request("gpu_hours", 500.0, gpus=replace(A100S, mfu=0.4)))
    assert fast.flops == pytest.approx(2 * slow.flops, rel=0.1)
    spent = 500 * 3600 * 312e12 * 0.4
    assert fast.tokens * fast.shape.flops_per_token == pytest.approx(spent, rel=0.001)


def test_a_model_and_hours_leave_only_the_tokens() -> None:
    shape = PRESETS["gpt2-124m"].shape(50257)
    plan = make_plan(request("gpu_hours", 10.0, shape=shape, seq_len=1024, gpus=A100S))
    assert plan.shape == shape
    assert plan.gpu_hours == pytest.approx(10, rel=0.01)


def test_a_loss_is_reached() -> None:
    plan = make_plan(request("loss", 2.4))
    assert isinstance(plan.loss, Interval)
    assert plan.loss.value == pytest.approx(2.4, abs=0.002)
    assert make_plan(request("loss", 2.4, law=HOFFMANN)).loss == pytest.approx(2.4, abs=0.002)


def test_a_loss_out_of_a_models_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"124,475,904 parameters does not reach a loss of 2 .* Leave the model out"):
        make_plan(request("loss", 2.0, shape=PRESETS["gpt2-124m"].shape(50257)))


def test_less_than_one_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="10,000 tokens are less than one step of 512 sequences"):
        make_plan(request("tokens", 10_000.0, shape=PRESETS["gpt2-124m"].shape(50257), seq_len=1024))


def test_gpu_hours_of_no_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="GPU-hours of which GPU"):
        make_plan(request("gpu_hours", 10.0))


def test_hours_on_gpus_that_cannot_hold_the_model_are_refused_with_a_way_out() -> None:
    t4 = GPUs(get_gpu("t4"), 1, 1, get_interconnect("ib-100g"), None)
    giant = PRESETS["gpt3-175b"].shape(50257)
    with pytest.raises(ConfigError, match=r"do not fit 1 x t4, .*GiB more per GPU.* --mfu plans with an assumption\."):
        make_plan(request("gpu_hours", 1e6, shape=giant, gpus=t4))
    assert make_plan(request("gpu_hours", 1e6, shape=giant, gpus=replace(t4, mfu=0.3))).steps > 0


def test_inference_makes_the_model_smaller_and_its_life_cheaper() -> None:
    without = make_plan(request("flops", 1e22))
    plan = make_plan(request("flops", 1e22, inference_tokens=1e13))
    assert without.lifetime is None and plan.lifetime is not None
    assert plan.shape.num_parameters < 0.5 * without.shape.num_parameters
    assert plan.flops == pytest.approx(without.flops, rel=0.01)
    assert plan.lifetime.total_flops == pytest.approx(plan.flops + plan.lifetime.inference_flops)
    assert plan.lifetime.total_flops < 0.75 * plan.lifetime.training_optimal_total_flops


def test_slow_serving_makes_it_smaller_still() -> None:
    served = request("flops", 1e22, inference_tokens=1e12, gpus=replace(A100S, mfu=0.5))
    slow = make_plan(replace(served, inference_mfu=0.05))
    assert slow.shape.num_parameters < make_plan(served).shape.num_parameters
    assert slow.lifetime is not None
    assert slow.lifetime.total_flops == pytest.approx(slow.flops + 10 * slow.lifetime.inference_flops)
