"""Build a report as finite JSON in columns, for the page, pictures and --json, with the events of runs. No torch."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

from llmscale import __version__
from llmscale.errors import ConfigError
from llmscale.planning.scaling import BESIROGLU
from llmscale.report.charts import (
    Expectation,
    Json,
    ReportedRun,
    build_axis,
    build_charts,
    build_column,
    expect,
    round_value,
    spread,
    training_hours,
)
from llmscale.report.history import Record, RunHistory, as_number, load_history
from llmscale.report.run_facts import RunFacts, load_facts, show
from llmscale.report.run_list import ListedRun
from llmscale.untrusted.terminal import make_visible, make_visible_line

#: Limits per run: a file may have any number.
MOST_SAMPLES = 200
MOST_SAMPLE_LETTERS = 4_000
MOST_EXPERTS = 512
MOST_BLOCKS = 128
#: Most points of a curve, most of all runs' curves of a kind, and the least that a curve keeps.
MOST_POINTS = 20_000
MOST_POINTS_OF_ALL = 80_000
LEAST_POINTS = 2_000
_NATS_PER_BIT = math.log(2)
MarkKind = Literal["start", "end", "spike", "nonfinite", "slow", "router"]
#: Limit of marks of a kind per run: a file may have any number.
MOST_MARKS = 500
#: Facts of a start that its mark shows, with their labels.
_SAID = {
    "world_size": "ranks",
    "zero_stage": "ZeRO stage",
    "precision": "precision",
    "micro_batch_size": "micro-batch",
    "device": "device",
}
_SPIKE = {"loss_z": "z-score of the loss", "grad_norm": "gradient norm", "grad_norm_z": "its z-score"}


def build_report(folders: Sequence[Path], listed: Sequence[ListedRun] = ()) -> Json:
    """Build the report of one or more runs. Raises ConfigError for a run without readable metrics.

    `listed` are the runs of a folder: all are in a table, and those of them without readable metrics in no chart.
    """
    runs = []
    optional = {run.path for run in listed}
    for folder, name in zip(folders, _names(folders), strict=True):
        try:
            history = load_history(folder)
        except ConfigError:
            if folder in optional:
                continue
            raise
        facts = load_facts(folder, history)
        runs.append(ReportedRun(name, folder, history, facts, _expectation(history, facts)))
    if not runs:
        raise ConfigError(f"{len(folders)} runs have no training step yet. `llmscale runs` lists them.")
    drawn = {run.folder: run for run in runs}
    most = max(LEAST_POINTS, min(MOST_POINTS, MOST_POINTS_OF_ALL // len(runs)))
    unit, notes = _choose_unit(runs)
    for run in runs:
        notes += [f"{run.name}: {note}" if len(runs) > 1 else note for note in run.history.notes()]
    return {
        "llmscale": __version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "unit": unit,
        "notes": notes,
        "charts": build_charts(runs, most),
        "runs": [{"index": index, **_describe(run, most)} for index, run in enumerate(runs)],
        "listed": [
            _listed(run, name, drawn) for run, name in zip(listed, _names([run.path for run in listed]), strict=True)
        ],
        "differences": _differences(runs),
    }


def _listed(run: ListedRun, name: str, drawn: Mapping[Path, ReportedRun]) -> Json:
    """Return a run's row in the table of all runs of a folder, without control characters."""
    validations = drawn[run.path].history.validation.values() if run.path in drawn else ()
    row = run.publish() | {
        "run": name,
        "validation_loss": round_value(min((loss for loss in validations if not math.isnan(loss)), default=None)),
        "why": "; ".join(filter(None, (run.error, run.problem))),
    }
    return {key: show(value) if isinstance(value, str) else value for key, value in row.items()}


