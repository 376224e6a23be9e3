"""Run as a script, this file is one of two ranks that validate."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.data.validation import ValidationBatch
from llmscale.training.actions.validate import validation_loss


class MeanEngine:
    """Its loss is the mean of the inputs. Stands in for DeepSpeed's engine, and knows what mode it is in."""

    def __init__(self) -> None:
        self.training, self.modes = True, set[tuple[bool, bool]]()

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.modes.add((self.training, torch.is_grad_enabled()))
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        return tokens.float().mean()


def batch(values: list[float], weight: int) -> ValidationBatch:
    tokens = torch.tensor(values).view(-1, 1).expand(-1, 3)
    return ValidationBatch(tokens, torch.arange(weight), weight)


def test_the_mean_is_over_sequences_and_not_over_ranks_or_batches(ranks: Callable) -> None:
    job = ranks([__file__], 2)
    outputs = job.wait()
    assert job.exit_codes == [0, 0], outputs
    # Five sequences of loss 1, 2, 3, 4 and 10; the filler with loss 1000 does not count.
    for output in outputs:
        seen = json.loads(output)
        assert seen["loss"] == pytest.approx(20 / 5)
        assert seen["num_samples"] == 5
        assert seen["modes"] == [[False, False]], "no dropout, no gradients"
        assert seen["training_again"] is True


if __name__ == "__main__":
    dist.init_process_group("gloo")
    engine = MeanEngine()
    mine = [[batch([1, 2], 2), batch([10], 1)], [batch([3, 4], 2), batch([1000], 0)]][dist.get_rank()]
    loss, num_samples = validation_loss(engine, mine, torch.device("cpu"))  # type: ignore[arg-type]
    modes = sorted(engine.modes)
    print(json.dumps({"loss": loss, "num_samples": num_samples, "modes": modes, "training_again": engine.training}))
    dist.destroy_process_group()
