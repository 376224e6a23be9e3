"""What going back does to a run is in test_watch_spikes.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmscale.training import go_back
from llmscale.training.throughput import StepMeter


@pytest.mark.parametrize("outcome", [True, False])
def test_going_back_is_a_start_for_the_clock_and_the_supervisor(outcome: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    meter = StepMeter(torch.device("cpu"))

    def note(session: Any) -> bool:
        seen.append(meter.pausing_for)
        return outcome

    monkeypatch.setattr(go_back, "_go_back", note)
    session: Any = SimpleNamespace(live=SimpleNamespace(meter=meter))
    heartbeat: Any = SimpleNamespace(beat=lambda phase: seen.append(f"beat {phase}"))
    assert go_back.go_back(session, heartbeat) is outcome
    assert seen == ["beat starting", "starting", "beat starting"]
    assert meter.spent_s["starting"] > 0
