"""Columns of a run's records, thinned where there are many: plain finite JSON values. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from llmscale.report.run_facts import show
from llmscale.report.run_history import OF_SET, RunHistory
from llmscale.report.run_records import as_number
from llmscale.report.thin_curve import spread, thin
from llmscale.untrusted.terminal import make_visible, make_visible_line

Json = dict[str, object]
#: Over which shares of time are summed.
MOST_STRETCHES = 100
#: Of one run: a file may hold any number.
MOST_SAMPLES, MOST_SAMPLE_LETTERS, MOST_EVALUATIONS = 200, 4_000, 64


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


def build_curves(history: RunHistory, hours: Sequence[float], most: int) -> Json:
    """`axis`: step, tokens and hours, between which a page interpolates; `curves`: columns of the training records.

    A curve without `steps` has those of the axis.
    """
    steps, columns = history.steps.steps, history.steps.values
    kept = spread(len(steps), most)
    axis: Json = {
        "steps": [steps[index] for index in kept],
        "tokens": build_column(columns["tokens_seen"][index] for index in kept),
        "hours": build_column(hours[index] for index in kept),
    }
    curves: Json = {}
    for name, values in columns.items():
        if name == "tokens_seen" or all(map(math.isnan, values)):
            continue
        chosen = thin(values, most)
        curve: Json = {"values": build_column(values[index] for index in chosen)}
        if len(steps) > most:
            curve["steps"] = [steps[index] for index in chosen]
        curves[make_visible_line(name[:80]) if name.startswith(OF_SET) else name] = curve
    return {"axis": axis, "curves": curves}


def build_time_shares(history: RunHistory) -> Json:
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
    columns_of = {name.removesuffix("_s"): build_column(share) for name, share in zip(phases, shares, strict=True)}
    return {"steps": [history.steps.steps[end - 1] for end in ends[1:]], **columns_of}


def build_validation(history: RunHistory, most: int) -> Json:
    records = history.of_kind("validation")
    records = [records[index] for index in thin([as_number(record.get("loss")) for _, record in records], most)]
    names = list(dict.fromkeys(name for _, record in records for name in _by_set(record)))[:32]
    columns: Json = {
        "steps": [step for step, _ in records],
        "loss": build_column(as_number(record.get("loss")) for _, record in records),
    }
    bits = [as_number(record.get("bits_per_byte")) for _, record in records]
    if not all(map(math.isnan, bits)):
        columns["bits_per_byte"] = build_column(bits)
    columns["by_set"] = {
        show(name): build_column(as_number(_by_set(record).get(name)) for _, record in records) for name in names
    }
    return columns


def _by_set(record: Mapping[str, object]) -> Mapping[str, object]:
    losses = record.get("loss_by_set")
    return losses if isinstance(losses, dict) else {}


def build_evaluations(history: RunHistory) -> list[Json]:
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
        {
            "task": task,
            "value": name,
            "steps": [step for step, _ in points],
            "values": build_column(v for _, v in points),
        }
        for (task, name), points in found.items()
    ]


def build_estimated_memory(history: RunHistory) -> list[Json]:
    """Of each start that has an estimate, bytes of one rank's GPU memory; `device` says what was measured instead."""
    starts = history.of_kind("event", "start")
    return [
        {"step": step, "bytes": as_number(record["estimated_bytes"]), "device": show(record.get("device"))}
        for step, record in starts
        if as_number(record.get("estimated_bytes")) > 0
    ]


def build_samples(history: RunHistory) -> list[Json]:
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


def build_column(values: Iterable[float]) -> list[float | int | None]:
    """Six digits, more than a picture shows; null for what is no number."""
    return [round_value(value) for value in values]


def round_value(value: float | None) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    rounded = value if value == int(value) else float(f"{value:.6g}")
    return int(rounded) if abs(rounded) < 1e15 and rounded == int(rounded) else rounded
