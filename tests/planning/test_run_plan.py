from __future__ import annotations

from dataclasses import replace

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.hardware import Cluster, get_gpu, get_interconnect
from llmscale.config.presets import PRESETS
from llmscale.config.run_config import RunConfig
from llmscale.errors import ConfigError
from llmscale.planning.run_plan import LONGEST_DAYS, Goal, Placement, PlanRequest, make_plan, place, usual_mfu
from llmscale.planning.scaling import BESIROGLU, HOFFMANN, Interval

A100S = {"cluster": Cluster(get_gpu("a100-80gb"), 8, get_interconnect("ib-200g")), "num_nodes": 1}


def request(kind: str, value: float, **changes) -> PlanRequest:
    plain = PlanRequest(Goal(kind, value), RunConfig(), {}, None, BESIROGLU, 50257, 2048)  # type: ignore[arg-type]
    return replace(plain, **changes)


def test_a_budget_of_gpu_hours_is_spent_and_not_exceeded() -> None:
    plan = make_plan(request("gpu_hours", 500.0, **A100S))
    assert plan.run is not None and plan.run.gpu_hours is not None
    one_step_hours = plan.run.gpu_hours / plan.steps
    assert 500 - one_step_hours <= plan.run.gpu_hours <= 500 * (1 + 1e-9)
    assert plan.run.hours == pytest.approx(plan.run.gpu_hours / 8)
    # The model is the best one for the FLOPs that this bought.
    assert plan.shape.num_parameters == pytest.approx(BESIROGLU.optimal_parameters(plan.flops), rel=0.05)


def test_a_given_mfu_says_how_far_gpu_hours_go() -> None:
    slow = make_plan(request("gpu_hours", 500.0, **A100S, mfu=0.2))
    fast = make_plan(request("gpu_hours", 500.0, **A100S, mfu=0.4))
    assert fast.flops == pytest.approx(2 * slow.flops, rel=0.1)
    spent = 500 * 3600 * 312e12 * 0.4
    assert fast.tokens * fast.shape.flops_per_token == pytest.approx(spent, rel=0.001)


def test_a_model_and_hours_leave_only_the_tokens() -> None:
    shape = PRESETS["gpt2-124m"].shape(50257)
    plan = make_plan(request("gpu_hours", 10.0, shape=shape, seq_len=1024, **A100S))
    assert plan.shape == shape
    assert plan.run is not None and plan.run.gpu_hours == pytest.approx(10, rel=0.01)


def test_a_loss_is_reached() -> None:
    plan = make_plan(request("loss", 2.4))
    assert isinstance(plan.loss, Interval)
    assert plan.loss.value == pytest.approx(2.4, abs=0.002)
    assert make_plan(request("loss", 2.4, law=HOFFMANN)).loss == pytest.approx(2.4, abs=0.002)


def test_gpu_hours_of_no_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="GPU-hours of which GPU"):
        make_plan(request("gpu_hours", 10.0))


def test_hours_on_gpus_that_cannot_hold_the_model_are_refused_with_a_way_out() -> None:
    t4 = Cluster(get_gpu("t4"), 1)
    giant = PRESETS["gpt3-175b"].shape(50257)
    with pytest.raises(ConfigError, match=r"do not fit 1 x t4, .*GiB more per GPU.* --mfu plans with an assumption\."):
        make_plan(request("gpu_hours", 1e6, shape=giant, cluster=t4, num_nodes=1))
    assert make_plan(request("gpu_hours", 1e6, shape=giant, cluster=t4, num_nodes=1, mfu=0.3)).steps > 0


def test_slow_serving_makes_it_smaller_still() -> None:
    served = request("flops", 1e22, inference_tokens=1e12, **A100S, mfu=0.5)
    slow = make_plan(replace(served, inference_mfu=0.05))
    assert slow.shape.num_parameters < make_plan(served).shape.num_parameters
    assert slow.lifetime is not None
    assert slow.lifetime.total_flops == pytest.approx(slow.flops + 10 * slow.lifetime.inference_flops)


