"""Everything that a report shows, as plain finite JSON values in columns: one computation behind the HTML page, the
pictures and --json. No torch."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from llmscale import __version__
from llmscale.planning.scaling_laws import Interval
from llmscale.report.against_law import Expectation, expect
from llmscale.report.run_columns import (
    Json,
    build_column,
    build_curves,
    build_estimated_memory,
    build_evaluations,
    build_samples,
    build_time_shares,
    build_validation,
    round_value,
    training_hours,
)
from llmscale.report.run_facts import RunFacts, load_facts
from llmscale.report.run_history import RunHistory, load_history
from llmscale.report.run_marks import find_marks, how_it_ended
from llmscale.report.run_records import as_number
from llmscale.untrusted.terminal import make_visible_line

#: Points of one curve, of all runs' curves of one kind, and the least that a curve has.
MOST_POINTS, MOST_POINTS_OF_ALL, LEAST_POINTS = 20_000, 80_000, 2_000
#: Of a report: beyond, nobody tells curves apart.
MOST_RUNS = 64
_NATS_PER_BIT = math.log(2)


@dataclass(frozen=True)
class _Run:
    name: str
    folder: Path
    history: RunHistory
    facts: RunFacts


def build_report(folders: Sequence[Path]) -> Json:
    """The report of one run or several. Raises ConfigError when one of them has no metrics that can be read."""
    runs = []
    for folder, name in zip(folders, _names(folders), strict=True):
        history = load_history(folder)
        runs.append(_Run(name, folder, history, load_facts(folder, history)))
    most = max(LEAST_POINTS, min(MOST_POINTS, MOST_POINTS_OF_ALL // len(runs)))
    unit, notes = _choose_unit(runs)
    return {
        "llmscale": __version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "unit": unit,
        "notes": [*notes, *(note for run in runs for note in _notes(run, len(runs)))],
        "runs": [_describe(run, most) for run in runs],
        "differences": _differences(runs),
    }


def _choose_unit(runs: Sequence[_Run]) -> tuple[str, list[str]]:
    """`nats` per token, or `bits` per byte where only these compare the runs, and what a reader must know of that."""
    tokenizers = {run.facts.tokenizer for run in runs}
    if len(tokenizers) == 1 and (len(runs) == 1 or None not in tokenizers):
        return "nats", []
    unknown = [run for run in runs if run.facts.bytes_per_token is None]
    why = [f"{run.name}: bits per byte are not known, because {run.facts.why_no_bytes}." for run in unknown]
    if len(unknown) == len(runs):
        said = "Which tokenizers the runs have is not known" if tokenizers == {None} else "The runs' tokenizers differ"
        return "nats", [f"{said}: losses in nats per token compare only runs of the same one.", *why]
    return "bits", ["The runs' tokenizers differ or are not known: losses are drawn in bits per byte.", *why]


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path; all of it where two have the same."""
    short = [make_visible_line(folder.resolve().name) for folder in folders]
    return [
        name if short.count(name) == 1 else make_visible_line(str(folder))
        for name, folder in zip(short, folders, strict=True)
    ]


def _describe(run: _Run, most: int) -> Json:
    history, facts = run.history, run.facts
    shape = facts.shape
    hours = training_hours(history)
    law = _expectation(run)
    return {
        "name": run.name,
        "folder": make_visible_line(str(run.folder)),
        "num_parameters": shape.num_parameters if shape else None,
        "flops_per_token": shape.flops_per_token if shape else None,
        "tokenizer": facts.tokenizer,
        "bytes_per_token": round_value(facts.bytes_per_token),
        "validation_bytes_per_token": round_value(facts.validation_bytes_per_token),
        "why_no_bytes_per_token": facts.why_no_bytes,
        "unigram_entropy": round_value(facts.unigram_entropy),
        "summary": _summary(run, hours, law),
        **build_curves(history, hours, most),
        "time_shares": build_time_shares(history),
        "validation": build_validation(history, most),
        "evaluations": build_evaluations(history),
        "estimated_memory": build_estimated_memory(history),
        "law": _law(law),
        "marks": [dataclasses.asdict(mark) for mark in find_marks(history)],
        "samples": build_samples(history),
        "tables": facts.tables,
    }


def _expectation(run: _Run) -> Expectation | None:
    shape, tokens = run.facts.shape, run.history.steps.values["tokens_seen"]
    if shape is None or not 0 < tokens[0] <= tokens[-1]:
        return None
    return expect(shape.num_parameters, shape.vocab_size, tokens[0], tokens[-1])


def _law(law: Expectation | None) -> Json | None:
    if law is None:
        return None
    return {
        "name": law.law,
        "source": law.source,
        "is_extrapolation": law.is_extrapolation,
        "tokens": build_column(law.tokens),
        "loss": build_column(law.loss),
        "optimal_loss": build_column(law.optimal_loss),
    }


def _summary(run: _Run, hours: Sequence[float], law: Expectation | None) -> Json:
    """One row: numbers in the units of their names."""
    history, columns = run.history, run.history.steps.values
    finite = [loss for loss in columns["loss"] if not math.isnan(loss)]
    validations = [loss for loss in history.validation.values() if not math.isnan(loss)]
    mfu = [value for value in columns["mfu"] if not math.isnan(value)]
    peaks = [value for value in columns["peak_memory_bytes"] if not math.isnan(value)]
    final = law.final if law else math.nan
    interval = final if isinstance(final, Interval) else None
    return {
        "steps": history.steps.steps[-1],
        "total_steps": run.facts.total_steps,
        "tokens": int(columns["tokens_seen"][-1]),
        "hours": round_value(hours[-1]),
        "loss": round_value(finite[-1] if finite else None),
        "validation_loss": round_value(validations[-1] if validations else None),
        "best_validation_loss": round_value(min(validations, default=None)),
        "bits_per_byte": _bits(validations[-1:], run.facts.validation_bytes_per_token),
        "tokens_per_second": round_value(history.median_tokens_per_second),
        "mfu": round_value(statistics.median(mfu) if mfu else None),
        "peak_memory_bytes": int(max(peaks)) if peaks else None,
        "starts": len(history.of_kind("event", "start")),
        "abandoned_records": history.num_abandoned,
        "ended": how_it_ended(history),
        "expected_loss": round_value(interval.value if interval else as_number(final)),
        "expected_loss_low": round_value(interval.low if interval else None),
        "expected_loss_high": round_value(interval.high if interval else None),
        "optimal_parameters": round_value(law.optimal_parameters if law else None),
        "optimal_tokens": round_value(law.optimal_tokens if law else None),
    }


def _bits(losses: Sequence[float], bytes_per_token: float | None) -> float | None:
    return round_value(losses[0] / _NATS_PER_BIT / bytes_per_token) if losses and bytes_per_token else None


def _notes(run: _Run, num_runs: int) -> Iterable[str]:
    return (f"{run.name}: {note}" if num_runs > 1 else note for note in run.history.notes())


def _differences(runs: Sequence[_Run]) -> list[Json]:
    """Settings in which the runs differ, `values` in the order of the runs; null where a run does not have one."""
    found: list[Json] = []
    sections = dict.fromkeys(section for run in runs for section in run.facts.tables)
    for section in sections:
        tables = [run.facts.tables.get(section, {}) for run in runs]
        for key in dict.fromkeys(key for table in tables for key in table):
            values = [table.get(key) for table in tables]
            if len(set(values)) > 1:
                found.append({"section": section, "key": key, "values": values})
    return found
