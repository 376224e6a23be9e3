"""What a session does with its actions and with a failing feed, without ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmscale.errors import DataError
from llmscale.training import session as session_module
from llmscale.training.actions.action import DoneStep, StepAction
from llmscale.training.failure import FAILURE_NAME
from llmscale.training.session import Session
from llmscale.training.spikes import SpikeRequests
from llmscale.training.stop_request import StopRequest
from llmscale.training.throughput import StepMeter


class Every(StepAction):
    """Notes in `seen` what is asked of it."""

    def __init__(self, steps: int, seen: list[str]) -> None:
        self._steps, self._seen = steps, seen

    def due(self, step: int) -> bool:
        return step % self._steps == 0

    def act(self, done: DoneStep) -> None:
        self._seen.append(f"{self._steps} at {done.step}")

    def close(self) -> None:
        self._seen.append(f"{self._steps} closed")


class BrokenFeed(Iterator[Any]):
    def __next__(self) -> Any:
        raise FileNotFoundError("shard.00003.mds")

    def close(self) -> None:
        pass


def live(run_folder: Path = Path("nowhere")) -> Any:
    """As much of a LiveRun as a session without steps asks for."""
    resolved = SimpleNamespace(plan=SimpleNamespace(gradient_accumulation_steps=2))
    return SimpleNamespace(
        first_step=4,
        feed=BrokenFeed(),
        claim=SimpleNamespace(close=lambda: None, find_loss=lambda: None),
        meter=StepMeter(torch.device("cpu")),
        run=SimpleNamespace(resolved=resolved, config=SimpleNamespace(check_every=1, run=run_folder)),
        world=SimpleNamespace(control=None, rank=1),
        log=None,
        spikes=SpikeRequests(),
    )


def test_actions_happen_when_they_are_due_in_order_and_the_checkpoint_last() -> None:
    seen: list[str] = []
    actions = [Every(2, seen), Every(1, seen)]
    with pytest.raises(KeyError), Session(live(), StopRequest(), actions, Every(2, seen)) as session:  # type: ignore[arg-type]
        assert session.step == 4
        for step in (5, 6):
            session.after(DoneStep(step, [], torch.zeros(()), was_skipped=False))
        raise KeyError("an error on this rank alone")
    assert seen == ["1 at 5", "2 at 6", "1 at 6", "2 at 6", "2 closed", "1 closed"]


def test_an_error_is_recorded_but_not_one_of_an_early_end(tmp_path: Path) -> None:
    for ends_early in (True, False):
        stop: Any = SimpleNamespace(ends_early=ends_early)
        with pytest.raises(DataError), Session(live(tmp_path), stop, [], Every(2, [])):  # type: ignore[arg-type]
            raise DataError("no shard")
        assert (tmp_path / FAILURE_NAME).exists() is not ends_early
    record = json.loads((tmp_path / FAILURE_NAME).read_text())
    assert (record["error"], record["step"], record["rank"]) == ("no shard", 4, 1)


def test_whatever_the_feed_raises_is_told_to_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(session_module, "vote", lambda group, *, failure, **votes: told.append(failure))
    checkpoints = SimpleNamespace(due_by_clock=lambda: False)
    session = Session(live(), SimpleNamespace(received=[]), [], checkpoints)  # type: ignore[arg-type]
    assert session.fetch(4) == []
    session.agree(4)
    assert isinstance(told[0], FileNotFoundError)
