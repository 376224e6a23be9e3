"""What a run's metrics.jsonl says, with the parts of its history that a restart abandoned left out. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmscale.checkpoint.manifest import History, is_count, parse_history
from llmscale.data.shards.manifest import Manifest, load_manifest
from llmscale.errors import CheckpointError, ConfigError, DataError
from llmscale.training.run_folder import CONFIG_NAME, METRICS_NAME
from llmscale.untrusted.documents import Rules, load_json, load_json_lines


@dataclass
class RunHistory:
    """Losses in nats per token, by optimizer steps done."""

    train: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    tokens_seen: dict[int, int] = field(default_factory=dict)
    tokens_per_second: dict[int, float] = field(default_factory=dict)
    """All ranks, since the record before."""

    @property
    def median_tokens_per_second(self) -> float:
        """Over the logged intervals; the first one warms up and does not count when there are others."""
        rates = list(self.tokens_per_second.values())
        return statistics.median(rates[1:] or rates)

    def cut(self, last_step: int) -> None:
        """Forget what lies beyond a step."""
        for kept in self._by_step():
            while kept and next(reversed(kept)) > last_step:
                kept.popitem()

    def extend(self, other: RunHistory) -> None:
        """Go on with a later part."""
        for kept, more in zip(self._by_step(), other._by_step(), strict=True):
            kept.update(more)

    def _by_step(self) -> tuple[dict[int, Any], ...]:
        return self.train, self.validation, self.tokens_seen, self.tokens_per_second


def load_history(run: Path) -> RunHistory:
    """Read a run folder's metrics. Raises ConfigError when there is none, or no step was logged yet."""
    # One for each history that the run began (checkpoint/history.py); `path` leads to the last.
    by_number: dict[int, RunHistory] = {}
    path = History()
    for record in _records(run):
        step = record["step"]
        if record["kind"] == "event":
            path = parse_history(record["history"], record["branches"], METRICS_NAME)
            by_number.setdefault(path.number, RunHistory()).cut(step)
        history = by_number.setdefault(path.number, RunHistory())
        if record["kind"] == "train":
            # A restart goes back to its checkpoint: what was logged beyond it belongs to no history.
            history.cut(step - 1)
            history.train[step] = _number(record["loss"])
            history.tokens_seen[step] = record["tokens_seen"]
            history.tokens_per_second[step] = record["tokens_per_second"]
        elif record["kind"] == "validation":
            history.validation[step] = _number(record["loss"])
    whole = RunHistory()
    for number, last_step in path.branches:
        whole.extend(by_number.get(number, RunHistory()))
        whole.cut(last_step)
    whole.extend(by_number.get(path.number, RunHistory()))
    if not whole.train:
        raise ConfigError(f"{run / METRICS_NAME} holds no training step yet.")
    return whole


def load_run_manifest(run: Path) -> Manifest | None:
    """The manifest of the set that the run trains on; None when the set is remote, moved or gone."""
    try:
        config = load_json(run / CONFIG_NAME, Rules(ConfigError, not_finite=True)).get("config")
        data = config.get("data") if isinstance(config, dict) else None
        return load_manifest(data) if isinstance(data, str) else None
    except (OSError, ConfigError, DataError):
        return None


def _is_record(record: dict) -> bool:
    """Whether a record that a report shows has what its kind has, each with its type."""
    numbers = {"train": ("tokens_seen", "tokens_per_second"), "validation": ()}.get(str(record.get("kind")))
    if not is_count(record.get("step")):
        return False
    if record.get("kind") == "event":
        return record.get("event") == "start" and _is_history(record)
    if numbers is None:
        return False
    loss = record.get("loss", "")
    return (loss is None or _is_number(loss)) and all(_is_number(record.get(name)) for name in numbers)


def _is_history(record: dict) -> bool:
    try:
        parse_history(record.get("history"), record.get("branches"), "")
    except CheckpointError:
        return False
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _number(value: float | None) -> float:
    """metrics.jsonl says null for NaN and infinity."""
    return math.nan if value is None else value


def _records(run: Path) -> Iterator[dict]:
    """The log's training and validation records, without those that a killed process left half-written."""
    path = run / METRICS_NAME
    try:
        yield from filter(_is_record, load_json_lines(path))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}). Name a run folder: the one that train.py's --run named."
        ) from None
