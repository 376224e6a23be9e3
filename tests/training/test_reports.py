"""Validation, samples, --overfit-batch and --profile. Run as a script, this file is one of two ranks that validate."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from llmscale.config.run_arguments import parse_run_config
from llmscale.data.validation import ValidationBatch
from llmscale.engine.train_step import PhaseTimer
from llmscale.errors import ConfigError
from llmscale.training import reports
from llmscale.training.live_run import StepResult
from llmscale.training.reports import ProfileSteps, entropy, judge_overfit, validation_loss
from llmscale.training.run_folder import METRICS_VERSION
from llmscale.training.start import prepare_start
from llmscale.training.step_metrics import StepMeter
from tests.conftest import read_events, read_losses, read_records, run_ranks
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
    run = folders["zero3", "2"]
    recorded = [(str(record["step"]), repr(record["text"])) for record in read_records(run, "sample")]
    assert recorded == texts["zero3", "2"]
    # What a report must know of a start.
    (start,) = read_events(run, "start")
    assert (start["world_size"], start["zero_stage"], start["precision"]) == (2, 3, "fp32")
    assert start["metrics_version"] == METRICS_VERSION and start["bytes_per_token"] > 0
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


@pytest.mark.parametrize(
    ("first", "last", "has_learned", "why"),
    [
        (5.5, 0.3, True, "fell from 5.5000 to 0.3000, and a model that ignores the context stays above 3.0000"),
        (5.5, 2.0, False, "has not memorised"),
        (5.5, 3.4, False, "attention or positions pass nothing on"),
        (5.5, 5.49, False, "stayed (from 5.5000 to 5.4900). Likely causes: --lr is far too low"),
        (5.5, 7.0, False, "Lower --lr"),
        (5.5, math.nan, False, "Lower --lr"),
    ],
)
def test_the_verdict_names_the_cause(first: float, last: float, has_learned: bool, why: str) -> None:
    verdict = judge_overfit(first, last, 3.0)
    assert verdict[0] == has_learned and why in verdict[1]


def test_entropy_of_tokens() -> None:
    assert entropy(np.array([5, 0, 5, 5, 5])) == pytest.approx(math.log(4))
    assert entropy(np.array([0, 7])) == 0


def test_a_batch_is_learned_by_two_ranks_and_nothing_is_saved(
    train_command: Callable[..., list[str]], tmp_path: Path
) -> None:
    words = iter(train_command("--overfit-batch", "4", "--lr", "1e-2", "--precision", "fp32"))
    command = [word for word in words if word not in ("--global-batch-size", "--val-every") or not next(words)]
    output = run_ranks(command, 2)
    losses, run = read_losses(tmp_path / "run"), tmp_path / "run"
    assert max(losses) == 200 and losses[200] < 0.5 < losses[1]
    assert f"learned: the loss of the same 4 samples fell from {losses[1]:.4f} to {losses[200]:.4f}" in output
    assert "no checkpoints: each step trains on the same 4 samples" in output
    assert not [*(run / "checkpoints").glob("step-*")]
    assert [event["has_learned"] for event in read_events(run, "overfit")] == [True]


@pytest.mark.parametrize(
    "flags",
    [
        "--skip-steps 1:2",
        "--save-every 5",
        "--batch-ramp-from 2 --batch-ramp-tokens 99",
        "--seq-len-ramp-from 2 --seq-len-ramp-tokens 99",
        "--global-batch-size 8",
        "--resume best",
    ],
)
def test_keys_that_it_decides_are_refused(flags: str) -> None:
    with pytest.raises(ConfigError, match=r"has no effect with --overfit-batch\. Drop one of them"):
        parse_run_config(["--overfit-batch", "4", *flags.split()])


def test_keys_of_the_run_file_that_it_decides_are_off(tiny_set: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    values = {"save_every": 5, "save_every_minutes": 1, "skip_steps": ["2:3"], "val_every": 5, "val_samples": 8}
    file.write_text(yaml.safe_dump(values | {"global_batch_tokens": 512, "keep_every": 10, "data": str(tiny_set)}))
    argv = ["--config", str(file), "--overfit-batch", "4", "--run", str(tmp_path / "run")]
    config = prepare_start(parse_run_config(argv), world_size=1).config
    assert (config.save_every, config.save_every_minutes, config.skip_steps, config.val_every) == (0, 0, [], 0)
    assert (config.global_batch_size, config.global_batch_tokens, config.keep_every, config.resume) == (
        4,
        None,
        0,
        "none",
    )


def test_a_batch_of_fewer_samples_than_ranks_is_refused(tiny_set: Path) -> None:
    config = parse_run_config(["--overfit-batch", "4", "--data", str(tiny_set)])
    assert prepare_start(config, world_size=3).resolved.plan.train_batch_size == 6
    with pytest.raises(ConfigError, match=r"overfit-batch 4 has fewer samples than there are ranks: give 5 or more"):
        prepare_start(config, world_size=5)


@pytest.mark.parametrize(
    ("stage", "world_size"), [*(pytest.param(*of, marks=pytest.mark.slow) for of in ((0, 1), (1, 2), (2, 1))), (3, 2)]
)
def test_a_profile_at_every_stage(stage: int, world_size: int, train_command: Callable, tmp_path: Path) -> None:
    flags = ("--ds", f"ds_configs/zero{stage}.json", "--precision", "fp32", "--steps", "8", "--profile", "4:7")
    output = run_ranks(train_command(*flags), world_size)
    (event,) = read_events(tmp_path / "run", "profile")
    assert (event["step"], event["num_steps"]) == (6, 3)
    assert {path.name for path in (tmp_path / "run/profile").iterdir()} == {
        "steps-4-to-6.trace.json",
        "steps-4-to-6.table.txt",
    }
    assert "traceEvents" in json.loads(Path(event["trace"]).read_text())
    table = Path(event["table"]).read_text()
    assert "Self CPU %" in table and "aten::mm" in table and "phase: forward_backward" in table
    assert f"profile of steps 4 to 6 on rank 0, which the profiler itself slows down: {event['trace']}" in output


def test_steps_that_are_done_or_never_come_are_said(train_command: Callable, tmp_path: Path) -> None:
    output = run_ranks(train_command("--precision", "fp32", "--steps", "3", "--profile", "5:8"), 1)
    assert "WARNING: --profile 5:8: this start goes from step 1 to 3, so nothing is profiled" in output
    assert not (tmp_path / "run/profile").exists()


@pytest.fixture
def profiling(tmp_path: Path) -> Callable[..., tuple[ProfileSteps, list[str]]]:
    """`profiling(steps, is_rollback=False)`: the profile of a run of nine steps, and the lines that it reports."""

    def build(steps: str, *, is_rollback: bool = False) -> tuple[ProfileSteps, list[str]]:
        reported: list[str] = []
        device = torch.device("cpu")
        run: Any = SimpleNamespace(
            world=SimpleNamespace(is_main=True, device=device),
            config=SimpleNamespace(run=tmp_path, profile=steps),
            resolved=SimpleNamespace(total_steps=9),
        )
        engine: Any = SimpleNamespace(meter=StepMeter(PhaseTimer(device)))
        io: Any = SimpleNamespace(report=reported.append)
        return ProfileSteps(run, engine, io, is_rollback=is_rollback), reported

    return build


def test_only_a_start_says_that_its_steps_are_not_profiled(profiling: Callable) -> None:
    """A rollback behind profiled steps begins again without them."""
    for is_rollback in (False, True):
        action, reported = profiling("2:4", is_rollback=is_rollback)
        action.begin(5)
        assert len(reported) == (not is_rollback), reported


def finish_step(action: ProfileSteps, step: int) -> None:
    if action.due(step):
        action.run(StepResult(step, [], torch.zeros(()), was_skipped=False))


def test_a_folder_that_cannot_be_written_ends_no_training(profiling: Callable, tmp_path: Path) -> None:
    """It would end rank 0 alone."""
    action, reported = profiling("1:3")
    action.begin(0)
    (tmp_path / "profile").write_text("")
    for step in (1, 2):
        finish_step(action, step)
    assert len(reported) == 1 and "nothing is written: " in reported[0], reported


def test_a_profile_that_is_cut_short_is_reported(profiling: Callable) -> None:
    action, reported = profiling("2:5")
    action.begin(0)
    finish_step(action, 1)
    assert reported == []
    action.close()
    assert len(reported) == 1 and reported[0].startswith("WARNING: --profile 2:5"), reported


if __name__ == "__main__":
    dist.init_process_group("gloo")
    engine = MeanEngine()
    mine = [[batch([1, 2], 2), batch([10], 1)], [batch([3, 4], 2), batch([1000], 0)]][dist.get_rank()]
    loss, num_samples = validation_loss(engine, mine, torch.device("cpu"))  # type: ignore[arg-type]
    modes = sorted(engine.modes)
    print(json.dumps({"loss": loss, "num_samples": num_samples, "modes": modes, "training_again": engine.training}))
    dist.destroy_process_group()
