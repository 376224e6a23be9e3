"""Build the charts of runs, each with its unit and the curves of every run that has it. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmscale.planning.scaling import BESIROGLU, FITTED_PARAMETERS, Interval, training_flops
from llmscale.report.history import MAX_SETS, OF_SET, RunHistory, as_number
from llmscale.report.run_facts import RunFacts, show
from llmscale.training.step_metrics import METRICS, Chart

Json = dict[str, object]
#: Sections of the page, in order.
SECTIONS = ("Loss", "Evaluation", "Optimisation", "Experts", "Speed and memory", "GPU of rank 0")
#: Ranges of records over which shares of time are summed.
MOST_STRETCHES = 100
#: Limit per run: a file may have any number.
MOST_EVALUATIONS = 64
#: Runs that have charts of their own, of parts of one run.
_MOST_OWN_CHARTS = 4
_GIB = 2**30
_NATS = "nats per token"
_BITS = "bits per byte"
#: Title of the chart that has the training and the validation loss of a single run.
_BOTH_LOSSES = "Training and validation loss"
_TRAINING_LOSS = "Training loss"
#: Points of an expected loss.
_POINTS = 65


@dataclass(frozen=True)
class ReportedRun:
    """A run of a report."""

    name: str
    folder: Path
    history: RunHistory
    facts: RunFacts
    law: Expectation | None
    """Loss that a law expects; None for a run whose size is unknown, and with experts."""


@dataclass(frozen=True)
class Curve:
    """A curve of a chart. `steps` None are those of the run's axis."""

    label: str
    values: Sequence[float | None]
    steps: Sequence[int] | None = None
    is_smoothed: bool = False
    is_stepped: bool = False
    is_dashed: bool = False
    has_points: bool = False
    colour: int | None = None
    """Number of its colour; None for that of its run."""
    bytes_per_token: float | None = None
    """Ratio by which a loss in nats per token is one in bits per byte."""


@dataclass(frozen=True)
class Reference:
    """A published result of a model, which the charts of a run of the same model show as a line."""

    model: str
    """Preset."""
    chart: tuple[str, str]
    """Title and unit."""
    value: float
    label: str
    data: str = ""
    """Word in the source of the dataset for which the value holds; empty: any, for a task has its own text."""


#: scripts/reproduce/ trains these.
REFERENCES = (
    Reference("gpt2-124m", ("Validation loss", _NATS), 3.2924, "OpenAI's GPT-2 (build-nanogpt)", "fineweb-edu"),
    Reference("gpt2-124m", ("hellaswag", "acc_tokens"), 0.2945, "OpenAI's GPT-2 (build-nanogpt)"),
    Reference("gpt2-1.5b", ("hellaswag", "acc_tokens"), 0.4889, "OpenAI's GPT-2 (llm.c)"),
    Reference("gpt3-125m", ("hellaswag", "acc_tokens"), 0.337, "Brown et al. 2020, table H.1"),
)


def build_charts(runs: Sequence[ReportedRun], most: int) -> list[Json]:
    """Return every chart with the curves of all runs; a curve has the number of its `run`."""
    charts: dict[tuple[str, str], Json] = {}
    for number, run in enumerate(runs):
        for chart, curves in _charts_of(run, len(runs) == 1, number < _MOST_OWN_CHARTS, most):
            drawn = [curve for curve in curves if any(value is not None for value in curve.values)]
            if not drawn:
                continue
            drawn += _references(run, chart, drawn)
            if len(runs) == 1:
                drawn += _unigram_line(run, chart, drawn)
            entry = charts.setdefault((chart.title, chart.unit), {**asdict(chart), "curves": []})
            entry["curves"] += [{"run": number, **_without_defaults(curve)} for curve in drawn]  # type: ignore[operator]
    return sorted(charts.values(), key=lambda chart: SECTIONS.index(str(chart["section"])))


def _without_defaults(curve: Curve) -> Json:
    return {key: value for key, value in vars(curve).items() if value or key in ("label", "colour")}


