"""The row to take, the rows to choose between, and the smallest change that makes one fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.schema import CheckpointingMode
from llmscale.config.hardware import Cluster
from llmscale.planning.recommend import (
    Change,
    choose_between,
    distinct_rows,
    find_enough_nodes,
    find_misfit,
    find_smallest_change,
    nearest_fit,
    rank_trials,
    recommend,
)
from llmscale.planning.search import (
    MARGIN,
    PROCESS_BYTES,
    Candidate,
    Strategy,
    Trial,
    evaluate,
    find_largest_fit,
    with_micro_batch,
)
from tests.planning.conftest import cluster_of, ds_of, step_on, strategies_on

GIB = 2**30
SHAPE = GPTShape(n_layer=24, n_head=16, n_embd=1024, vocab_size=50257, seq_len=1024)
CLUSTER = cluster_of()


@pytest.fixture(scope="module")
def fits() -> list[Candidate]:
    return [find_largest_fit(trial, CLUSTER) for trial in strategies_on(CLUSTER, SHAPE, 256)]


def on_gpu_of(fit: Candidate, num_bytes: float) -> Candidate:
    return replace(fit, cluster=cluster_of(num_bytes / GIB))


def test_the_fastest_row_is_taken(fits: list[Candidate]) -> None:
    place = next(i for i, fit in enumerate(fits) if fit.fits and fit.strategy.offload == "both cpu")
    rates = [100.0 if index == place else 50.0 for index in range(len(fits))]
    chosen = recommend(fits, rates)
    assert chosen is not None
    assert chosen.index == place
    assert chosen.why.startswith("the fastest of the ")


def test_of_equally_fast_rows_the_simplest_is_taken(fits: list[Candidate]) -> None:
    rates = [101.0 if fit.strategy.zero_stage == 3 else 100.0 for fit in fits]
    chosen = recommend(fits, rates)
    assert chosen is not None
    strategy = fits[chosen.index].strategy
    assert (strategy.offload, strategy.activation_checkpointing) == ("-", "none")
    assert strategy.zero_stage < 3
    assert "equal within 3%" in chosen.why
    without_rates = recommend(fits, [None] * len(fits))
    assert without_rates is not None and "the simplest of the" in without_rates.why


def test_a_row_without_margin_is_taken_only_where_none_has_it(fits: list[Candidate]) -> None:
    roomy, other, *_ = (fit for fit in fits if fit.has_margin and fit.strategy.offload == "-")
    for spare, has_margin in ((20 << 20, False), (round(0.06 * roomy.estimate.total_bytes), True)):
        tight = on_gpu_of(roomy, roomy.estimate.total_bytes + spare)
        assert (tight.fits, tight.has_margin) == (True, has_margin)
        chosen = recommend([tight, other], [200.0, 100.0])
        assert chosen is not None and chosen.index == (0 if has_margin else 1)
        alone = recommend([tight], [200.0])
        assert alone is not None and ("no row leaves the margin of 5%" in alone.why) != has_margin


def test_the_largest_micro_batch_leaves_the_margin() -> None:
    for gib in range(14, 40, 6):
        cluster = cluster_of(gib)
        for trial in strategies_on(cluster, SHAPE, 256):
            fit = find_largest_fit(trial, cluster)
            assert fit.has_gpu_margin or fit.plan.micro_batch_size == 1


def test_host_memory_has_room_for_the_processes_and_the_margin() -> None:
    offloaded = evaluate(step_on(CLUSTER, ds_of(2, offload_optimizer={"device": "cpu"}), SHAPE, 256), CLUSTER)
    needed = offloaded.host_bytes_per_node + offloaded.save_bytes_per_node + 8 * PROCESS_BYTES
    for host_bytes, fits, has_margin in (
        (needed - 1, False, False),
        (needed, True, False),
        (needed / 0.94, True, True),
    ):
        fit = replace(offloaded, cluster=replace(CLUSTER, host_bytes=int(host_bytes)))
        assert (fit.fits, fit.has_margin) == (fits, has_margin)


def test_of_equally_fast_rows_one_of_tiny_micro_batches_is_not_taken() -> None:
    """Estimated rates know nothing of a GPU that waits for the next kernel."""
    small, large = (
        evaluate(step_on(CLUSTER, ds_of(stage), SHAPE, 256, micro=size), CLUSTER) for stage, size in ((0, 2), (1, 4))
    )
    for fits, index in (((small, large), 1), ((small, replace(large, step=replace(large.step, plan=small.plan))), 0)):
        chosen = recommend(fits, [100.0, 100.0])
        assert chosen is not None
        assert chosen.index == index


def test_a_row_that_does_not_fit_is_never_taken(fits: list[Candidate]) -> None:
    none = [on_gpu_of(fit, GIB) for fit in fits]
    assert recommend(none, [1.0] * len(none)) is None
    chosen = recommend([*none[:-1], fits[-1]], [1e9] * (len(none) - 1) + [1.0])
    assert chosen is not None
    assert chosen.index == len(none) - 1
    assert "the only row that fits" in chosen.why


@pytest.mark.parametrize(("gib", "gpus"), [(24, 8), (24, 1), (6, 8), (1, 8)])
def test_the_rows_to_choose_between_are_few_and_the_recommended_one_is_among_them(gib: int, gpus: int) -> None:
    cluster = cluster_of(gib, gpus)
    ranking = rank_trials(strategies_on(cluster, SHAPE, 256), cluster)
    chosen, distinct = choose_between(ranking), distinct_rows(ranking)
    rows = [ranking.configs[index].fit for index in chosen]
    assert len(rows) <= 5 and set(chosen) <= set(distinct)
    if ranking.recommendation is None:
        assert len(rows) == 3 and nearest_fit(ranking.fits) in rows
        return
    assert ranking.recommendation.index in chosen
    assert all(fit.fits for fit in rows)
    if gpus == 1:  # stages divide nothing
        assert len(distinct) == 3 * 4
        assert {fit.strategy.activation_checkpointing for fit in rows} == {"none", "selective", "full"}
    elif gib == 24:
        assert {fit.strategy.zero_stage for fit in rows} == {0, 1, 2, 3}


def needed(stage: int, mode: CheckpointingMode) -> int:
    return evaluate(step_on(CLUSTER, ds_of(stage), SHAPE, 8, mode), CLUSTER).estimate.total_bytes


def smallest_change(gpu_bytes: float, stage: int, mode: CheckpointingMode, **zero: object) -> Change | None:
    """Return the change that helps where GPUs have so many bytes beside the margin."""
    cluster = cluster_of((gpu_bytes + 1) / GIB / (1 - MARGIN))
    return find_smallest_change(step_on(cluster, ds_of(stage, **zero), SHAPE, 8, mode), cluster)


def test_a_smaller_micro_batch_is_the_smallest_change() -> None:
    step = step_on(CLUSTER, ds_of(2), SHAPE, 256, micro=32)
    assert not evaluate(step, CLUSTER).fits
    change = find_smallest_change(step, CLUSTER)
    assert change is not None and change.fit.fits
    size = change.fit.plan.micro_batch_size
    assert change.words == (f"--micro-batch-size {size} instead of 32",)
    assert not evaluate(with_micro_batch(step, 2 * size), CLUSTER).fits


def test_then_come_recomputation_a_higher_stage_and_offload_but_never_nvme() -> None:
    change = smallest_change((needed(2, "none") + needed(2, "selective")) / 2, 2, "none")
    assert change is not None and change.words == ("--activation-checkpointing selective",)
    change = smallest_change(needed(2, "full"), 0, "full")
    assert change is not None and len(change.words) == 1
    assert change.words[0].startswith("ZeRO stage ") and change.words[0].endswith(" instead of 0")
    change = smallest_change(min(needed(stage, "full") for stage in range(4)) - 2, 3, "full")
    assert change is not None and any('offload_optimizer to "cpu"' in words for words in change.words)
    assert smallest_change(GIB, 3, "full") is None


def test_what_the_user_wrote_is_kept_in_a_change() -> None:
    change = smallest_change(needed(2, "full"), 1, "full", reduce_bucket_size=1_000_000)
    assert change is not None
    assert change.fit.step.engine_config.zero.reduce_bucket_size == 1_000_000


def test_more_nodes_when_nothing_fits() -> None:
    shape, one = GPTShape(n_layer=40, n_head=40, n_embd=5120, vocab_size=50257, seq_len=2048), cluster_of(24, 1)
    trials = [
        trial for trial in strategies_on(one, shape, 1024) if trial.step.ds.keys.offload_optimizer_device == "none"
    ]
    fits = [find_largest_fit(trial, one) for trial in trials]
    assert not any(fit.fits for fit in fits)
    enough = find_enough_nodes(fits)
    assert enough is not None and enough.fits
    assert enough.strategy.zero_stage == 3
    half = cluster_of(24, 1, enough.cluster.num_nodes // 2)
    assert not any(evaluate(step_on(half, fit.ds, shape, 1024, fit.step.checkpointing), half).fits for fit in fits)


def test_no_number_of_nodes_helps_against_one_sequence() -> None:
    shape = GPTShape(n_layer=2, n_head=16, n_embd=2048, vocab_size=50257, seq_len=2**20)
    fits = [find_largest_fit(trial, CLUSTER) for trial in strategies_on(CLUSTER, shape, 1024)]
    assert not any(fit.fits for fit in fits)
    assert find_enough_nodes(fits) is None
    assert nearest_fit(fits).step.checkpointing == "full"


SMALL = GPTShape(12, 12, 768, 50257, 1024)


def test_every_config_has_its_speed_and_the_fastest_is_about_what_is_taken() -> None:
    cluster = cluster_of(40)
    ranking = rank_trials(strategies_on(cluster, SMALL, 64), cluster)
    assert ranking.recommended is not None and ranking.recommended.throughput is not None
    rates = [config.throughput.tokens_per_second for config in ranking.configs if config.fit.fits and config.throughput]
    assert ranking.recommended.throughput.tokens_per_second >= 0.97 * max(rates)
    assert Strategy(0, "none", "none", "none") in [fit.strategy for fit in ranking.fits]


def rank_fits(cluster: Cluster, shape: GPTShape, batch: int) -> list[Candidate]:
    return rank_trials(strategies_on(cluster, shape, batch), cluster).fits


def test_what_is_missing_is_a_change_where_something_was_fixed_and_else_more_nodes() -> None:
    small = cluster_of(4)
    fixed = Trial(step_on(small, ds_of(2), SMALL, 64, micro=8), is_fixed=True)
    misfit = find_misfit(rank_trials([fixed], small).fits, is_restricted=True)
    assert misfit.change is not None and misfit.change.fit.fits
    assert misfit.more_nodes is None
    large = GPTShape(32, 32, 4096, 50257, 2048)
    fits = rank_fits(cluster_of(24, 1, host_bytes=16 * GIB), large, 1024)
    misfit = find_misfit(fits, is_restricted=False)
    assert misfit.nearest == nearest_fit(fits)
    assert misfit.change is None
    assert misfit.more_nodes is not None and misfit.more_nodes.fits
