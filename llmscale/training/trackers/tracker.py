"""What a tracker is: somewhere outside of the run folder's metrics.jsonl where the curves of a run are drawn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from llmscale.files.buffered_log import warn_on_stderr


class Tracker(ABC):
    """Takes numbers by name and step, on the main rank; may raise whatever it likes: PatientTracker listens."""

    name: str
    """As messages call it."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers of one step, such as "train/loss"; NaN and infinite ones too."""

    def go_back(self, step: int) -> None:  # noqa: B027  most cannot
        """What was logged of later steps than `step` is left behind."""

    @abstractmethod
    def finish(self) -> None:
        """Hand over what is left."""


class PatientTracker(Tracker):
    """Another tracker, which may fail at any time: its service dies, its disk fills, its server is gone."""

    def __init__(self, inner: Tracker) -> None:
        self._inner, self.name = inner, inner.name
        self._missing: list[int] = []

    def log(self, values: Mapping[str, float], step: int) -> None:
        """A warning when values begin, and when they cease, not to arrive."""
        try:
            self._inner.log(values, step)
        except Exception as error:  # whatever a library and its service can raise
            if not self._missing:
                warn_on_stderr(f"WARNING: {self.name} failed at step {step}: {one_line(error)}. Training goes on.")
            self._missing.append(step)
            return
        if self._missing:
            warn_on_stderr(f"WARNING: {self.name} works again. {self._lacks()}")
            self._missing.clear()

    def go_back(self, step: int) -> None:
        try:
            self._inner.go_back(step)
        except Exception as error:  # as above
            warn_on_stderr(f"WARNING: {self.name} could not go back to step {step}: {one_line(error)}.")

    def finish(self) -> None:
        try:
            self._inner.finish()
        except Exception as error:  # as above
            warn_on_stderr(f"WARNING: {self.name} could not finish: {one_line(error)}.")
        if self._missing:
            warn_on_stderr(f"WARNING: {self._lacks()}")

    def _lacks(self) -> str:
        first, last = self._missing[0], self._missing[-1]
        return (
            f"{self.name} lacks {len(self._missing)} records of steps {first} to {last}; metrics.jsonl has what was "
            "measured."
        )


def one_line(error: Exception) -> str:
    """What an exception says, or its name where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
