from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from llmscale.config.run_arguments import parse_run_config
from llmscale.errors import ConfigError
from llmscale.training.reports import entropy, judge_overfit
from llmscale.training.start import prepare_start
from tests.conftest import Ranks, read_losses


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
    ranks: Callable[..., Ranks], train_command: Callable[..., list[str]], tmp_path: Path
) -> None:
    words = iter(train_command("--overfit-batch", "4", "--lr", "1e-2", "--precision", "fp32"))
    command = [word for word in words if word not in ("--global-batch-size", "--val-every") or not next(words)]
    job = ranks(command, 2)
    output = job.wait()[0]
    assert job.exit_codes == [0, 0], output
    losses, run = read_losses(tmp_path / "run"), tmp_path / "run"
    assert max(losses) == 200 and losses[200] < 0.5 < losses[1]
    assert f"learned: the loss of the same 4 samples fell from {losses[1]:.4f} to {losses[200]:.4f}" in output
    assert "no checkpoints: each step trains on the same 4 samples" in output
    assert not [*(run / "checkpoints").glob("step-*")]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["has_learned"] for record in records if record.get("event") == "overfit"] == [True]


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
