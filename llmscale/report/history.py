"""Read a run's metrics.jsonl, without the parts of its history that a restart discarded. No torch."""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmscale.checkpoint.manifest import History, is_count, parse_history
from llmscale.data.shards.manifest import Manifest, load_manifest
from llmscale.errors import CheckpointError, ConfigError, DataError
from llmscale.limits import MAX_STEPS, MAX_TOKENS
from llmscale.training.run_folder import CONFIG_NAME, METRICS_NAME, METRICS_VERSION
from llmscale.training.step_metrics import METRICS
from llmscale.untrusted.documents import BadLine, Rules, load_json, load_json_lines

Record = Mapping[str, object]
#: Kinds of the records that a report shows.
KINDS = ("event", "train", "validation", "evaluation", "sample")
_LARGEST = 3.5e38
#: Fields of a training record that a report reads.
COLUMNS = (*(name for name, declared in METRICS.items() if declared.is_column), "time")
#: Prefix of the columns of the loss on each dataset of a mixture.
OF_SET = "loss of "
#: Limit of datasets of a mixture that have a column: a file may name any number.
MAX_SETS = 32
#: Uses of a run's wall time, with the words of a report. docs/watching.md defines each.
WALL_TIME = {
    "steps": "steps that count",
    "redone": "redone steps",
    "starts": "starts and downtime",
    "saves": "saves",
    "waiting": "waiting for data",
    "validation": "validation",
    "other": "other",
}
_PAUSES = {"saving": "saves", "evaluating": "validation", "starting": "starts"}
#: Phases of a step, seconds per step.
_PHASES = ("data_wait_s", "forward_backward_s", "optimizer_step_s", "other_s")
#: Latest time of a record and longest start-up that are believed, seconds.
_LATEST_S = 1e11
_LONGEST_START_S = 1e7


def as_number(value: object) -> float:
    """Return a number of a record; NaN for anything else, and beyond fp32's range.

    metrics.jsonl has null for NaN and infinity.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    number = float(value) if is_number else math.nan  # type: ignore[arg-type]  # it is one
    return number if abs(number) <= _LARGEST else math.nan


def is_record(record: Record) -> bool:
    """Return whether a record has the fields of its kind, each with its type."""
    kind = record.get("kind")
    step = record.get("step")
    if step is not None and not (is_count(step) and step <= MAX_STEPS):
        return False
    if kind == "event":
        is_start = record.get("event") == "start"
        return isinstance(record.get("event"), str) and (not is_start or (step is not None and _is_history(record)))
    if step is None or kind not in KINDS:
        return False
    if kind in ("train", "validation") and not _is_measured(record.get("loss", "")):
        return False
    has_tokens = 0 <= as_number(record.get("tokens_seen")) <= MAX_TOKENS
    return kind != "train" or (has_tokens and _is_measured(record.get("tokens_per_second")))


def _is_measured(value: object) -> bool:
    """Return whether a value is a loss or a rate; null represents NaN and infinity."""
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and not value < 0)


def _is_history(record: Record) -> bool:
    try:
        parse_history(record.get("history"), record.get("branches"), "")
    except CheckpointError:
        return False
    return True


def check_version(path: Path, record: Record) -> None:
    """Refuse records of a newer version, which may mean something else. Raises ConfigError, which names `path`."""
    version = record.get("metrics_version")
    if record.get("event") == "start" and is_count(version) and version > METRICS_VERSION:
        raise ConfigError(
            f"{path} was written by a newer llmscale (metrics version {version}; this one reads up to "
            f"{METRICS_VERSION}). Read it with a newer llmscale."
        )


@dataclass
class StepColumns:
    """Training records as columns of equal length, ascending by step; NaN where a record has no number."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})

    def append(self, step: int, record: Record) -> None:
        """Add a record of a later step than the last."""
        by_set = record.get("loss_by_set")
        if isinstance(by_set, dict):
            losses = {f"{OF_SET}{name}": value for name, value in by_set.items()}
        else:
            losses = {}
        for name in losses:
            if name not in self.values and len(self.values) < len(COLUMNS) + MAX_SETS:
                self.values[name] = _unknown(len(self.steps))
        self.steps.append(step)
        for name, column in self.values.items():
            if name in METRICS or name == "time":
                value = record.get(name)
            else:
                value = losses.get(name)
            # The usual case first: a log has millions of numbers.
            if value is None:
                column.append(math.nan)
            elif type(value) is float and -_LARGEST <= value <= _LARGEST:
                column.append(value)
            else:
                column.append(as_number(value))

    def cut(self, last_step: int) -> None:
        """Forget what lies beyond a step."""
        if self.steps and self.steps[-1] > last_step:
            end = bisect_right(self.steps, last_step)
            del self.steps[end:]
            for column in self.values.values():
                del column[end:]

    def extend(self, other: StepColumns) -> None:
        """Append later steps of another part."""
        if self.steps:
            first = bisect_right(other.steps, self.steps[-1])
        else:
            first = 0
        for name in other.values:
            self.values.setdefault(name, _unknown(len(self.steps)))
        self.steps.extend(other.steps[first:])
        for name, column in self.values.items():
            column.extend(other.values[name][first:] if name in other.values else _unknown(len(other.steps) - first))


