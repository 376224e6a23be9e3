"""Everything that a report shows, as plain finite JSON values in columns: one computation behind the HTML page, the
pictures and --json. No torch."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from llmscale import __version__
from llmscale.planning.scaling_laws import Interval
from llmscale.report.against_law import Expectation, expect
from llmscale.report.run_facts import RunFacts, load_facts, show
from llmscale.report.run_history import OF_SET, RunHistory, as_number, load_history
from llmscale.report.run_marks import find_marks, how_it_ended
from llmscale.report.thin_curve import spread, thin
from llmscale.untrusted.terminal import make_visible, make_visible_line

#: Points of one curve, of all runs' curves of one kind, and the least that a curve has.
MOST_POINTS, MOST_POINTS_OF_ALL, LEAST_POINTS = 20_000, 80_000, 2_000
#: Over which shares of time are summed.
MOST_STRETCHES = 100
#: Of one run: a file may hold any number.
MOST_SAMPLES, MOST_SAMPLE_LETTERS, MOST_EVALUATIONS = 200, 4_000, 64
#: Of a report: beyond, nobody tells curves apart.
MOST_RUNS = 64
_NATS_PER_BIT = math.log(2)
Json = dict[str, object]


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
        "bytes_per_token": _rounded(facts.bytes_per_token),
        "validation_bytes_per_token": _rounded(facts.validation_bytes_per_token),
        "why_no_bytes_per_token": facts.why_no_bytes,
        "unigram_entropy": _rounded(facts.unigram_entropy),
        "summary": _summary(run, hours, law),
        **_curves(history, hours, most),
        "time_shares": _time_shares(history),
        "validation": _validation(history, most),
        "evaluations": _evaluations(history),
        "estimated_memory": _estimated_memory(history),
        "law": _law(law),
        "marks": [dataclasses.asdict(mark) for mark in find_marks(history)],
        "samples": _samples(history),
        "tables": facts.tables,
    }


def training_hours(history: RunHistory) -> list[float]:
    """Hours of training steps until each record: validation, sampling, checkpoints and starts are not in it, nor what a
    restart went back from."""
    steps = history.steps
    tokens = np.asarray(steps.values["tokens_seen"])
    # Of a run that began from another's checkpoint, only what it trained itself.
    first_step = next((step for step, _ in history.of_kind("event", "start")), 0)
    own = tokens[:1] * (1 - min(first_step, steps.steps[0]) / max(1, steps.steps[0]))
    rates = np.asarray(steps.values["tokens_per_second"])
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.concatenate([own, np.maximum(0, np.diff(tokens))]) / rates
    seconds[~np.isfinite(seconds)] = 0
    total: list[float] = np.cumsum(seconds / 3600).tolist()
    return total


def _curves(history: RunHistory, hours: Sequence[float], most: int) -> Json:
    """`axis`: step, tokens and hours, between which a page interpolates; `curves`: columns of the training records.

    A curve without `steps` has those of the axis.
    """
    steps, columns = history.steps.steps, history.steps.values
    kept = spread(len(steps), most)
    axis: Json = {
        "steps": [steps[index] for index in kept],
        "tokens": _column(columns["tokens_seen"][index] for index in kept),
        "hours": _column(hours[index] for index in kept),
    }
    curves: Json = {}
    for name, values in columns.items():
        if name == "tokens_seen" or all(map(math.isnan, values)):
            continue
        chosen = thin(values, most)
        curve: Json = {"values": _column(values[index] for index in chosen)}
        if len(steps) > most:
            curve["steps"] = [steps[index] for index in chosen]
        curves[make_visible_line(name[:80]) if name.startswith(OF_SET) else name] = curve
    return {"axis": axis, "curves": curves}


def _time_shares(history: RunHistory) -> Json:
    """What part of a step each phase took, over equal stretches of records; `steps` are their last ones."""
    columns = history.steps.values
    phases = ("data_wait_s", "forward_backward_s", "optimizer_step_s", "other_s")
    seconds = np.nan_to_num(np.array([columns[name] for name in phases]))
    ends = spread(len(history.steps.steps) + 1, MOST_STRETCHES + 1)
    sums = np.add.reduceat(seconds, ends[:-1], axis=1)
    with np.errstate(invalid="ignore"):
        shares = sums / sums.sum(0)
    if np.isnan(shares).all():
        return {}
    columns_of = {name.removesuffix("_s"): _column(share) for name, share in zip(phases, shares, strict=True)}
    return {"steps": [history.steps.steps[end - 1] for end in ends[1:]], **columns_of}


def _validation(history: RunHistory, most: int) -> Json:
    records = history.of_kind("validation")
    records = [records[index] for index in thin([as_number(record.get("loss")) for _, record in records], most)]
    names = list(dict.fromkeys(name for _, record in records for name in _by_set(record)))[:32]
    columns: Json = {
        "steps": [step for step, _ in records],
        "loss": _column(as_number(record.get("loss")) for _, record in records),
    }
    bits = [as_number(record.get("bits_per_byte")) for _, record in records]
    if not all(map(math.isnan, bits)):
        columns["bits_per_byte"] = _column(bits)
    columns["by_set"] = {
        show(name): _column(as_number(_by_set(record).get(name)) for _, record in records) for name in names
    }
    return columns


def _by_set(record: Mapping[str, object]) -> Mapping[str, object]:
    losses = record.get("loss_by_set")
    return losses if isinstance(losses, dict) else {}


def _evaluations(history: RunHistory) -> list[Json]:
    """One column per task and value."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for step, record in history.of_kind("evaluation"):
        task, values = record.get("task"), record.get("values")
        if not isinstance(task, str) or not isinstance(values, dict):
            continue
        for name, value in values.items():
            key = (show(task), show(name))
            if not math.isnan(as_number(value)) and (key in found or len(found) < MOST_EVALUATIONS):
                found.setdefault(key, []).append((step, as_number(value)))
    return [
        {"task": task, "value": name, "steps": [step for step, _ in points], "values": _column(v for _, v in points)}
        for (task, name), points in found.items()
    ]