def _charts_of(
    run: ReportedRun, is_alone: bool, has_own_charts: bool, most: int
) -> Iterator[tuple[Chart, Sequence[Curve]]]:
    """Yield the charts of a run, also those without a value."""
    ratio = run.facts.bytes_per_token
    training = _training_curve(run, "loss", most, is_smoothed=True, bytes_per_token=ratio)
    validation = _validation_curve(run, most)
    if is_alone and validation.values:
        yield (
            Chart("Loss", _BOTH_LOSSES, _NATS, is_pictured=True),
            [
                replace(training, label="training"),
                replace(validation, label="validation", is_dashed=True, colour=1),
            ],
        )
    else:
        yield Chart("Loss", _TRAINING_LOSS, _NATS, is_pictured=True), [training]
        yield Chart("Loss", "Validation loss", _NATS, is_pictured=True), [validation]
    yield _law_chart(run, training, is_alone)
    own = "" if is_alone else f", {run.name}"
    if has_own_charts:
        yield Chart("Loss", "Loss by set", _NATS + own), list(_set_curves(run, most))
    yield from _evaluation_charts(run)
    for name, declared in METRICS.items():
        if chart := declared.chart:
            yield chart, [_declared_curve(run, name, chart, most)]
    shares = _time_shares(run.history)
    if shares and has_own_charts:
        yield Chart("Speed and memory", "Share of time by phase", "% of a step" + own), list(shares.values())
    if shares:
        waiting = Chart("Speed and memory", "Waiting for data", "% of a step", is_pictured=True)
        yield waiting, [replace(shares["data_wait"], label=run.name, colour=None)]
    yield _memory_chart(run, is_alone, most)


def _training_curve(run: ReportedRun, name: str, most: int, factor: float = 1.0, **more: Any) -> Curve:
    """Return a column of training records, thinned out."""
    steps = run.history.steps.steps
    column = run.history.steps.values[name]
    chosen = thin(column, most)
    values = build_column(column[index] * factor for index in chosen)
    return Curve(run.name, values, [steps[index] for index in chosen] if len(steps) > most else None, **more)


def _declared_curve(run: ReportedRun, name: str, chart: Chart, most: int) -> Curve:
    flags = {"is_smoothed": chart.is_smoothed, "is_stepped": chart.is_stepped}
    curve = _training_curve(run, name, most, chart.factor, **flags)
    if not chart.is_positive:
        return curve
    return replace(curve, values=[value if value is not None and value > 0 else None for value in curve.values])


def _validation_curve(run: ReportedRun, most: int) -> Curve:
    records = run.history.of_kind("validation")
    records = [records[index] for index in thin([as_number(record.get("loss")) for _, record in records], most)]
    losses = build_column(as_number(record.get("loss")) for _, record in records)
    ratio = run.facts.validation_bytes_per_token
    return Curve(run.name, losses, [step for step, _ in records], has_points=True, bytes_per_token=ratio)


def _law_chart(run: ReportedRun, training: Curve, is_alone: bool) -> tuple[Chart, list[Curve]]:
    """Return the loss beside what a law expects of a model of this size; empty where it expects a uniform guess."""
    chart = Chart("Loss", "Beside Chinchilla's law", _NATS)
    law = run.law
    if law is None or not law.tokens:
        return chart, []
    columns = run.history.steps
    steps = np.interp(law.tokens, columns.values["tokens_seen"], columns.steps).round().astype(int).tolist()
    name = "" if is_alone else f"{run.name}, "
    # After few tokens the law expects far more than any model has.
    highest = 1.1 * max([law.loss[-1], *(loss for loss in training.values if loss is not None)])
    expected, best = (
        build_column(loss if loss <= highest else math.nan for loss in losses)
        for losses in (law.loss, law.optimal_loss)
    )
    curves = [
        replace(training, label=f"{name}measured", bytes_per_token=None),
        Curve(f"{name}expected at this size", expected, steps, is_dashed=True, colour=1 if is_alone else None),
    ]
    if is_alone:
        curves.append(Curve("best for the same FLOPs", best, steps, is_dashed=True, colour=2))
    return chart, curves


def _set_curves(run: ReportedRun, most: int) -> Iterator[Curve]:
    """Yield the training and the validation loss on each dataset of a mixture."""
    records = run.history.of_kind("validation")
    records = [records[index] for index in spread(len(records), most)]
    trained = [name.removeprefix(OF_SET) for name in run.history.steps.values if name.startswith(OF_SET)]
    validated = [name for _, record in records for name in _by_set(record)]
    for colour, name in enumerate(list(dict.fromkeys(trained + validated))[:MAX_SETS]):
        label = show(name)[:80]
        if name in trained:
            training = _training_curve(run, OF_SET + name, most, is_smoothed=True)
            yield replace(training, label=label, colour=colour)
        losses = build_column(as_number(_by_set(record).get(name)) for _, record in records)
        steps = [step for step, _ in records]
        yield Curve(f"{label}, validation", losses, steps, is_dashed=True, has_points=True, colour=colour)


def _by_set(record: Mapping[str, object]) -> Mapping[str, object]:
    losses = record.get("loss_by_set")
    return losses if isinstance(losses, dict) else {}


