"""What a step does with DeepSpeed's engine, on an engine that writes down what it is asked."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from llmscale.engine.random_numbers import seed_step
from llmscale.engine.train_step import PhaseTimer, train_step

CPU = torch.device("cpu")


class RecordingEngine:
    """Its loss is the mean of the inputs; it stands in for DeepSpeed's, whose forward, backward and step it has."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list]] = []
        self.module = SimpleNamespace(routing=None, head=SimpleNamespace(z_squared=None))

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.calls.append(("forward", [tokens.tolist(), targets.tolist()]))
        return tokens.float().mean().requires_grad_()

    def backward(self, loss: Tensor) -> None:
        self.calls.append(("backward", [loss.item()]))

    def step(self) -> None:
        self.calls.append(("step", []))


def test_every_micro_batch_goes_forward_backward_step_with_targets_one_ahead() -> None:
    engine = RecordingEngine()
    micro_batches = [torch.tensor([[1, 2, 3]]), torch.tensor([[5, 6, 7]])]
    loss = train_step(engine, micro_batches, CPU, PhaseTimer(CPU))
    assert [name for name, _ in engine.calls] == ["forward", "backward", "step"] * 2
    assert engine.calls[0][1] == [[[1, 2]], [[2, 3]]]
    assert engine.calls[4][1] == [5.5], "DeepSpeed divides by the accumulation steps, we must not"
    assert float(loss) == (1.5 + 5.5) / 2
    assert not loss.requires_grad


def test_samples_are_cut_into_shorter_sequences_with_each_token_a_target_once() -> None:
    engine = RecordingEngine()
    train_step(engine, [torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])], CPU, PhaseTimer(CPU), seq_len=2)
    assert engine.calls[0][1] == [[[1, 2], [3, 4], [6, 7], [8, 9]], [[2, 3], [4, 5], [7, 8], [9, 10]]]


def test_only_the_last_micro_batch_s_step_counts_as_the_optimizer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class SlowEngine(RecordingEngine):
        def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
            now[0] += 1
            return super().__call__(tokens, targets)

        def step(self) -> None:
            now[0] += 10

    timer = PhaseTimer(CPU)
    train_step(SlowEngine(), [torch.ones(1, 3)] * 3, CPU, timer)
    seconds = timer.read()
    assert (seconds["forward_backward"], seconds["optimizer_step"]) == (3 + 2 * 10, 10)


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that shows the one number in the list."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_seconds_go_to_the_phase_that_was_running(clock: list[float]) -> None:
    timer = PhaseTimer(torch.device("cpu"))
    for phase, seconds in (("data_wait", 1.0), ("forward_backward", 4.0), ("optimizer_step", 2.0), ("data_wait", 0.5)):
        timer.mark(phase)
        clock[0] += seconds
    assert timer.read() == {"data_wait": 1.5, "forward_backward": 4.0, "optimizer_step": 2.0, "other": 0.0}


def test_a_running_phase_goes_on_after_a_read_and_is_not_counted_twice(clock: list[float]) -> None:
    timer = PhaseTimer(torch.device("cpu"))
    timer.mark("forward_backward")
    clock[0] += 3
    assert timer.read()["forward_backward"] == 3
    clock[0] += 2
    assert timer.read()["forward_backward"] == 2
    assert timer.read()["forward_backward"] == 0


def test_nothing_marked_is_nothing_measured() -> None:
    assert set(PhaseTimer(torch.device("cpu")).read().values()) == {0.0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_phase_is_the_device_s_time() -> None:
    timer = PhaseTimer(torch.device("cuda"))
    matrix = torch.randn(4096, 4096, device="cuda")
    timer.mark("forward_backward")
    for _ in range(20):
        matrix = matrix @ matrix
    timer.mark("other")
    seconds = timer.read()
    assert seconds["forward_backward"] > 10 * seconds["other"]