def _choose_unit(runs: Sequence[ReportedRun]) -> tuple[str, list[str]]:
    """Choose `nats` per token, or `bits` per byte where only these compare; return it with notes for the reader."""
    tokenizers = {run.facts.tokenizer for run in runs}
    if len(tokenizers) == 1 and (len(runs) == 1 or None not in tokenizers):
        return "nats", []
    unknown = [run for run in runs if run.facts.bytes_per_token is None]
    why = [f"{run.name}: bits per byte are not known, because {run.facts.why_no_bytes}." for run in unknown]
    if len(unknown) == len(runs):
        if tokenizers == {None}:
            reason = "Which tokenizers the runs have is not known"
        else:
            reason = "The runs' tokenizers differ"
        return "nats", [f"{reason}: losses in nats per token compare only runs of the same one.", *why]
    return "bits", ["The runs' tokenizers differ or are not known: losses are drawn in bits per byte.", *why]


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or where two have the same the path below the folder of all."""
    paths = [folder.resolve() for folder in folders]
    short = [path.name for path in paths]
    if paths:
        above = os.path.commonpath([path.parent for path in paths])
    else:
        above = ""
    return [
        make_visible_line(path.name if short.count(path.name) == 1 else os.path.relpath(path, above)) for path in paths
    ]


def _describe(run: ReportedRun, most: int) -> Json:
    history = run.history
    facts = run.facts
    shape = facts.shape
    hours = training_hours(history)
    return {
        "name": run.name,
        "folder": show(run.folder.resolve().name),
        "num_parameters": shape.num_parameters if shape else None,
        "flops_per_token": shape.flops_per_token if shape else None,
        "tokenizer": facts.tokenizer,
        "bytes_per_token": round_value(facts.bytes_per_token),
        "validation_bytes_per_token": round_value(facts.validation_bytes_per_token),
        "why_no_bytes_per_token": facts.why_no_bytes,
        "unigram_entropy": round_value(facts.unigram_entropy),
        "summary": _summary(run, hours),
        "axis": build_axis(history, hours, most),
        "wall_time": {use: round_value(share) for use, share in history.wall_shares().items()},
        "expert_load": build_expert_load(history),
        "law": _law(run.law),
        "marks": [asdict(mark) for mark in find_marks(history)],
        "samples": build_samples(history),
        "tables": facts.tables,
    }


def _expectation(history: RunHistory, facts: RunFacts) -> Expectation | None:
    shape = facts.shape
    tokens = history.steps.values["tokens_seen"]
    # The laws are of dense models.
    if shape is None or shape.num_experts or not 0 < tokens[0] <= tokens[-1]:
        return None
    return expect(shape.num_parameters, shape.vocab_size, tokens[0], tokens[-1])


def _law(law: Expectation | None) -> Json | None:
    if law is None:
        return None
    source = {"name": BESIROGLU.name, "source": BESIROGLU.source}
    return {**source, "is_extrapolation": law.is_extrapolation, "applies": bool(law.tokens)}


def _summary(run: ReportedRun, hours: Sequence[float]) -> Json:
    """Return a run's row of the summary, in the units that the names say."""
    history = run.history
    columns = run.history.steps.values
    law = run.law
    ratio = run.facts.validation_bytes_per_token
    finite = [loss for loss in columns["loss"] if not math.isnan(loss)]
    validations = [loss for loss in history.validation.values() if not math.isnan(loss)]
    mfu = [value for value in columns["mfu"] if not math.isnan(value)]
    peaks = [value for value in columns["peak_memory_bytes"] if not math.isnan(value)]
    return {
        "steps": history.steps.steps[-1],
        "total_steps": run.facts.total_steps,
        "tokens": int(columns["tokens_seen"][-1]),
        "hours": round_value(hours[-1]),
        "loss": round_value(finite[-1] if finite else None),
        "validation_loss": round_value(validations[-1] if validations else None),
        "best_validation_loss": round_value(min(validations, default=None)),
        "bits_per_byte": round_value(validations[-1] / _NATS_PER_BIT / ratio if validations and ratio else None),
        "tokens_per_second": round_value(history.median_tokens_per_second),
        "mfu": round_value(statistics.median(mfu) if mfu else None),
        "peak_memory_bytes": int(max(peaks)) if peaks else None,
        "goodput": round_value(history.wall_shares().get("steps")),
        "starts": len(history.of_kind("event", "start")),
        "abandoned_records": history.num_abandoned,
        "ended": how_it_ended(history),
        "expected_loss": round_value(law.final.value if law else None),
        "expected_loss_low": round_value(law.final.low if law else None),
        "expected_loss_high": round_value(law.final.high if law else None),
        "optimal_parameters": round_value(law.optimal_parameters if law else None),
        "optimal_tokens": round_value(law.optimal_tokens if law else None),
    }


def _differences(runs: Sequence[ReportedRun]) -> list[Json]:
    """Return settings in which the runs differ; `values` are in the order of the runs, None where a run lacks one."""
    differences: list[Json] = []
    sections = dict.fromkeys(section for run in runs for section in run.facts.tables)
    for section in sections:
        tables = [run.facts.tables.get(section, {}) for run in runs]
        for key in dict.fromkeys(key for table in tables for key in table):
            values = [table.get(key) for table in tables]
            if len(set(values)) > 1:
                differences.append({"section": section, "key": key, "values": values})
    return differences


def build_expert_load(history: RunHistory) -> Json:
    """Return the newest load of every expert, 1 for the mean: a row of `loads` for each of `blocks`."""
    for step, record in reversed(history.of_kind("event", "expert_load")):
        blocks = record.get("blocks")
        loads = record.get("loads")
        if not (isinstance(blocks, list) and isinstance(loads, list) and all(isinstance(row, list) for row in loads)):
            continue
        rows = [build_column(map(as_number, row[:MOST_EXPERTS])) for row in loads[:MOST_BLOCKS]]
        return {"step": step, "blocks": [show(block) for block in blocks[: len(rows)]], "loads": rows}
    return {}