def _evaluation_charts(run: ReportedRun) -> Iterator[tuple[Chart, list[Curve]]]:
    """Yield a chart for each task and value."""
    points: dict[tuple[str, str], dict[int, float]] = {}
    for step, record in run.history.of_kind("evaluation"):
        task = record.get("task")
        values = record.get("values")
        if not isinstance(task, str) or not isinstance(values, dict):
            continue
        for name, value in values.items():
            key = (show(task), show(name))
            if not math.isnan(as_number(value)) and (key in points or len(points) < MOST_EVALUATIONS):
                points.setdefault(key, {})[step] = as_number(value)
    for (task, name), by_step in points.items():
        curve = Curve(run.name, build_column(by_step.values()), list(by_step), has_points=True)
        yield Chart("Evaluation", task, name, is_pictured=True), [curve]


def _time_shares(history: RunHistory) -> dict[str, Curve]:
    """Return each phase's percentage of a step over equal ranges of records; empty without times."""
    columns = history.steps.values
    phases = ("data_wait", "forward_backward", "optimizer_step", "other")
    seconds = np.nan_to_num(np.array([columns[f"{name}_s"] for name in phases]))
    ends = spread(len(history.steps.steps) + 1, MOST_STRETCHES + 1)
    sums = np.add.reduceat(seconds, ends[:-1], axis=1)
    with np.errstate(invalid="ignore"):
        shares = 100 * sums / sums.sum(0)
    if np.isnan(shares).all():
        return {}
    steps = [history.steps.steps[end - 1] for end in ends[1:]]
    return {
        name: Curve(name.replace("_", " "), build_column(share), steps, is_smoothed=True, colour=colour)
        for colour, (name, share) in enumerate(zip(phases, shares, strict=True))
    }


def _memory_chart(run: ReportedRun, is_alone: bool, most: int) -> tuple[Chart, list[Curve]]:
    """Return the measured peak, and what each start estimated."""
    measured = _training_curve(run, "peak_memory_bytes", most, 1 / _GIB)
    on_cpu = any(record.get("device") == "cpu" for _, record in run.history.of_kind("event", "start"))
    if on_cpu:
        note = "Measured on a CPU is all that the process holds, libraries included."
    else:
        note = ""
    chart = Chart("Speed and memory", "Memory of one rank", "GiB at the peak", is_pictured=True, note=note)
    starts = [(step, record) for step, record in run.history.of_kind("event", "start") if _estimate(record) > 0]
    if on_cpu or not starts:  # the estimate is a GPU's
        return chart, [measured]
    estimates = {step: _estimate(record) / _GIB for step, record in starts}
    last = max(run.history.steps.steps[-1], *estimates)
    estimates.setdefault(last, list(estimates.values())[-1])
    estimated = Curve(
        "estimated" if is_alone else f"{run.name}, estimated",
        build_column(estimates.values()),
        list(estimates),
        is_dashed=True,
        is_stepped=True,
        colour=1 if is_alone else None,
    )
    return chart, [replace(measured, label="measured" if is_alone else run.name), estimated]


def _estimate(record: Mapping[str, object]) -> float:
    return as_number(record.get("estimated_bytes"))


def _unigram_line(run: ReportedRun, chart: Chart, curves: Sequence[Curve]) -> list[Curve]:
    """Return the loss that word frequencies alone would give, as a line over the training loss of a single run."""
    entropy = run.facts.unigram_entropy
    if entropy is None or chart.title not in (_BOTH_LOSSES, _TRAINING_LOSS):
        return []
    ends = _ends(run, curves)
    ratio = run.facts.bytes_per_token
    return [Curve("unigram entropy", [entropy] * 2, ends, is_dashed=True, colour=6, bytes_per_token=ratio)]


def _ends(run: ReportedRun, curves: Sequence[Curve]) -> list[int]:
    """Return the first and the last step of curves."""
    steps = [step for curve in curves for step in (curve.steps or run.history.steps.steps)]
    return [min(steps), max(steps)]


def _references(run: ReportedRun, chart: Chart, curves: Sequence[Curve]) -> list[Curve]:
    """Return the published results of the run's model in this chart, each as a line over its curves."""
    ends = _ends(run, curves)
    title = "Validation loss" if chart.title == _BOTH_LOSSES else chart.title
    return [
        Curve(
            f"{reference.value:g} {reference.label}",
            [reference.value] * 2,
            ends,
            is_dashed=True,
            colour=7,
            bytes_per_token=curves[-1].bytes_per_token,
        )
        for reference in REFERENCES
        if reference.model == run.facts.model
        and reference.chart == (title, chart.unit)
        and reference.data in run.facts.source.lower()
    ]


