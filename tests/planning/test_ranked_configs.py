"""What `llmscale estimate` is handed: every config with its speed, the one to take, and what is missing."""

from __future__ import annotations

from dataclasses import replace

from llmscale.architecture.shape import GPTShape
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.planning.largest_micro_batch import Job, Machines
from llmscale.planning.ranked_configs import rank_configs
from llmscale.planning.recommend import find_shortfall, nearest_fit
from tests.planning.conftest import search

GIB = 2**30
JOB = Job(GPTShape(12, 12, 768, 50257, 1024), 64, Machines(1, 8, 40 * GIB))


def test_every_config_has_its_speed_and_the_fastest_is_about_what_is_taken() -> None:
    ranking = rank_configs(search(JOB))
    assert ranking.recommended is not None and ranking.recommended.throughput is not None
    assert len(ranking.fits) == len(ranking.configs) == 27
    rates = [config.throughput.tokens_per_second for config in ranking.configs if config.fit.fits and config.throughput]
    assert ranking.recommended.throughput.tokens_per_second >= 0.97 * max(rates)


def test_the_users_files_alone_are_tried_in_their_order() -> None:
    files = [(parse_ds_config({"zero_optimization": {"stage": stage}}, f"{stage}.json"), "full") for stage in (2, 0)]
    ranking = rank_configs(search(JOB, files=files))
    assert [(fit.ds.source, fit.strategy.checkpointing) for fit in ranking.fits] == [
        ("2.json", "full"),
        ("0.json", "full"),
    ]


def test_what_is_missing_is_a_change_where_something_was_fixed_and_else_more_nodes() -> None:
    fixed = search(replace(JOB, micro_batch_size=8, machines=Machines(1, 8, 4 * GIB)), modes=("none",))
    ranking = rank_configs(fixed)
    assert ranking.recommended is None
    shortfall = find_shortfall(fixed, ranking.fits)
    assert shortfall.nearest == nearest_fit(ranking.fits)
    assert shortfall.change is not None and shortfall.change.fit.fits
    assert shortfall.more_nodes is None
    large = search(Job(GPTShape(32, 32, 4096, 50257, 2048), 1024, Machines(1, 1, 24 * GIB, host_bytes=16 * GIB)))
    shortfall = find_shortfall(large, rank_configs(large).fits)
    assert shortfall.change is None
    assert shortfall.more_nodes is not None and shortfall.more_nodes[1].fits
