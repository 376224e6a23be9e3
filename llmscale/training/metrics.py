"""metrics.jsonl: one record per logged step, also printed and sent to trackers. For rank 0.

Trackers are services and files beside metrics.jsonl that draw a run's curves, only if asked for. A new one is a
function here and a line in `start_trackers`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmscale.config.bundled_files import import_extra
from llmscale.config.resolve import ResolvedRun
from llmscale.config.run_config import RunConfig
from llmscale.config.run_keys import flatten, publish_keys
from llmscale.error_handling import say
from llmscale.errors import ConfigError
from llmscale.files.record_log import RecordLog
from llmscale.terminal.human_numbers import show_value, with_singulars
from llmscale.training.inputs import as_plain
from llmscale.training.run_folder import METRICS_NAME, METRICS_VERSION, without_nan
from llmscale.training.step_metrics import StepMetrics, format_step
from llmscale.untrusted.terminal import make_visible_line, print_visible

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

    from llmscale.training.live_view import LiveView

TENSORBOARD_NAME = "tensorboard"
#: Seconds until a logged value is in TensorBoard's file.
_FLUSH_S = 10


class MetricsLog:
    """Writes records to the run folder, the console and trackers; none of their failures ends training."""

    def __init__(
        self,
        run_folder: Path,
        total_steps: int,
        trackers: Sequence[Tracker] = (),
        view: LiveView | None = None,
    ) -> None:
        """`view` None prints a line per step."""
        self._total_steps = total_steps
        self._trackers = trackers
        self._view = view
        # Unbuffered: a record survives whatever happens after its step.
        self._file = RecordLog(run_folder / METRICS_NAME, say)

    def begin(self, step: int, **values: object) -> None:
        """Record that training begins after `step`, with facts about this start."""
        self.log_event("start", step=step, metrics_version=METRICS_VERSION, **values)
        if self._view:
            self._view.begin(step)

    def log_step(self, metrics: StepMetrics) -> None:
        """Record a training step."""
        self._write({"kind": "train", **metrics.as_record()})
        if self._view:
            self._view.show_step(metrics)
        else:
            print(format_step(metrics, self._total_steps), flush=True)
        self._track("train", asdict(metrics), metrics.step)

    def log_validation(
        self,
        step: int,
        loss: float,
        num_samples: int,
        loss_by_set: Mapping[str, float] | None = None,
        bits_per_byte: float | None = None,
        *,
        samples: str,
    ) -> None:
        """Record a validation: loss in nats per token over num_samples sequences, and of each dataset of a mixture.

        `samples` describes how many sequences each dataset has.
        """
        by_set = dict(loss_by_set or {})
        if bits_per_byte is None:
            values = {"loss": loss}
        else:
            values = {"loss": loss, "bits_per_byte": bits_per_byte}
        of_sets = {"loss_by_set": by_set} if by_set else {}
        self._write({"kind": "validation", "step": step, **values, "num_samples": num_samples, **of_sets})
        each = "".join(f" | {name} {value:.4f}" for name, value in by_set.items())
        self._print(step, f"validation loss {loss:.4f} {with_singulars(f'over {samples}')}{each}")
        if self._view:
            self._view.show_validation(step, loss)
        self._track("validation", {**values, **by_set}, step)

    def log_evaluation(self, step: int, task: str, values: Mapping[str, float], num_items: int) -> None:
        """Record a task's results."""
        record = {"kind": "evaluation", "step": step, "task": task, "values": dict(values), "num_items": num_items}
        self._write(record)
        results = "".join(f" | {name} {show_value(value)}" for name, value in values.items())
        self._print(step, f"{make_visible_line(task)}{results} {with_singulars(f'over {num_items} items')}")
        self._track(f"evaluation/{task}", values, step)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Record text of the model; `text` begins with the prompt."""
        self._write({"kind": "sample", "step": step, "prompt": prompt, "text": text})
        self._print(step, f"sample: {text!r}")

    def _print(self, step: int, words: str) -> None:
        print_visible(f"step {step:>6}/{self._total_steps} | {words}", flush=True)

    def roll_back(self, step: int) -> None:
        """Tell trackers that the run continues from `step`; records of later steps stay before the next "start"."""
        for tracker in self._trackers:
            tracker.roll_back(step)

    def log_event(self, event: str, **values: object) -> None:
        """Record an event: start, save, stop."""
        self._write({"kind": "event", "event": event, **values})

    def close_view(self) -> None:
        """Give the terminal's rows back, if the run has a view."""
        if self._view:
            self._view.close()

    def close(self) -> None:
        """Make everything durable, close it, and warn of missing records."""
        self.close_view()
        self._file.close()
        for tracker in self._trackers:
            tracker.finish()

    def _track(self, kind: str, values: Mapping[str, object], step: int) -> None:
        if not self._trackers:
            return
        # By path: train/loss, train/loss_by_set/web.
        numbers = {path: value for path, value in flatten({kind: values}, "/") if isinstance(value, (int, float))}
        for tracker in self._trackers:
            tracker.log(numbers, step)

    def _write(self, record: dict[str, object]) -> None:
        record["time"] = round(time.time(), 3)
        # JSON has no NaN and no infinity; a gradient norm is infinite whenever fp16 overflows.
        self._file.append(json.dumps(without_nan(record), allow_nan=False).encode() + b"\n")