@dataclass
class WallClock:
    """Wall time by its use, from all records in the order of the file, those of discarded steps included.

    Records without a valid time are ignored, and a clock that goes back adds nothing.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WALL_TIME, 0.0))
    _last_s: float = math.nan
    """Time up to which `seconds` are complete; NaN before the first."""
    _evaluated_s: float = 0.0
    _step: int = 0
    _first_step_s: float | None = None
    """Duration of a start's first step, until the second logged interval; None after it."""
    _is_starting: bool = False

    def add(self, step: int, record: Record) -> None:
        """Add the time since the last training step, start or end."""
        now = as_number(record.get("time"))
        kind = record["kind"]
        event = record.get("event")
        if not 0 < now <= _LATEST_S:
            return
        if kind in ("validation", "evaluation", "sample"):
            self._evaluated_s = now
        elif kind == "train" or event in ("start", "finished", "stopped"):
            # 0.0 comes first: max() keeps it if the other is NaN.
            elapsed_s = max(0.0, now - self._last_s)
            if kind == "train":
                self._add_steps(step, record, elapsed_s)
            elif event == "start":
                if math.isnan(self._last_s):
                    startup_s = as_number(record.get("startup_s"))
                else:
                    startup_s = math.nan
                self.seconds["starts"] += startup_s if 0 < startup_s <= _LONGEST_START_S else elapsed_s
                self._is_starting = True
                self._first_step_s = None
            else:
                validation_s = min(elapsed_s, max(0.0, self._evaluated_s - self._last_s))
                self.seconds["validation"] += validation_s
                # At its end a run waits until its last checkpoint is on disk.
                self.seconds["saves"] += elapsed_s - validation_s
            self._last_s = now
            self._step = step

    def _add_steps(self, step: int, record: Record, elapsed_s: float) -> None:
        step_s = _step_seconds([as_number(record.get(name)) for name in _PHASES])
        steps_s = min(elapsed_s, step_s * max(0, step - self._step))
        self.seconds["steps"] += steps_s
        # A start's first step also compiles and warms up: it counts no longer than the next ones.
        if self._first_step_s is not None:
            excess_s = max(0.0, self._first_step_s - step_s)
            self.seconds["steps"] -= excess_s
            self.seconds["starts"] += excess_s
        self._first_step_s = steps_s if self._is_starting else None
        left_s = elapsed_s - steps_s
        paused = record.get("paused_s")
        for name, value in paused.items() if isinstance(paused, dict) else ():
            if (seconds := as_number(value)) > 0:
                pause_s = min(left_s, seconds)
                self.seconds[_PAUSES.get(name, "other")] += pause_s
                left_s -= pause_s
        self.seconds["starts" if self._is_starting else "other"] += left_s
        self._is_starting = False


def _step_seconds(phases: Iterable[float]) -> float:
    return sum(seconds for seconds in phases if seconds > 0)


