"""What a session does with its actions and with a failing feed, without ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmscale.engine.train_step import PhaseTimer
from llmscale.errors import DataError
from llmscale.training import session as session_module
from llmscale.training.live_run import StepAction, StepResult
from llmscale.training.loss_spikes import RollbackRequest
from llmscale.training.open_session import hpz_warnings
from llmscale.training.run_folder import FAILURE_NAME
from llmscale.training.session import Session
from llmscale.training.step_metrics import StepMeter
from llmscale.training.stop_request import StopRequest


class Every(StepAction):
    """Notes its calls in `seen`."""

    def __init__(self, steps: int, seen: list[str]) -> None:
        self._steps, self._seen = steps, seen

    def due(self, step: int) -> bool:
        return step % self._steps == 0

    def run(self, result: StepResult) -> None:
        self._seen.append(f"{self._steps} at {result.step}")

    def close(self) -> None:
        self._seen.append(f"{self._steps} closed")


class BrokenFeed(Iterator[Any]):
    def __next__(self) -> Any:
        raise FileNotFoundError("shard.00003.mds")

    def close(self) -> None:
        pass


def session(
    actions: list[StepAction], checkpoints: Any, stop: Any = None, run_folder: Path = Path("nowhere")
) -> Session:
    """Return a session with as many parts as its methods without steps need."""
    run: Any = SimpleNamespace(
        first_step=4,
        micro_steps=lambda step: 2,
        config=SimpleNamespace(check_every=1, run=run_folder),
        world=SimpleNamespace(control=None, rank=1),
    )
    engine: Any = SimpleNamespace(feed=BrokenFeed(), meter=StepMeter(PhaseTimer(torch.device("cpu"))))
    io: Any = SimpleNamespace(claim=SimpleNamespace(close=lambda: None), log=None)
    return Session(run, engine, io, RollbackRequest(), stop or StopRequest(), actions, checkpoints)


def test_actions_run_when_they_are_due_in_order_and_the_checkpoint_last() -> None:
    seen: list[str] = []
    actions: list[StepAction] = [Every(2, seen), Every(1, seen)]
    with pytest.raises(KeyError), session(actions, Every(2, seen)) as opened:
        assert opened.step == 4
        for step in (5, 6):
            opened.run_actions(StepResult(step, [], torch.zeros(()), was_skipped=False))
        raise KeyError("an error on this rank alone")
    assert seen == ["1 at 5", "2 at 6", "1 at 6", "2 at 6", "2 closed", "1 closed"]


def test_an_error_is_recorded_but_not_one_of_an_early_end(tmp_path: Path) -> None:
    for ends_early in (True, False):
        stop = SimpleNamespace(ends_early=ends_early)
        with pytest.raises(DataError), session([], Every(2, []), stop, tmp_path):
            raise DataError("no shard")
        assert (tmp_path / FAILURE_NAME).exists() is not ends_early
    record = json.loads((tmp_path / FAILURE_NAME).read_text())
    assert (record["error"], record["step"], record["rank"]) == ("no shard", 4, 1)


def test_whatever_the_feed_raises_is_told_to_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[object] = []

    def vote(_group: object, *, failure: object, **votes: object) -> Any:
        failures.append(failure)
        return SimpleNamespace(**votes)

    monkeypatch.setattr(session_module, "vote", vote)
    opened = session([], SimpleNamespace(due_by_clock=lambda: False))
    assert opened.fetch(4) == []
    opened.decide(4)
    assert isinstance(failures[0], FileNotFoundError)


@pytest.mark.parametrize(
    ("group", "ranks_per_node", "words"),
    [(1, [4], None), (4, [4, 4], None), (2, [4, 4], None), (4, [4], "on one node"), (4, [2, 2], "nodes of 2 ranks")],
)
def test_groups_that_gain_nothing_are_said(group: int, ranks_per_node: list[int], words: str | None) -> None:
    warnings = list(hpz_warnings(group, ranks_per_node))
    assert len(warnings) == (words is not None)
    assert all(words in warning for warning in warnings if words)
