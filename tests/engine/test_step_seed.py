from __future__ import annotations

import random

import numpy as np
import torch

from llmscale.engine.train_step import seed_step


def draws(seed: int, step: int, rank: int) -> tuple[float, float, float]:
    seed_step(seed, step, rank)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_same_step_draws_the_same_whatever_was_drawn_before() -> None:
    first = draws(1, 10, 0)
    torch.rand(1000), random.random(), np.random.rand(5)
    assert draws(1, 10, 0) == first


def test_every_seed_step_and_rank_draws_something_else_from_every_generator() -> None:
    places = [(seed, step, rank) for seed in (0, 1, 11) for step in (0, 1, 11) for rank in (0, 1, 11)]
    for generator in range(3):
        assert len({draws(*place)[generator] for place in places}) == len(places)