@dataclass
class RunHistory:
    """Records by optimizer steps done. Losses are in nats per token."""

    steps: StepColumns = field(default_factory=StepColumns)
    others: list[tuple[int, Record]] = field(default_factory=list)
    """Records of every other kind with their steps, ascending."""
    num_bad_lines: int = 0
    """Lines that are not JSON objects, except for an incomplete last line."""
    is_torn: bool = False
    """True if the last line is incomplete."""
    num_bad_records: int = 0
    """Records of a known kind with a missing field or one of another type."""
    num_abandoned: int = 0
    """Training records of steps that a restart discarded."""
    wall: WallClock = field(default_factory=WallClock)

    def notes(self) -> Iterator[str]:
        """Yield notes on records that are missing or left out."""
        if self.num_bad_lines:
            lines = "lines are" if self.num_bad_lines > 1 else "line is"
            yield f"{self.num_bad_lines:,} {lines} not readable and left out"
        if self.num_bad_records:
            do, are = ("records do", "are") if self.num_bad_records > 1 else ("record does", "is")
            yield f"{self.num_bad_records:,} {do} not hold what llmscale writes there and {are} left out"
        if self.is_torn:
            yield "the last line is half-written and left out"
        if self.num_abandoned:
            steps = "records of steps" if self.num_abandoned > 1 else "record of a step"
            yield f"{self.num_abandoned:,} {steps} that a restart went back from, not drawn"

    @property
    def train(self) -> dict[int, float]:
        """The loss by step; NaN where it was NaN or infinite."""
        return self._column("loss")

    @property
    def tokens_seen(self) -> dict[int, int]:
        """Tokens trained on since step 0."""
        return {step: int(value) for step, value in self._column("tokens_seen").items()}

    @property
    def tokens_per_second(self) -> dict[int, float]:
        """Rate of all ranks since the previous record."""
        return self._column("tokens_per_second")

    @property
    def validation(self) -> dict[int, float]:
        """The loss by step."""
        return {step: as_number(record.get("loss")) for step, record in self.of_kind("validation")}

    @property
    def median_tokens_per_second(self) -> float:
        """Median over logging intervals, without the first (warm-up) if there are others; NaN if none is known."""
        rates = [rate for rate in self.tokens_per_second.values() if not math.isnan(rate)]
        return statistics.median(rates[1:] or rates or [math.nan])

    def wall_shares(self) -> dict[str, float]:
        """Return the shares of the wall time since the first start by WALL_TIME; empty if the records have no times."""
        seconds = dict(self.wall.seconds)
        total_s = sum(seconds.values())
        if total_s <= 0:
            return {}
        counted_s, waiting_s = self._counted_seconds()
        # Steps after the last record before a crash, if a checkpoint kept them, are within the time to the next start.
        counted_s = min(counted_s, seconds["steps"] + seconds["starts"])
        seconds["redone"] = max(0.0, seconds["steps"] - counted_s)
        seconds["starts"] = max(0.0, seconds["starts"] - max(0.0, counted_s - seconds["steps"]))
        seconds["waiting"] = min(waiting_s, counted_s)
        seconds["steps"] = counted_s - seconds["waiting"]
        return {use: spent_s / total_s for use, spent_s in seconds.items()}

    def _counted_seconds(self) -> tuple[float, float]:
        """Return the seconds of the steps of this history, each once, and the part that waited for data."""
        starts = [step for step, _ in self.of_kind("event", "start")]
        steps = self.steps.steps
        values = self.steps.values
        firsts = {step + 1 for step in starts}
        each_s = [_step_seconds(phases) for phases in zip(*(values[name] for name in _PHASES), strict=True)]
        counted_s = 0.0
        waiting_s = 0.0
        before = min([*starts, *steps[:1]], default=0)
        for index, step in enumerate(steps):
            if not math.isnan(values["time"][index]):
                if step in firsts:
                    step_s = min(each_s[index : index + 2])
                else:
                    step_s = each_s[index]
                counted_s += (step - before) * step_s
                wait_s = values["data_wait_s"][index]
                waiting_s += (step - before) * min(step_s, wait_s if wait_s > 0 else 0.0)
            before = step
        return counted_s, waiting_s

    def of_kind(self, kind: str, event: str | None = None) -> list[tuple[int, Record]]:
        """Return records of a kind, or events of a name, with their steps."""
        return [
            (step, record)
            for step, record in self.others
            if record.get("kind") == kind and (event is None or record.get("event") == event)
        ]

    def add(self, step: int, record: Record) -> None:
        """Add a record."""
        if record["kind"] == "train":
            # A restart returns to its checkpoint: later records belong to no history.
            self.cut(step - 1)
            self.steps.append(step, record)
        else:
            # Inserted in order: an event may concern an earlier step than the one that reported it.
            self.others.insert(bisect_right(self.others, step, key=_step_of), (step, record))

    def cut(self, last_step: int) -> None:
        """Forget what lies beyond a step."""
        self.steps.cut(last_step)
        del self.others[bisect_right(self.others, last_step, key=_step_of) :]

    def extend(self, other: RunHistory) -> None:
        """Append a later part."""
        self.steps.extend(other.steps)
        if self.others:
            first = bisect_left(other.others, self.others[-1][0], key=_step_of)
        else:
            first = 0
        self.others += other.others[first:]

    def _column(self, name: str) -> dict[int, float]:
        return dict(zip(self.steps.steps, self.steps.values[name], strict=True))


