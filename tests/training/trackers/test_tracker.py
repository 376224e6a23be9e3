from __future__ import annotations

from collections.abc import Mapping

import pytest

from llmscale.training.trackers.tracker import PatientTracker, Tracker


class Flaky(Tracker):
    """Fails at steps 2 to 4, and at the end."""

    name = "flaky"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, values: Mapping[str, float], step: int) -> None:
        if 2 <= step <= 4:
            raise RuntimeError("its server\nis gone")
        self.steps.append(step)

    def finish(self) -> None:
        raise OSError(28, "No space left on device")


def test_what_fails_is_said_once_and_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    inner = Flaky()
    tracker = PatientTracker(inner)
    for step in range(1, 7):
        tracker.log({"train/loss": 1.0}, step)
    tracker.finish()
    assert inner.steps == [1, 5, 6]
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(":")[1].split(". ")[0].strip() for line in lines] == [
        "flaky failed at step 2",
        "flaky works again",
        "flaky could not finish",
    ]
    assert "its server is gone" in lines[0]
    assert "3 records of steps 2 to 4" in lines[1]
