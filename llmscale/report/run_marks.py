"""Find the events of a run that its charts mark: starts, ends, spikes, NaN, slow ranks, collapsed routers. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

from llmscale.report.history import Record, RunHistory, as_number
from llmscale.report.run_facts import show

MarkKind = Literal["start", "end", "spike", "nonfinite", "slow", "router"]
#: Limit of marks of a kind per run: a file may have any number.
MOST_MARKS = 500


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


#: Facts of a start that its mark shows, with their labels.
_SAID = {
    "world_size": "ranks",
    "zero_stage": "ZeRO stage",
    "precision": "precision",
    "micro_batch_size": "micro-batch",
    "device": "device",
}


def _start(record: Record, before: Record) -> tuple[str, str]:
    parts = [
        f"{words} {f'{show(before[key])} → ' if before.get(key, record[key]) != record[key] else ''}{show(record[key])}"
        for key, words in _SAID.items()
        if record.get(key) is not None
    ]
    verb = "restart" if before else "start"
    ranks, stage = record.get("world_size"), record.get("zero_stage")
    short = f"{show(ranks)} rank{'' if ranks == 1 else 's'}, stage {show(stage)}"
    return (f"{verb}: {', '.join(parts)}", short) if parts else (verb, verb)


def _lost_stretches(history: RunHistory) -> Iterator[Mark]:
    """Yield ranges of steps whose loss is NaN or infinite."""
    steps, losses = history.steps.steps, history.steps.values["loss"]
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


_SPIKE = {"loss_z": "z-score of the loss", "grad_norm": "gradient norm", "grad_norm_z": "its z-score"}


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
    phase = f" in {show(record['phase'])}" if record.get("phase") is not None else ""
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
