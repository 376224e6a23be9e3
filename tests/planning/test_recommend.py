"""The row to take, and the smallest change that makes one fit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.resolve import DsConfig, parse_ds_config
from llmscale.planning.recommend import (
    find_enough_nodes,
    find_misfit,
    find_smallest_change,
    largest_preset,
    nearest_fit,
    rank_configs,
    recommend,
)
from llmscale.planning.search import MARGIN, PROCESS_BYTES, Candidate, Job, Machines, Strategy, find_fits, fit_at
from tests.planning.conftest import search

GIB = 2**30
SHAPE = GPTShape(n_layer=24, n_head=16, n_embd=1024, vocab_size=50257, seq_len=1024)
MACHINES = Machines(num_nodes=1, gpus_per_node=8, gpu_bytes=24 * GIB)
JOB = Job(SHAPE, 256, MACHINES)


def config(stage: int, **zero: object) -> DsConfig:
    return parse_ds_config({"zero_optimization": {"stage": stage, **zero}, "bf16": {"enabled": True}}, "test.json")


@pytest.fixture(scope="module")
def fits() -> list[Candidate]:
    return find_fits(search(JOB))


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
    assert (strategy.offload, strategy.checkpointing) == ("-", "none")
    assert strategy.zero_stage < 3
    assert "equal within 3%" in chosen.why


def test_a_row_without_margin_is_taken_only_where_none_has_it(fits: list[Candidate]) -> None:
    roomy, other, *_ = (fit for fit in fits if fit.has_margin and fit.strategy.offload == "-")
    for spare, has_margin in ((20 << 20, False), (round(0.06 * roomy.estimate.total_bytes), True)):
        tight = replace(roomy, machines=replace(MACHINES, gpu_bytes=roomy.estimate.total_bytes + spare))
        assert (tight.fits, tight.has_margin) == (True, has_margin)
        chosen = recommend([tight, other], [200.0, 100.0])
        assert chosen is not None and chosen.index == (0 if has_margin else 1)
        alone = recommend([tight], [200.0])
        assert alone is not None and ("no row leaves the margin of 5%" in alone.why) != has_margin


def test_the_largest_micro_batch_leaves_the_margin() -> None:
    for gib in range(14, 40, 3):
        for fit in find_fits(search(replace(JOB, machines=replace(MACHINES, gpu_bytes=gib * GIB)))):
            assert fit.has_gpu_margin or fit.plan.micro_batch_size == 1


def test_host_memory_has_room_for_the_processes_and_the_margin() -> None:
    offloaded = fit_at(config(2, offload_optimizer={"device": "cpu"}), JOB, "none", 1)
    needed = offloaded.host_bytes_per_node + 8 * PROCESS_BYTES
    for host_bytes, fits, has_margin in (
        (needed - 1, False, False),
        (needed, True, False),
        (needed / 0.94, True, True),
    ):
        fit = replace(offloaded, machines=replace(MACHINES, host_bytes=int(host_bytes)))
        assert (fit.fits, fit.has_margin) == (fits, has_margin)


def test_of_equally_fast_rows_a_tight_one_is_not_taken(fits: list[Candidate]) -> None:
    first, second = (
        fit
        for fit in fits
        if fit.strategy in (Strategy(1, *("none",) * 2, "none"), Strategy(2, *("none",) * 2, "none"))
    )
    tight = replace(first, machines=replace(MACHINES, gpu_bytes=first.estimate.total_bytes + 1))
    assert tight.fits
    chosen = recommend([tight, second], [100.0, 100.0])
    assert chosen is not None
    assert chosen.index == 1


def test_of_equally_fast_rows_one_of_tiny_micro_batches_is_not_taken() -> None:
    """Estimated rates know nothing of a GPU that waits for the next kernel."""
    small, large = (fit_at(config(stage), JOB, "none", size) for stage, size in ((0, 2), (1, 4)))
    for fits, index in (((small, large), 1), ((small, replace(large, step=replace(large.step, plan=small.plan))), 0)):
        chosen = recommend(fits, [100.0, 100.0])
        assert chosen is not None
        assert chosen.index == index


def test_without_rates_the_simplest_row_is_taken(fits: list[Candidate]) -> None:
    chosen = recommend(fits, [None] * len(fits))
    assert chosen is not None
    assert "the simplest of the" in chosen.why
    assert fits[chosen.index].strategy.checkpointing == "none"


def test_a_row_that_does_not_fit_is_never_taken(fits: list[Candidate]) -> None:
    none = [replace(fit, machines=replace(MACHINES, gpu_bytes=GIB)) for fit in fits]
    assert recommend(none, [1.0] * len(none)) is None
    only = [*none[:-1], fits[-1]]
    chosen = recommend(only, [1e9] * (len(none) - 1) + [1.0])
    assert chosen is not None
    assert chosen.index == len(none) - 1
    assert "the only row that fits" in chosen.why


def test_a_smaller_micro_batch_is_the_smallest_change() -> None:
    too_large = fit_at(config(2), JOB, "none", 32)
    assert not too_large.fits
    change = find_smallest_change(config(2), JOB, "none", 32)
    assert change is not None
    assert change.fit.fits
    size = change.fit.plan.micro_batch_size
    assert change.words == (f"--micro-batch-size {size} instead of 32",)
    assert not fit_at(config(2), JOB, "none", 2 * size).fits


def limited(gpu_bytes: int, share: int = 1) -> Job:
    """Machines whose GPUs have so many bytes beside the margin."""
    whole = math.ceil(gpu_bytes / (1 - MARGIN))
    return replace(JOB, global_batch_size=8 * share, machines=replace(MACHINES, gpu_bytes=whole))


def needed(ds: DsConfig, mode: str, share: int = 1) -> int:
    return fit_at(ds, limited(0, share), mode, 1).estimate.total_bytes  # type: ignore[arg-type]


def test_where_the_micro_batch_is_one_it_is_recomputation() -> None:
    job = limited((needed(config(2), "none") + needed(config(2), "selective")) // 2)
    change = find_smallest_change(config(2), job, "none", 1)
    assert change is not None
    assert change.words == ("--activation-checkpointing selective",)


def test_where_recomputation_is_not_enough_it_is_a_higher_stage() -> None:
    job = limited(needed(config(2), "full"))
    assert needed(config(0), "full") > job.machines.gpu_bytes
    change = find_smallest_change(config(0), job, "full", 1)
    assert change is not None
    assert change.words[0].startswith("ZeRO stage ")
    assert change.words[0].endswith(" instead of 0")
    assert len(change.words) == 1


def test_offload_comes_last_and_nvme_is_never_proposed() -> None:
    everything = min(needed(config(stage), "full") for stage in range(4))
    job = limited(everything - 1)
    change = find_smallest_change(config(3), job, "full", 1)
    assert change is not None
    assert any('offload_optimizer to "cpu"' in words for words in change.words)
    assert find_smallest_change(config(3), limited(GIB), "full", 1) is None


def test_what_the_user_wrote_is_kept_in_a_change() -> None:
    ds = config(1, reduce_bucket_size=1_000_000)
    job = limited(needed(config(2), "full"))
    change = find_smallest_change(ds, job, "full", 1)
    assert change is not None
    assert change.fit.step.engine_config.zero.reduce_bucket_size == 1_000_000


def test_more_nodes_when_nothing_fits() -> None:
    shape = GPTShape(n_layer=40, n_head=40, n_embd=5120, vocab_size=50257, seq_len=2048)
    job = Job(shape, 1024, Machines(1, 1, 24 * GIB))
    fits = [fit for fit in find_fits(search(job)) if fit.strategy.offload == "-"]
    assert not any(fit.fits for fit in fits)
    enough = find_enough_nodes(job, fits)
    assert enough is not None
    machines, fit = enough
    assert fit.fits
    assert fit.strategy.zero_stage == 3
    half = replace(job, machines=replace(machines, num_nodes=machines.num_nodes // 2))
    assert not any(fit_at(f.ds, half, f.strategy.checkpointing, 1).fits for f in fits)


def test_no_number_of_nodes_helps_against_one_sequence() -> None:
    shape = GPTShape(n_layer=2, n_head=16, n_embd=2048, vocab_size=50257, seq_len=2**20)
    job = Job(shape, 1024, Machines(1, 8, 24 * GIB))
    fits = find_fits(search(job))
    assert not any(fit.fits for fit in fits)
    assert find_enough_nodes(job, fits) is None
    assert nearest_fit(fits).strategy.checkpointing == "full"


SMALL_JOB = Job(GPTShape(12, 12, 768, 50257, 1024), 64, Machines(1, 8, 40 * GIB))


def test_every_config_has_its_speed_and_the_fastest_is_about_what_is_taken() -> None:
    ranking = rank_configs(search(SMALL_JOB))
    assert ranking.recommended is not None and ranking.recommended.throughput is not None
    assert len(ranking.fits) == len(ranking.configs) == 27
    rates = [config.throughput.tokens_per_second for config in ranking.configs if config.fit.fits and config.throughput]
    assert ranking.recommended.throughput.tokens_per_second >= 0.97 * max(rates)


def test_the_users_files_alone_are_tried_in_their_order() -> None:
    files = [(parse_ds_config({"zero_optimization": {"stage": stage}}, f"{stage}.json"), "full") for stage in (2, 0)]
    ranking = rank_configs(search(SMALL_JOB, files=files))
    assert [(fit.ds.source, fit.strategy.checkpointing) for fit in ranking.fits] == [
        ("2.json", "full"),
        ("0.json", "full"),
    ]


def test_what_is_missing_is_a_change_where_something_was_fixed_and_else_more_nodes() -> None:
    fixed = search(replace(SMALL_JOB, micro_batch_size=8, machines=Machines(1, 8, 4 * GIB)), modes=("none",))
    ranking = rank_configs(fixed)
    assert ranking.recommended is None
    shortfall = find_misfit(fixed, ranking.fits)
    assert shortfall.nearest == nearest_fit(ranking.fits)
    assert shortfall.change is not None and shortfall.change.fit.fits
    assert shortfall.more_nodes is None
    large = search(Job(GPTShape(32, 32, 4096, 50257, 2048), 1024, Machines(1, 1, 24 * GIB, host_bytes=16 * GIB)))
    shortfall = find_misfit(large, rank_configs(large).fits)
    assert shortfall.change is None
    assert shortfall.more_nodes is not None and shortfall.more_nodes[1].fits


@pytest.mark.parametrize(
    ("num_gpus", "gib", "preset"), [(1, 24, "gpt2-774m"), (1, 80, "gpt3-2.7b"), (8, 80, "gpt3-13b"), (1, 0, None)]
)
def test_the_largest_preset_needs_no_offload(num_gpus: int, gib: int, preset: str | None) -> None:
    assert largest_preset(Machines(1, num_gpus, gib * GIB), "bf16") == preset