@dataclass
class Tracker:
    """A destination for numbers by name and step. Its functions may raise anything, which becomes a warning."""

    name: str
    """Name for messages."""
    write: Callable[[Mapping[str, float], int], object]
    """Logs numbers of one step, such as "train/loss", NaN and infinity included."""
    end: Callable[[], object]
    """Sends what is left."""
    go_back: Callable[[int], object] = lambda step: None
    """Drops everything logged after a step; most cannot."""
    run_id: str | None = None
    """Id under which a later start continues the run; None without."""
    missing: list[int] = field(default_factory=list)
    """Steps whose numbers it has refused since the last that arrived."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log, and warn when values cease to arrive and when they arrive again."""
        if problem := _problem_of(partial(self.write, values, step)):
            if not self.missing:
                say(f"WARNING: {self.name} failed at step {step}: {problem}. Training continues.")
            self.missing.append(step)
        elif self.missing:
            say(f"WARNING: {self.name} works again. {self._describe_missing()}")
            self.missing.clear()

    def roll_back(self, step: int) -> None:
        """Drop everything logged after `step`, or warn."""
        if problem := _problem_of(partial(self.go_back, step)):
            say(f"WARNING: {self.name} could not go back to step {step}: {problem}.")

    def finish(self) -> None:
        """Send what is left, or warn."""
        if problem := _problem_of(self.end):
            say(f"WARNING: {self.name} could not finish: {problem}.")
        if self.missing:
            say(f"WARNING: {self._describe_missing()}")

    def _describe_missing(self) -> str:
        return (
            f"{self.name} lacks {len(self.missing)} records of steps {self.missing[0]} to {self.missing[-1]}; "
            "metrics.jsonl has what was measured."
        )


def _problem_of(action: Callable[[], object]) -> str:
    """Run an action of a tracker, and return why it failed, or an empty string."""
    try:
        action()
    except Exception as error:  # whatever a library and its service can raise
        return _one_line(error)
    return ""


def start_tensorboard(run_folder: Path, *, first_step: int) -> Tracker:
    """Begin an event file that continues the curves after `first_step` steps. Raises ConfigError.

    There is one per start, and TensorBoard shows those of a folder as one curve. It drops later steps, logged by a
    start that was killed or that the run went back from. They are written by tensorboardX, which needs numpy and
    protobuf: torch's own writer needs all of tensorboard, with a web server and gRPC, on the machine that trains.
    """
    open_writer = import_extra("tensorboardX", "--tensorboard", "tensorboard").SummaryWriter
    folder = run_folder / TENSORBOARD_NAME
    files: list[SummaryWriter] = []

    def begin(step: int) -> None:
        # The suffix, because two files of one second would have one name.
        suffix = f".step-{step}"
        files.append(open_writer(str(folder), purge_step=step + 1, flush_secs=_FLUSH_S, filename_suffix=suffix))

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            files[-1].add_scalar(name, value, step)

    def end() -> None:
        files[-1].close()

    def go_back(step: int) -> None:
        end()
        begin(step)

    try:
        begin(first_step)
    except OSError as error:
        raise ConfigError(f"--tensorboard: {folder} cannot be started: {_one_line(error)}.") from None
    return Tracker("TensorBoard", write, end, go_back)


def start_wandb(
    run_folder: Path, *, project: str, name: str, config: Mapping[str, object], run_id: str | None
) -> Tracker:
    """Begin a wandb run, or continue `run_id`. WANDB_MODE=offline keeps everything in the folder.

    Variables of wandb count for all that is not given here. wandb draws nothing at steps below the newest that it has.

    Raises ConfigError if wandb is not installed, cannot log in or cannot write.
    """
    wandb = import_extra("wandb", "--wandb", "train")
    try:
        run = wandb.init(
            project=project,
            name=name,
            dir=os.environ.get("WANDB_DIR") or str(run_folder),
            config=dict(config),
            id=run_id,
            resume="allow",
            # They would send the command line, paths and the user's address.
            settings={"x_disable_meta": True} | ({} if "WANDB_CONSOLE" in os.environ else {"console": "off"}),
        )
    except (wandb.errors.Error, OSError) as error:
        raise ConfigError(
            f"--wandb: {_one_line(error)} Log in with `wandb login`, or set WANDB_MODE=offline."
        ) from None
    return Tracker("wandb", lambda values, step: run.log(dict(values), step=step), run.finish, run_id=run.id)


def start_trackers(
    config: RunConfig, resolved: ResolvedRun, *, first_step: int, wandb_run_id: str | None
) -> tuple[Tracker, ...]:
    """Start the trackers that a run asks for; they continue an earlier start's curves after `first_step` steps.

    Raises ConfigError.
    """
    started: list[Tracker] = []
    if config.tensorboard:
        started.append(start_tensorboard(config.run, first_step=first_step))
    if config.wandb:
        if "wandb_project" in config.model_fields_set:
            given_project = config.wandb_project
        else:
            given_project = None
        run = start_wandb(
            config.run,
            project=given_project or os.environ.get("WANDB_PROJECT") or config.wandb_project,
            name=config.wandb_name or os.environ.get("WANDB_NAME") or config.run.name,
            config=publish_keys(as_plain(config)) | resolved.as_dict(),
            run_id=wandb_run_id,
        )
        started.append(run)
    return tuple(started)


def _one_line(error: Exception) -> str:
    """Return an exception's message in one line, or its type's name if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