def _estimated_memory(history: RunHistory) -> list[Json]:
    """Of each start that has an estimate, bytes of one rank's GPU memory; `device` says what was measured instead."""
    starts = history.of_kind("event", "start")
    return [
        {"step": step, "bytes": as_number(record["estimated_bytes"]), "device": show(record.get("device"))}
        for step, record in starts
        if as_number(record.get("estimated_bytes")) > 0
    ]


def _samples(history: RunHistory) -> list[Json]:
    """Text that the model wrote, of evenly spread steps where there is too much."""
    records = [(step, record) for step, record in history.of_kind("sample") if isinstance(record.get("text"), str)]
    samples = []
    for index in spread(len(records), MOST_SAMPLES):
        step, record = records[index]
        texts = {
            key: make_visible(value[:MOST_SAMPLE_LETTERS]) if isinstance(value := record.get(key), str) else ""
            for key in ("prompt", "text")
        }
        samples.append({"step": step, **texts})
    return samples


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
        "tokens": _column(law.tokens),
        "loss": _column(law.loss),
        "optimal_loss": _column(law.optimal_loss),
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
        "hours": _rounded(hours[-1]),
        "loss": _rounded(finite[-1] if finite else None),
        "validation_loss": _rounded(validations[-1] if validations else None),
        "best_validation_loss": _rounded(min(validations, default=None)),
        "bits_per_byte": _bits(validations[-1:], run.facts.validation_bytes_per_token),
        "tokens_per_second": _rounded(history.median_tokens_per_second),
        "mfu": _rounded(statistics.median(mfu) if mfu else None),
        "peak_memory_bytes": int(max(peaks)) if peaks else None,
        "starts": len(history.of_kind("event", "start")),
        "abandoned_records": history.num_abandoned,
        "ended": how_it_ended(history),
        "expected_loss": _rounded(interval.value if interval else as_number(final)),
        "expected_loss_low": _rounded(interval.low if interval else None),
        "expected_loss_high": _rounded(interval.high if interval else None),
        "optimal_parameters": _rounded(law.optimal_parameters if law else None),
        "optimal_tokens": _rounded(law.optimal_tokens if law else None),
    }


def _bits(losses: Sequence[float], bytes_per_token: float | None) -> float | None:
    return _rounded(losses[0] / _NATS_PER_BIT / bytes_per_token) if losses and bytes_per_token else None


def _notes(run: _Run, num_runs: int) -> Iterable[str]:
    """What the metrics did not say, or are not drawn from."""
    history, name = run.history, f"{run.name}: " if num_runs > 1 else ""
    if history.num_bad_lines:
        lines = "lines are" if history.num_bad_lines > 1 else "line is"
        yield f"{name}{history.num_bad_lines:,} {lines} not readable and left out"
    if history.is_torn:
        yield f"{name}the last line is half-written and left out"
    if history.num_abandoned:
        steps = "records of steps" if history.num_abandoned > 1 else "record of a step"
        yield f"{name}{history.num_abandoned:,} {steps} that a restart went back from, not drawn"


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


def _column(values: Iterable[float]) -> list[float | int | None]:
    """Six digits, more than a picture shows; null for what is no number."""
    return [_rounded(value) for value in values]


def _rounded(value: float | None) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    rounded = value if value == int(value) else float(f"{value:.6g}")
    return int(rounded) if abs(rounded) < 1e15 and rounded == int(rounded) else rounded
