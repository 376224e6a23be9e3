"""Blocks that are not followed, because they must do what the one before them did."""

from __future__ import annotations

import random

import pytest

from llmscale.architecture.layers import ParameterTensors
from llmscale.architecture.shape import GPTShape
from llmscale.config.batch_plan import BatchPlan
from llmscale.config.deepspeed.resolve import parse_ds_config
from llmscale.config.parallel_layout import ParallelLayout
from llmscale.config.resolve import resolve_step
from llmscale.memory.states import stage3
from llmscale.memory.states.stage3 import estimate_stage3
from llmscale.memory.states.stage3_parameters import Stage3Parameters
from llmscale.memory.states.state_memory import StateMemory
from llmscale.memory.zero_settings import ZeroSetup, zero_setup


def setup_of(shape: GPTShape, rng: random.Random) -> ZeroSetup:
    """Limits from a tenth of a block to many of them."""
    block = shape.architecture.block_parameters

    def near() -> int:
        return max(1, int(block * rng.choice([0.1, 0.5, 0.9, 1, 1.1, 3.3, 20, 1000])))

    ranks = rng.choice([1, 2, 3, 8])
    zero = {
        "stage": 3,
        "contiguous_gradients": rng.random() < 0.7,
        "reduce_scatter": rng.random() < 0.7,
        "reduce_bucket_size": near(),
        "stage3_prefetch_bucket_size": near(),
        "stage3_max_live_parameters": near(),
        "stage3_max_reuse_distance": near(),
        "stage3_param_persistence_threshold": rng.choice([0, 4 * shape.n_embd, near()]),
        "stage3_model_persistence_threshold": rng.choice([2**63 - 1, near()]),
    }
    for section in ("offload_optimizer", "offload_param"):
        if rng.random() < 0.3:
            zero[section] = {"device": "cpu"}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}}
    plan = BatchPlan(2 * ranks, 1, 2, ParallelLayout(ranks), shape.seq_len)
    return zero_setup(resolve_step(parse_ds_config(config, "test"), shape, plan, "none"))


def estimate(shape: GPTShape, setup: ZeroSetup, recomputes: bool) -> StateMemory:
    stage3._follow.cache_clear()
    return estimate_stage3(ParameterTensors(shape.architecture), setup, recomputes)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_changes_when_every_block_is_followed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    cases = []
    for _ in range(6):
        shape = GPTShape(
            n_layer=rng.choice([1, 2, 5, 24]),
            n_head=4,
            n_embd=rng.choice([8, 64, 768]),
            vocab_size=rng.choice([50, 5000]),
            seq_len=16,
            bias=rng.random() < 0.5,
            n_kv_head=rng.choice([1, 4]),
            gated_mlp=rng.random() < 0.5,
            tied=rng.random() < 0.5,
        )
        cases.append((shape, setup_of(shape, rng), rng.random() < 0.5))
    skipping = [estimate(*case) for case in cases]
    monkeypatch.setattr(Stage3Parameters, "equal_blocks", lambda *_: 0)
    assert [estimate(*case) for case in cases] == skipping


def test_of_a_large_model_few_blocks_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = GPTShape(n_layer=96, n_head=96, n_embd=12288, vocab_size=50257, seq_len=2048)
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    plan = BatchPlan(1024, 1, 1, ParallelLayout(1024), shape.seq_len)
    setup = zero_setup(resolve_step(parse_ds_config(config, "test"), shape, plan, "none"))
    fetched: list[int] = []
    fetch = Stage3Parameters.fetch

    def count(self: Stage3Parameters, module: int) -> None:
        fetched.append(module)
        fetch(self, module)

    monkeypatch.setattr(Stage3Parameters, "fetch", count)
    states = estimate(shape, setup, recomputes=False)
    assert len(states.forward_course) == 99
    assert len(fetched) < 2 * 10 * 13
