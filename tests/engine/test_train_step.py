"""What a step does with DeepSpeed's engine, on an engine that writes down what it is asked."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from llmscale.engine.train_step import PhaseTimer, train_step

CPU = torch.device("cpu")


class RecordingEngine:
    """Its loss is the mean of the inputs; it stands in for DeepSpeed's, whose forward, backward and step it has."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list]] = []

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