def load_history(run: Path) -> RunHistory:
    """Read a run folder's metrics.

    Raises ConfigError when they are missing, no step was logged yet, or a newer llmscale wrote them.
    """
    # One for each history that the run began (checkpoint/history.py); `path` leads to the last.
    by_number: defaultdict[int, RunHistory] = defaultdict(RunHistory)
    history = RunHistory()
    path = History()
    last_step = 0
    num_train = 0
    for record in _read(run, history):
        step = _step(record, last_step)
        if record["kind"] == "train" or record.get("event") == "start":
            last_step = step
        if record.get("event") == "start":
            path = parse_history(record["history"], record["branches"], METRICS_NAME)
            by_number[path.number].cut(step)
        by_number[path.number].add(step, record)
        history.wall.add(step, record)
        num_train += record["kind"] == "train"
    for number, left_at in path.branches:
        # Each branch once: a file may repeat them.
        history.extend(by_number.pop(number, RunHistory()))
        history.cut(left_at)
    history.extend(by_number.pop(path.number, RunHistory()))
    if not history.steps.steps:
        raise ConfigError(f"{run / METRICS_NAME} holds no training step yet.")
    history.num_abandoned = num_train - len(history.steps.steps)
    return history


def load_run_manifest(run: Path) -> Manifest | None:
    """Return the manifest of the run's dataset; None for a mixture, or where nothing describes the dataset."""
    from llmscale.data.mixture import open_kept_sets  # here alone: it takes long to import

    try:
        described = load_json(run / CONFIG_NAME, Rules(ConfigError, not_finite=True))
        config, resolved = described.get("config"), described.get("resolved")
        if isinstance(resolved, dict):
            sets = open_kept_sets(run, str(resolved.get("dataset")), "")
        else:
            sets = None
        if sets is not None:
            return None if sets.recipe else sets.manifest
        if isinstance(config, dict):
            data = config.get("data")
        else:
            data = None
        if isinstance(data, str):
            return load_manifest(data)
        return None
    except (OSError, ConfigError, DataError):
        return None


def _unknown(count: int) -> array[float]:
    return array("d", [math.nan]) * count


def _step_of(entry: tuple[int, Record]) -> int:
    return entry[0]


def _step(record: Record, last_step: int) -> int:
    """Return a record's step, or the last trained step."""
    step = record.get("step")
    return step if is_count(step) else last_step


def _read(run: Path, history: RunHistory) -> Iterator[Record]:
    """Yield the records that a report shows; count the others in `history`."""
    path = run / METRICS_NAME

    def note(line: BadLine) -> None:
        history.is_torn |= line.is_torn
        history.num_bad_lines += not line.is_torn

    try:
        for record in load_json_lines(path, note):
            # First, because a newer version's records may be invalid by this one's rules.
            check_version(path, record)
            if is_record(record):
                yield record
            elif record.get("kind") in KINDS:
                history.num_bad_records += 1
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}). Name a run folder: the one that train.py's --run named."
        ) from None
