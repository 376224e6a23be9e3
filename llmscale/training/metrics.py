"""metrics.jsonl: one record per logged step, also printed and sent to trackers. For rank 0."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from llmscale.evaluate.tasks import show_value
from llmscale.files.buffered_log import BufferedLog
from llmscale.terminal.human_numbers import with_singulars
from llmscale.training.live_view import Display, PlainLines
from llmscale.training.run_folder import METRICS_NAME, METRICS_VERSION, without_nan
from llmscale.training.step_metrics import StepMetrics
from llmscale.training.trackers import Tracker
from llmscale.untrusted.terminal import make_visible_line, print_visible


class MetricsLog:
    """Writes records to the run folder, the console and trackers; none of their failures ends training."""

    def __init__(
        self,
        run_folder: Path,
        total_steps: int,
        trackers: Sequence[Tracker] = (),
        display: Display | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`display` None prints a line per step. While `check` raises OSError, because the folder is not this run's any
        more, records wait in memory."""
        self._total_steps, self._trackers = total_steps, trackers
        self.display = display or PlainLines(total_steps)
        # Unbuffered: a record survives whatever happens after its step.
        self._file = BufferedLog(run_folder / METRICS_NAME, check=check)
        self._step = 0

    def begin(self, step: int, **values: object) -> None:
        """Record that training begins after `step`, with facts about this start. Repeated for a folder made again."""
        self.log_event("start", step=step, metrics_version=METRICS_VERSION, **values)
        self.display.begin(step)

    def log_step(self, metrics: StepMetrics) -> None:
        """Record a training step."""
        self._write({"kind": "train", **metrics.as_record()})
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
        """Record a validation: loss in nats per token over num_samples sequences, and of each dataset of a mixture.

        `samples` describes how many sequences each dataset has.
        """
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

    def roll_back(self, step: int) -> None:
        """Tell trackers that the run continues from `step`; records of later steps stay before the next "start"."""
        for tracker in self._trackers:
            tracker.roll_back(step)

    def log_event(self, event: str, **values: object) -> None:
        """Record an event: start, save, stop."""
        self._write({"kind": "event", "event": event, **values})

    def close(self) -> None:
        """Make everything durable, close it, and warn of missing records."""
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
        record["time"] = round(time.time(), 3)
        # JSON has no NaN and no infinity; a gradient norm is infinite whenever fp16 overflows.
        self._file.append(json.dumps(without_nan(record), allow_nan=False).encode() + b"\n", self._step)


def _numbers(values: Mapping[str, object], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield every number with its path: train/loss, train/loss_by_set/web."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}/{key}")
        elif isinstance(value, (int, float)):
            yield f"{prefix}/{key}", value
