from __future__ import annotations

import math
import random

from llmscale.training.spikes import LEAST_STEPS, QUIET_STEPS, Spike, SpikeDetector


def curve(steps: int, seed: int = 0) -> list[float]:
    """As a loss falls, with the noise of small batches."""
    draw = random.Random(seed)
    return [3 + 4 / (1 + step / 50) + draw.gauss(0, 0.1) for step in range(steps)]


def found(losses: list[float], norms: list[float | None] | None = None) -> list[Spike]:
    detector = SpikeDetector()
    norms = norms or [None] * len(losses)
    spikes = [detector.add(step, loss, norm) for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)]
    return [spike for spike in spikes if spike is not None]


def test_a_falling_noisy_loss_is_none() -> None:
    for seed in range(20):
        assert found(curve(1000, seed)) == []
    assert found([2.0] * 500) == [], "nor one that does not vary at all"


def test_a_leap_is_one_from_its_first_step() -> None:
    losses = curve(300)
    for step in (199, 200, 201):
        losses[step] += 3
    (spike,) = found(losses)
    assert (spike.step, spike.loss) == (200, losses[199])
    assert spike.loss_z > 8
    assert spike.grad_norm_z is None


def test_a_second_one_is_news_when_all_was_quiet_in_between() -> None:
    losses = curve(300)
    for step in (150, 150 + QUIET_STEPS // 2, 250):
        losses[step] += 8
    assert [spike.step for spike in found(losses)] == [151, 251]


def test_a_small_leap_counts_with_a_large_gradient() -> None:
    losses, norms = (
        [3 + 0.1 * math.sin(step) for step in range(200)],
        [1 + 0.05 * math.sin(step) for step in range(200)],
    )
    losses[150] = 3.7
    assert found(losses, [*norms]) == []
    norms[150] = 9.0
    (spike,) = found(losses, [*norms])
    assert spike.step == 151
    assert spike.grad_norm_z is not None and spike.grad_norm_z > 8
    norms[180] = 50.0
    assert len(found(losses, [*norms])) == 1, "a norm alone is none: it is clipped"


def test_what_is_no_number_is_passed_over() -> None:
    losses = curve(200)
    losses[100], losses[101] = math.nan, math.inf
    norms: list[float | None] = [1.0] * 200
    norms[120] = math.inf
    assert found(losses, norms) == []


def test_nothing_is_said_before_there_is_something_to_compare_with() -> None:
    assert found([1.0] * (LEAST_STEPS - 1) + [100.0]) == []
    assert len(found([1.0] * LEAST_STEPS + [100.0])) == 1
