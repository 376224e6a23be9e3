"""Run as a script, this file is one of two ranks that validate."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llmscale.data.validation import ValidationBatch
from llmscale.training import reports
from llmscale.training.reports import validation_loss
from llmscale.training.run_folder import METRICS_VERSION
from tests.conftest import read_losses
from tests.runs_in_turn import train_in_turn


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


STEPS = 6
#: Gated, two query heads a key, rotary: a block that is not GPT-2's; every sample outgrows the 32 positions.
MODERN = "--norm rmsnorm --positions rotary --gated-mlp --activation silu --no-bias --n-head 4 --n-kv-head 2"


def test_sharded_weights_give_the_text_of_whole_ones_and_training_does_not_notice(
    train_command: Callable, tmp_path: Path
) -> None:
    """ZeRO-3 gathers weights in every forward pass of a sample, on all ranks."""
    folders = {of: tmp_path / "-".join(of) for of in (("zero0", "2"), ("zero3", "2"), ("zero3", "0"))}
    commands = [
        train_command(
            *f"--ds ds_configs/{ds_config}.json --precision fp32 --steps {STEPS} --lr 3e-3 --save-every 0".split(),
            "--sample-every",
            sample_every,
            "--run",
            str(folder),
            *MODERN.split(),
        )
        for (ds_config, sample_every), folder in folders.items()
    ]
    outputs = dict(zip(folders, train_in_turn(commands, world_size=2), strict=True))
    texts = {of: re.findall(r"step +(\d+)/\d+ \| sample: (.*)", output) for of, output in outputs.items()}
    losses = {of: read_losses(folder) for of, folder in folders.items()}
    assert [step for step, _ in texts["zero0", "2"]] == ["2", "4", "6"]
    assert texts["zero3", "2"] == texts["zero0", "2"]
    assert len(losses["zero3", "2"]) == STEPS
    records = [json.loads(line) for line in (tmp_path / "zero3-2" / "metrics.jsonl").read_text().splitlines()]
    recorded = [(str(record["step"]), repr(record["text"])) for record in records if record["kind"] == "sample"]
    assert recorded == texts["zero3", "2"]
    # What a report must know of a start.
    assert (records[0]["world_size"], records[0]["zero_stage"], records[0]["precision"]) == (2, 3, "fp32")
    assert records[0]["metrics_version"] == METRICS_VERSION
    assert records[0]["bytes_per_token"] > 0
    assert losses["zero3", "2"] == losses["zero3", "0"]


def test_text_is_sampled_wherever_the_model_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last step too, whatever it is a multiple of."""
    monkeypatch.setattr(reports, "on_all_ranks", lambda *_: None)
    config, resolved = SimpleNamespace(sample_every=0, eval_every=4), SimpleNamespace(total_steps=10)
    start, world = SimpleNamespace(sets=SimpleNamespace(first=None)), SimpleNamespace(control=None)
    run: Any = SimpleNamespace(config=config, resolved=resolved, start=start, world=world)
    action = reports.SampleText(run, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    assert [step for step in range(1, 11) if action.due(step)] == [4, 8, 10]
    config.sample_every, config.eval_every = 3, 0
    assert [step for step in range(1, 11) if action.due(step)] == [3, 6, 9]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    engine = MeanEngine()
    mine = [[batch([1, 2], 2), batch([10], 1)], [batch([3, 4], 2), batch([1000], 0)]][dist.get_rank()]
    loss, num_samples = validation_loss(engine, mine, torch.device("cpu"))  # type: ignore[arg-type]
    modes = sorted(engine.modes)
    print(json.dumps({"loss": loss, "num_samples": num_samples, "modes": modes, "training_again": engine.training}))
    dist.destroy_process_group()