SMALL = GPTShape(12, 12, 768, 50257, 1024)
LARGE = GPTShape(40, 40, 5120, 50257, 2048)


def put(
    shape: GPTShape,
    gpu: str = "a100-80gb",
    batch: int = 512,
    *,
    per_node: int = 8,
    num_nodes: int | None = 1,
    mfu: float | None = None,
    is_batch_given: bool = False,
) -> Placement:
    cluster = Cluster(get_gpu(gpu), per_node, get_interconnect("ib-200g"))
    config = RunConfig(global_batch_size=batch) if is_batch_given else RunConfig()
    asked = request("tokens", 1e9, config=config, cluster=cluster, num_nodes=num_nodes, mfu=mfu)
    return place(asked, cluster, shape, batch)


def test_the_row_is_the_one_that_estimate_recommends() -> None:
    placement = put(SMALL)
    assert placement.row is not None and placement.row.fit.fits and placement.row.throughput is not None
    assert placement.mfu == placement.row.throughput.mfu
    speed = placement.rate_of(SMALL)
    assert speed == pytest.approx(placement.row.throughput.tokens_per_second)
    assert placement.mfu is not None
    assert placement.mfu <= usual_mfu(SMALL, get_gpu("a100-80gb")) * 1.0001, "that of the arithmetic alone"
    assert put(SMALL, mfu=0.25).mfu == 0.25, "a given one wins"


def test_a_batch_nobody_gave_is_rounded_up_to_the_gpus() -> None:
    assert put(SMALL, batch=512, per_node=6).global_batch_size == 516


