"""The largest micro-batch that fits: maximal, legal, and resolved as train.py resolves it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import divisors
from llmscale.config.deepspeed.resolve import DsConfig, parse_ds_config
from llmscale.config.resolve import resolve_step
from llmscale.errors import ConfigError
from llmscale.memory.estimate import estimate_memory
from llmscale.planning.largest_micro_batch import (
    Job,
    Machines,
    find_fits,
    find_largest_fit,
    fit_at,
    legal_micro_batches,
)
from tests.planning.conftest import search

GIB = 2**30
SHAPE = GPTShape(n_layer=12, n_head=12, n_embd=768, vocab_size=50257, seq_len=1024)
MACHINES = Machines(num_nodes=1, gpus_per_node=8, gpu_bytes=24 * GIB)


def config(stage: int, offload_optimizer: dict[str, object] | None = None, **sections: object) -> DsConfig:
    zero = {"stage": stage} | ({"offload_optimizer": offload_optimizer} if offload_optimizer else {})
    return parse_ds_config({"zero_optimization": zero, "bf16": {"enabled": True}, **sections}, "test")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gib", [4, 8, 24, 80])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_next_larger_micro_batch_does_not_fit(stage: int, gib: int, mode: str) -> None:
    job = Job(SHAPE, 8 * 60, replace(MACHINES, gpu_bytes=gib * GIB))
    found = find_largest_fit(config(stage), job, mode)  # type: ignore[arg-type]
    fitting = [size for size in divisors(60) if fit_at(config(stage), job, mode, size).fits]  # type: ignore[arg-type]
    assert found.fits == bool(fitting)
    assert found.plan.micro_batch_size == max(fitting, default=1)


def test_without_accumulation_a_larger_batch_may_fit_where_a_smaller_one_does_not() -> None:
    """A micro-batch that is a rank's whole share needs no sum of gradients from one micro-step to the next."""
    ds = config(1, offload_optimizer={"device": "cpu"})
    job = Job(GPTShape(n_layer=24, n_head=16, n_embd=1024, vocab_size=512, seq_len=8), 2, Machines(1, 1, 80 * GIB))
    half, whole = (fit_at(ds, job, "full", size).estimate.total_bytes for size in (1, 2))
    assert whole < half
    between = replace(job, machines=replace(job.machines, gpu_bytes=(half + whole) // 2))
    found = find_largest_fit(ds, between, "full")
    assert found.fits
    assert found.plan.micro_batch_size == 2


def test_a_row_is_the_estimate_of_what_train_py_would_resolve() -> None:
    job = Job(SHAPE, 64, MACHINES)
    fit = find_largest_fit(config(2), job, "selective")
    assert fit.plan.global_batch_size == 64
    assert fit.step == resolve_step(config(2), SHAPE, fit.plan, "selective")
    assert fit.estimate == estimate_memory(fit.step)


def test_nothing_fits_gives_the_smallest_and_what_is_missing() -> None:
    job = Job(SHAPE, 64, replace(MACHINES, gpu_bytes=2 * GIB))
    fit = find_largest_fit(config(0), job, "none")
    assert not fit.fits
    assert fit.plan.micro_batch_size == 1
    assert fit.spare_bytes == 2 * GIB - fit.estimate.total_bytes < 0


def test_host_memory_is_counted_per_node_and_checked_when_it_is_known() -> None:
    ds = parse_ds_config(
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}, "test"
    )
    fit = find_largest_fit(ds, Job(SHAPE, 64, MACHINES), "none")
    assert fit.host_bytes_per_node == 8 * fit.estimate.host_bytes
    assert fit.host_bytes_per_node >= 12 * SHAPE.num_parameters
    assert fit.host_spare_bytes is None
    small = Job(SHAPE, 64, replace(MACHINES, host_bytes=GIB))
    assert not find_largest_fit(ds, small, "none").fits


@pytest.mark.parametrize(
    ("keys", "micro_batch_size"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, 2),
        ({"gradient_accumulation_steps": 2}, 4),
        ({"train_micro_batch_size_per_gpu": "auto"}, 8),
    ],
)
def test_a_batch_size_in_the_file_is_kept(keys: dict[str, object], micro_batch_size: int) -> None:
    fit = find_largest_fit(config(2, **keys), Job(SHAPE, 64, MACHINES), "full")
    assert fit.plan.micro_batch_size == micro_batch_size


def test_the_flag_wins_over_the_search() -> None:
    fit = find_largest_fit(config(2), Job(SHAPE, 64, MACHINES, micro_batch_size=2), "none")
    assert fit.plan.micro_batch_size == 2


def test_an_accumulation_that_does_not_divide_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"contradicts the batch plan|does not divide"):
        find_largest_fit(config(2, gradient_accumulation_steps=3), Job(SHAPE, 64, MACHINES), "none")


def test_a_global_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be divided over 8 ranks"):
        legal_micro_batches(Job(SHAPE, 12, MACHINES))


def test_every_legal_strategy_is_a_row_once() -> None:
    fits = find_fits(search(Job(SHAPE, 64, MACHINES)))
    strategies = [fit.strategy for fit in fits]
    assert len(set(strategies)) == len(strategies) == 27
    assert {s.zero_stage for s in strategies if s.offload_param != "none"} == {3}
    assert {s.zero_stage for s in strategies if s.offload_optimizer == "cpu"} == {1, 2, 3}
    assert {s.offload for s in strategies} == {"-", "optim cpu", "both cpu", "both nvme"}


def test_fp16_has_no_row_at_stage_0() -> None:
    fits = find_fits(search(Job(SHAPE, 64, MACHINES), "fp16"))
    assert {fit.strategy.zero_stage for fit in fits} == {1, 2, 3}
    assert {fit.step.precision for fit in fits} == {"fp16"}


@pytest.mark.parametrize(
    ("num_nodes", "gpus", "words"),
    [(1, 8, "8 x t4"), (2, 8, "2 nodes x 8 x t4"), (1, 64, "64 x t4 in one node (of several nodes: --num-nodes)")],
)
def test_machines_in_words(num_nodes: int, gpus: int, words: str) -> None:
    assert Machines(num_nodes, gpus, 16 * GIB).in_words("t4") == words
