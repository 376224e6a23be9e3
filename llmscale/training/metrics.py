"""metrics.jsonl, what is shown of it, and trackers: one record per logged step, written by the main rank only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from llmscale.evaluate.tasks import show_value
from llmscale.files.buffered_log import BufferedLog
from llmscale.terminal.human_numbers import with_singulars
from llmscale.training.display.display import Display, PlainLines
from llmscale.training.run_folder import METRICS_NAME, METRICS_VERSION
from llmscale.training.step_metrics import StepMetrics
from llmscale.training.trackers.tracker import Tracker
from llmscale.untrusted.terminal import make_visible_line, print_visible


class MetricsLog:
    """Writes records to the run folder, the console and trackers. For the main rank.

    Nothing that goes wrong with any of them ends training.
    """

    def __init__(
        self,
        run_folder: Path,
        total_steps: int,
        trackers: Sequence[Tracker] = (),
        display: Display | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Without a `display` a step is a line. `check` raises OSError while the run folder is not this run's; what is
        logged then waits in memory."""
        self._total_steps, self._trackers = total_steps, trackers
        self.display = display or PlainLines(total_steps)
        # Unbuffered: a record is on its way to the disk when the step is over, whatever happens next.
        self._file = BufferedLog(run_folder / METRICS_NAME, check=check)
        self._step = 0

    def begin(self, step: int, **values: object) -> None:
        """Training begins after `step`, or its run folder had to be made again there; `values` say of which history."""
        self.log_event("start", step=step, metrics_version=METRICS_VERSION, **values)
        self.display.begin(step)

    def log_step(self, metrics: StepMetrics) -> None:
        """Record a training step."""
        # Most runs have one set, and no such key.
        record = {key: value for key, value in asdict(metrics).items() if key != "loss_by_set" or value is not None}
        self._write({"kind": "train", **record})
        self.display.show_step(metrics)
        self._track("train", asdict(metrics), metrics.step)

    def log_validation(
        self,
        step: int,
        loss: float,
        num_samples: int,
        loss_by_set: Mapping[str, float] | None = None,
        bits_per_byte: float | None = None,
        samples: str = "",
    ) -> None:
        """Record a validation: loss in nats per token over num_samples sequences, and of each set of a mix. `samples`
        says how many each set has."""
        by_set = dict(loss_by_set or {})
        of_sets = {"loss_by_set": by_set} if by_set else {}
        values = {"loss": loss, **({} if bits_per_byte is None else {"bits_per_byte": bits_per_byte})}
        self._write({"kind": "validation", "step": step, **values, "num_samples": num_samples, **of_sets})
        over = with_singulars(f"over {samples or f'{num_samples} sequences'}")
        print(
            f"step {step:>6}/{self._total_steps} | validation loss {loss:.4f} {over}"
            + "".join(f" | {name} {value:.4f}" for name, value in by_set.items()),
            flush=True,
        )
        self.display.show_validation(step, loss)
        self._track("validation", {**values, **by_set}, step)

    def log_evaluation(self, step: int, task: str, values: Mapping[str, float], num_items: int) -> None:
        """Record a task's results."""
        record = {"kind": "evaluation", "step": step, "task": task, "values": dict(values), "num_items": num_items}
        self._write(record)
        shown = "".join(f" | {name} {show_value(value)}" for name, value in values.items())
        over = with_singulars(f"over {num_items} items")
        print(f"step {step:>6}/{self._total_steps} | {make_visible_line(task)}{shown} {over}", flush=True)
        self._track(f"evaluation/{task}", values, step)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Record text of the model; `text` begins with the prompt."""
        self._write({"kind": "sample", "step": step, "prompt": prompt, "text": text})
        print_visible(f"step {step:>6}/{self._total_steps} | sample: {text!r}", flush=True)

    def go_back(self, step: int) -> None:
        """The run goes on from `step`; what was recorded of later ones stays, before the next "start"."""
        for tracker in self._trackers:
            tracker.go_back(step)

    def log_event(self, event: str, **values: object) -> None:
        """Record anything that is not a measurement: start, resume, save, stop."""
        self._write({"kind": "event", "event": event, **values})

    def close(self) -> None:
        """Make everything durable, close it, and warn of what is missing."""
        self.display.close()
        self._file.close()
        for tracker in self._trackers:
            tracker.finish()

    def _track(self, kind: str, values: Mapping[str, object], step: int) -> None:
        numbers = dict(_numbers(values, kind)) if self._trackers else {}
        for tracker in self._trackers:
            tracker.log(numbers, step)

    def _write(self, record: dict[str, object]) -> None:
        self._step = int(str(record.get("step", self._step)))
        # JSON has no NaN and no infinity; a gradient norm is infinite whenever fp16 overflows.
        self._file.append(json.dumps(_finite(record), allow_nan=False).encode() + b"\n", self._step)


def _numbers(values: Mapping[str, object], prefix: str) -> Iterator[tuple[str, float]]:
    """Every number by its path: train/loss, train/loss_by_set/web."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}/{key}")
        elif isinstance(value, (int, float)):
            yield f"{prefix}/{key}", value


def _finite(value: object) -> object:
    """The same with null for what is NaN or infinite, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return {key: _finite(inner) for key, inner in value.items()} if isinstance(value, dict) else value
