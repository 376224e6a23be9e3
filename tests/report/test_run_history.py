"""metrics.jsonl of interrupted, continued and broken runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from llmscale.errors import ConfigError
from llmscale.report.run_history import load_history, load_run_manifest


def train(step: int, loss: float, rate: float = 100.0) -> str:
    record = {"kind": "train", "step": step, "loss": loss, "tokens_seen": step * 8, "tokens_per_second": rate}
    return json.dumps(record)


def validation(step: int, loss: float) -> str:
    return json.dumps({"kind": "validation", "step": step, "loss": loss, "num_samples": 4})


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str) -> Path:
        (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return tmp_path

    return write


def test_reads_losses_tokens_and_speed(write_run: Callable[..., Path]) -> None:
    event = json.dumps({"kind": "event", "event": "finished", "step": 2})
    history = load_history(write_run(train(1, 5.0, 1), train(2, 4.0, 30), train(3, 3.5, 20), validation(3, 4.5), event))
    assert history.train == {1: 5.0, 2: 4.0, 3: 3.5}
    assert history.validation == {3: 4.5}
    assert history.tokens_seen[3] == 24
    assert history.median_tokens_per_second == 25


def test_what_a_restart_abandoned_is_forgotten(write_run: Callable[..., Path]) -> None:
    """Saved at 2, killed after 4, continued from 2 with other losses."""
    first = [train(step, 9.0 - step) for step in range(1, 5)]
    history = load_history(write_run(*first[:2], validation(2, 7.5), *first[2:], validation(4, 6.0), train(3, 6.5)))
    assert history.train == {1: 8.0, 2: 7.0, 3: 6.5}
    assert history.validation == {2: 7.5}
    assert list(history.tokens_per_second) == [1, 2, 3]


def test_lines_that_a_killed_process_left_half_written_are_skipped(write_run: Callable[..., Path]) -> None:
    history = load_history(write_run(train(1, 5.0), '{"kind": "tra', train(2, 4.0), '{"ki'))
    assert history.train == {1: 5.0, 2: 4.0}


def test_a_loss_that_was_no_number_is_nan(write_run: Callable[..., Path]) -> None:
    lost = json.dumps({"kind": "train", "step": 2, "loss": None, "tokens_seen": 16, "tokens_per_second": 1.0})
    assert math.isnan(load_history(write_run(train(1, 5.0), lost)).train[2])


def test_no_run_and_no_step_are_one_clear_line(write_run: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Name a run folder"):
        load_history(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no training step yet"):
        load_history(write_run())


def test_the_set_of_a_run_may_be_gone(tmp_path: Path) -> None:
    assert load_run_manifest(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"config": {"data": str(tmp_path / "gone")}}))
    assert load_run_manifest(tmp_path) is None