def test_without_a_number_of_nodes_as_few_as_hold_the_model() -> None:
    assert put(SMALL, num_nodes=None).cluster.num_nodes == 1
    placement = put(LARGE, "a100-40gb", per_node=1, num_nodes=None)
    assert placement.cluster.num_nodes > 1
    # On half of them only offload would do.
    half = put(LARGE, "a100-40gb", per_node=1, num_nodes=placement.cluster.num_nodes // 2)
    assert half.row is None or half.row.fit.strategy.offload != "-"


def test_experts_that_more_ranks_divide_than_a_node_has_get_as_many_nodes() -> None:
    shape = replace(PRESETS["tiny-moe-3m"].shape(50257), num_experts=32)
    config = RunConfig(expert_parallel_size=32)
    asked = request("tokens", 1e9, config=config, cluster=A100S["cluster"], shape=shape, seq_len=shape.seq_len)
    run = make_plan(asked).run
    assert run is not None and run.row is not None and run.cluster.num_nodes == 4


def test_experts_cost_the_parameters_that_a_token_uses() -> None:
    dense = PRESETS["gpt2-124m"].shape(50257)
    sparse = replace(dense, bias=False, mlp_bias=False, num_experts=8)
    plan, plain = (make_plan(request("tokens", 1e10, shape=shape, seq_len=1024)) for shape in (sparse, dense))
    assert plan.flops == 6 * sparse.active_parameters * plan.tokens < 6 * sparse.num_parameters * plan.tokens
    assert isinstance(plan.loss, Interval) and isinstance(plain.loss, Interval)
    assert plan.loss.high < plain.loss.low
    reached = make_plan(request("loss", plan.loss.value, shape=sparse, seq_len=1024))
    assert reached.tokens == pytest.approx(plan.tokens, rel=1e-3)
    modern = PRESETS["gpt-modern-124m"].shape(50257)
    shapes = replace(modern, num_experts=8), modern
    runs = [make_plan(request("tokens", 1e10, shape=shape, **A100S)).run for shape in shapes]
    hours = [run.gpu_hours for run in runs if run]
    assert hours[0] is not None and hours[1] is not None and hours[1] < hours[0] < 3 * hours[1]


def test_a_deadline_is_met_by_the_fewest_nodes() -> None:
    shape = PRESETS["gpt2-1.5b"].shape(50257)
    machines = {**A100S, "num_nodes": None, "shape": shape, "seq_len": 1024}
    run = make_plan(request("tokens", 3e11, **machines, days=5.0)).run
    assert run is not None and run.hours is not None and run.cluster.num_nodes > 2 and run.hours <= 5 * 24
    fewer = make_plan(request("tokens", 3e11, **{**machines, "num_nodes": run.cluster.num_nodes - 1}, days=5.0)).run
    assert fewer is not None and fewer.hours is not None and fewer.hours > 5 * 24
    # The user's own nodes stay, and the answer names enough of them.
    enough = run.cluster.num_nodes
    assert (fewer.cluster.num_nodes, fewer.is_in_time, fewer.enough_nodes) == (enough - 1, False, enough)


def test_a_duration_of_years_is_no_answer() -> None:
    shape = PRESETS["gpt2-1.5b"].shape(50257)
    machines = {"cluster": Cluster(get_gpu("rtx4090"), 1), "shape": shape, "seq_len": 1024}
    run = make_plan(request("tokens", 3e11, **machines)).run
    assert run is not None and run.hours is not None
    assert run.cluster.num_nodes > 2 and 80 < run.hours / 24 <= LONGEST_DAYS == run.within_days


def test_more_gpus_than_sequences_do_not_help() -> None:
    small = {**A100S, "num_nodes": None, "shape": SMALL, "seq_len": 1024, "config": RunConfig(global_batch_size=64)}
    run = make_plan(request("tokens", 1e12, **small, days=1.0)).run
    assert run is not None and (run.cluster.num_nodes, run.is_in_time, run.enough_nodes) == (8, False, None)


def test_fp32_is_planned_at_its_own_peak() -> None:
    words = {**A100S, "shape": SMALL, "seq_len": 1024}
    fp32, bf16 = (
        make_plan(request("tokens", 1e9, **words, config=RunConfig(precision=precision))).run
        for precision in ("fp32", "bf16")
    )
    assert fp32 is not None and bf16 is not None and fp32.hours is not None and bf16.hours is not None
    assert (fp32.precision, fp32.peak_flops) == ("fp32", 19.5e12)
    assert fp32.hours > 5 * bf16.hours and fp32.mfu is not None and 0.3 < fp32.mfu < 1
    with pytest.raises(ConfigError, match="--gpu a10g: its rate in fp32 is not known"):
        make_plan(request("gpu_hours", 10.0, cluster=Cluster(get_gpu("a10g"), 1), config=RunConfig(precision="fp32")))


def test_opt_175b_took_33_days_by_8_n_d() -> None:
    """992 A100-80GB at 147 TFLOP/s with recomputation: about 33 days on 1,024 (metaseq's chronicles)."""
    opt = {"cluster": A100S["cluster"], "num_nodes": 124, "shape": PRESETS["gpt3-175b"].shape(50257)}
    run = make_plan(request("tokens", 3e11, **opt, mfu=147 / 312)).run
    assert run is not None and run.hours is not None and run.hours_with_recomputation is not None
    assert run.hours_with_recomputation * 992 / 1024 == pytest.approx(33 * 24, rel=0.03)
    assert run.hours == pytest.approx(0.75 * run.hours_with_recomputation)
    without = make_plan(request("tokens", 3e11, **opt)).run
    assert without is not None and without.hours_with_recomputation is None


def test_checkpoints_by_the_hour_fill_the_disk() -> None:
    opt = {"cluster": A100S["cluster"], "num_nodes": 124, "shape": PRESETS["gpt3-175b"].shape(50257), "mfu": 0.3537}
    weights = make_plan(request("tokens", 3e11, **opt, keep_hours=1.0, keeps_weights=True))
    states = make_plan(request("tokens", 3e11, **opt, keep_hours=1.0))
    assert weights.run is not None and weights.run.hours is not None
    assert weights.disk.hourly == states.disk.hourly == int(weights.run.hours)
    assert weights.disk.hourly_bytes == weights.disk.hourly * 2 * weights.shape.num_parameters
    assert states.disk.hourly_bytes == 6 * weights.disk.hourly_bytes
    assert states.disk.total_bytes - weights.disk.total_bytes == 5 * weights.disk.hourly_bytes
