"""One record of metrics.jsonl: whether it is one, and its numbers. Whatever the file holds is not trusted. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from llmscale.checkpoint.manifest import is_count, parse_history
from llmscale.config.limits import MAX_STEPS, MAX_TOKENS
from llmscale.errors import CheckpointError, ConfigError
from llmscale.training.run_folder import METRICS_VERSION

Record = Mapping[str, object]
#: Of the records that a report shows.
KINDS = ("event", "train", "validation", "evaluation", "sample")
_LARGEST = 3.5e38


def as_number(value: object) -> float:
    """A number of a record; NaN for what is none, or beyond what fp32 holds. metrics.jsonl says null for NaN and
    infinity."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    number = float(value) if is_number else math.nan  # type: ignore[arg-type]  # it is one
    return number if abs(number) <= _LARGEST else math.nan


def is_record(record: Record) -> bool:
    """Whether a record that a report shows has what its kind has, each with its type."""
    kind, step = record.get("kind"), record.get("step")
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
    """What is a loss or a rate: NaN and infinity too, and null, which stands for them."""
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and not value < 0)


def _is_history(record: Record) -> bool:
    try:
        parse_history(record.get("history"), record.get("branches"), "")
    except CheckpointError:
        return False
    return True


def check_version(path: Path, record: Record) -> None:
    """Refuse what a newer version wrote: its records may mean something else. Raises ConfigError that names `path`."""
    version = record.get("metrics_version")
    if record.get("event") == "start" and is_count(version) and version > METRICS_VERSION:
        raise ConfigError(
            f"{path} was written by a newer llmscale (metrics version {version}; this one reads up to "
            f"{METRICS_VERSION}). Read it with a newer llmscale."
        )