def build_samples(history: RunHistory) -> list[Json]:
    """Return texts that the model wrote, at evenly spaced steps if there are too many."""
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


@dataclass(frozen=True)
class Mark:
    """An event of a run."""

    step: int
    kind: MarkKind
    text: str
    """One line without control characters."""
    short: str
    """Label for a time axis."""


def find_marks(history: RunHistory) -> list[Mark]:
    """Return the events of a run by step, then in the order of the file; at most MOST_MARKS of each kind."""
    marks: list[Mark] = []
    start: Record = {}
    left = Counter[MarkKind]({kind: MOST_MARKS for kind in get_args(MarkKind)})
    for step, record in history.of_kind("event"):
        event = str(record["event"])
        if event == "start":
            mark = Mark(step, "start", *_start(record, start))
            start = record
        elif event in _EVENTS:
            kind, describe = _EVENTS[event]
            mark = Mark(step, kind, *describe(record))
        else:
            continue
        left[mark.kind] -= 1
        if left[mark.kind] >= 0:
            marks.append(mark)
    marks += islice(_lost_stretches(history), MOST_MARKS)
    return sorted(marks, key=lambda mark: mark.step)


def how_it_ended(history: RunHistory) -> str:
    """Describe the run's end by its last event."""
    for _, record in reversed(history.of_kind("event")):
        event = record.get("event")
        if event in ("finished", "stopped"):
            return show(record.get("reason") or event)
        if event == "start":
            break
    return "no end recorded (running, killed or failed)"


def _start(record: Record, before: Record) -> tuple[str, str]:
    parts = [
        f"{words} {f'{show(before[key])} → ' if before.get(key, record[key]) != record[key] else ''}{show(record[key])}"
        for key, words in _SAID.items()
        if record.get(key) is not None
    ]
    verb = "restart" if before else "start"
    ranks = record.get("world_size")
    stage = record.get("zero_stage")
    short = f"{show(ranks)} rank{'' if ranks == 1 else 's'}, stage {show(stage)}"
    if parts:
        return (f"{verb}: {', '.join(parts)}", short)
    return (verb, verb)


def _lost_stretches(history: RunHistory) -> Iterator[Mark]:
    """Yield ranges of steps whose loss is NaN or infinite."""
    steps = history.steps.steps
    losses = history.steps.values["loss"]
    first = None
    for index, step in enumerate(steps):
        is_lost = math.isnan(losses[index])
        if is_lost and first is None:
            first = step
        if first is not None and (not is_lost or index == len(steps) - 1):
            last = step if is_lost else steps[index - 1]
            span = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
            yield Mark(first, "nonfinite", f"loss NaN or infinite, {span}", "NaN")
            first = None


def _spike(record: Record) -> tuple[str, str]:
    parts = [f"loss {as_number(record.get('loss')):.4g}"]
    for key, words in _SPIKE.items():
        if not math.isnan(value := as_number(record.get(key))):
            parts.append(f"{words} {value:.3g}")
    parts += [f"{key} {show(record[key])}" for key in ("samples", "checkpoint") if record.get(key) is not None]
    return f"loss spike: {', '.join(parts)}", "spike"


def _nonfinite(record: Record) -> tuple[str, str]:
    known = {key: record[key] for key in ("parameters", "loss_scale") if record.get(key) is not None}
    parts = ", ".join(f"{key.replace('_', ' ')} {show(value)}" for key, value in known.items())
    return f"NaN or infinite gradients{': ' if parts else ''}{parts}", "NaN"


def _slow(record: Record) -> tuple[str, str]:
    ratio = as_number(record.get("ratio"))
    times = "" if math.isnan(ratio) else f" {ratio:.3g} times the others' time"
    if record.get("phase") is not None:
        phase = f" in {show(record['phase'])}"
    else:
        phase = ""
    return f"slow rank {show(record.get('rank'))} on {show(record.get('host'))}:{times}{phase}", "slow rank"


def _collapsed(record: Record) -> tuple[str, str]:
    parts = [show(record.get(key)) for key in ("what", "experts", "blocks", "since")]
    return "collapsed router: {} experts {} of blocks {} since step {}".format(*parts), "router"


def _end(record: Record) -> tuple[str, str]:
    return show(record.get("reason") or record.get("event")), "end"


_EVENTS: dict[str, tuple[MarkKind, Callable[[Record], tuple[str, str]]]] = {
    "loss_spike": ("spike", _spike),
    "nonfinite": ("nonfinite", _nonfinite),
    "slow_rank": ("slow", _slow),
    "collapsed_router": ("router", _collapsed),
    "stopped": ("end", _end),
    "finished": ("end", _end),
}
