"""What a run's metrics.jsonl says, with the parts of its history that a restart abandoned left out. No torch."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from llmscale.data.manifest import Manifest, load_manifest
from llmscale.errors import ConfigError, DataError
from llmscale.training.run_folder import CONFIG_NAME

METRICS_NAME = "metrics.jsonl"


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


def load_history(run: Path) -> RunHistory:
    """Read a run folder's metrics. Raises ConfigError when there is none, or no step was logged yet."""
    history = RunHistory()
    by_step = (history.train, history.validation, history.tokens_seen, history.tokens_per_second)
    for record in _records(run):
        if record["kind"] == "train":
            step = record["step"]
            # A restart goes back to its checkpoint: what was logged beyond it belongs to no history.
            for kept in by_step:
                while kept and next(reversed(kept)) >= step:
                    kept.popitem()
            history.train[step] = _number(record["loss"])
            history.tokens_seen[step] = record["tokens_seen"]
            history.tokens_per_second[step] = record["tokens_per_second"]
        elif record["kind"] == "validation":
            history.validation[record["step"]] = _number(record["loss"])
    if not history.train:
        raise ConfigError(f"{run / METRICS_NAME} holds no training step yet.")
    return history


def load_run_manifest(run: Path) -> Manifest | None:
    """The manifest of the set that the run trains on; None when the set is remote, moved or gone."""
    try:
        config = json.loads((run / CONFIG_NAME).read_text())["config"]
        return load_manifest(config["data"])
    except (OSError, ValueError, KeyError, DataError):
        return None


def _number(value: float | None) -> float:
    """metrics.jsonl says null for NaN and infinity."""
    return math.nan if value is None else value


def _records(run: Path) -> Iterator[dict]:
    """The log's records, without those that a killed process left half-written."""
    path = run / METRICS_NAME
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}). Name a run folder: the one that train.py's --run named."
        ) from None
    for line in lines:
        with suppress(ValueError):
            yield json.loads(line)