def thin(values: Sequence[float], most: int) -> NDArray[np.int64]:
    """Return ascending indices of about `most` values, keeping every spike and gap.

    Each of equal ranges keeps its lowest and highest value and one NaN; the first and last value are kept. All indices
    are returned when there are few enough.
    """
    column = np.asarray(values, dtype=np.float64)
    if len(column) <= most:
        return np.arange(len(column))
    width = -(-len(column) // max(1, most // 2))
    rows = -(-len(column) // width)
    padded = np.full(rows * width, np.nan)
    padded[: len(column)] = column
    stretches = padded.reshape(rows, width)
    gaps = np.isnan(stretches)
    starts = np.arange(rows) * width
    # In a range without numbers, argmin and argmax select its first value.
    lowest = np.where(gaps, np.inf, stretches).argmin(1)
    highest = np.where(gaps, -np.inf, stretches).argmax(1)
    chosen = [starts + lowest, starts + highest]
    with_gap = gaps.any(1)
    chosen.append((starts + gaps.argmax(1))[with_gap])
    indices = np.unique(np.concatenate([*chosen, [0, len(column) - 1]]))
    return indices[indices < len(column)].astype(np.int64)


def spread(count: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` evenly spaced indices of `count` values, with the first and the last."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def training_hours(history: RunHistory) -> list[float]:
    """Return the hours of training steps until each record.

    Validation, sampling, checkpoints, starts, and steps that a restart discarded are not included.
    """
    steps = history.steps
    tokens = np.asarray(steps.values["tokens_seen"])
    # A run that began from another's checkpoint counts only its own training.
    first_step = next((step for step, _ in history.of_kind("event", "start")), 0)
    own = tokens[:1] * (1 - min(first_step, steps.steps[0]) / max(1, steps.steps[0]))
    rates = np.asarray(steps.values["tokens_per_second"])
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.concatenate([own, np.maximum(0, np.diff(tokens))]) / rates
    seconds[~np.isfinite(seconds)] = 0
    total: list[float] = np.cumsum(seconds / 3600).tolist()
    return total


def build_axis(history: RunHistory, hours: Sequence[float], most: int) -> Json:
    """Return steps with their tokens and hours, between which a page interpolates."""
    steps = history.steps.steps
    tokens = history.steps.values["tokens_seen"]
    chosen = thin(history.steps.values["loss"], most)
    return {
        "steps": [steps[index] for index in chosen],
        "tokens": build_column(tokens[index] for index in chosen),
        "hours": build_column(hours[index] for index in chosen),
    }


def build_column(values: Iterable[float]) -> list[float | int | None]:
    """Round values to six digits, more than a picture shows; None for NaN and infinity."""
    return [round_value(value) for value in values]


def round_value(value: float | None) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    if value == int(value):
        rounded = value
    else:
        rounded = float(f"{value:.6g}")
    if abs(rounded) < 1e15 and rounded == int(rounded):
        return int(rounded)
    return rounded


@dataclass(frozen=True)
class Expectation:
    """Loss that BESIROGLU's law expects of N parameters after each number of tokens."""

    tokens: list[float]
    """Numbers of tokens, evenly spaced in the logarithm, at which the law expects less than a uniform guess. Below it
    the law does not apply; empty if it never does."""
    loss: list[float]
    """Nats per token of a model of this size."""
    optimal_loss: list[float]
    """Loss of the best model for the same training FLOPs, 6 N D, nats per token."""
    final: Interval
    """Loss of this size after the last token."""
    optimal_parameters: float
    """Size of the best model for the run's FLOPs."""
    optimal_tokens: float
    is_extrapolation: bool
    """True if the size is outside the range of the fit."""


def expect(num_parameters: int, vocab_size: int, first_tokens: float, last_tokens: float) -> Expectation:
    """Return what the law expects of a run from its first record to its last; both numbers of tokens are positive."""
    law = BESIROGLU
    uniform = math.log(vocab_size)
    spaced = np.geomspace(first_tokens, last_tokens, _POINTS).tolist()
    tokens = [count for count in spaced if law.loss(num_parameters, count) < uniform]
    flops = training_flops(num_parameters, last_tokens)
    low, high = FITTED_PARAMETERS
    final = law.interval(lambda moved: moved.loss(num_parameters, last_tokens))
    assert final is not None, "its errors are published"
    return Expectation(
        tokens,
        [law.loss(num_parameters, count) for count in tokens],
        [law.optimal_loss(training_flops(num_parameters, count)) for count in tokens],
        final,
        law.optimal_parameters(flops),
        law.optimal_tokens(flops),
        is_extrapolation=not low <= num_parameters <= high,
    )
