"""Build a report as finite JSON values in columns, for the HTML page, the pictures and --json. No torch."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from llmscale import __version__
from llmscale.architecture.shape import SHAPE_KEYS, GPTShape, build_shape
from llmscale.config.published import publish_keys, publish_text
from llmscale.config.run_config import build_run_config
from llmscale.data.mixture import is_mix
from llmscale.data.shards.manifest import Manifest
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.planning.scaling import BESIROGLU, FITTED_PARAMETERS, Interval, ParametricLaw, training_flops
from llmscale.report.history import OF_SET, Record, RunHistory, as_number, load_history, load_run_manifest
from llmscale.report.run_list import ListedRun
from llmscale.training.run_folder import CONFIG_NAME, DS_CONFIG_NAME, STARTS_NAME
from llmscale.training.step_metrics import METRICS
from llmscale.untrusted.documents import Rules, load_json, load_json_lines
from llmscale.untrusted.terminal import make_visible, make_visible_line

#: Limits of entries per table and letters per entry: a file may have any number.
_MOST_ENTRIES, _MOST_LETTERS = 400, 300
_RULES = Rules(ConfigError, not_finite=True)
Table = dict[str, str]


@dataclass(frozen=True)
class RunFacts:
    """Facts of one run folder."""

    shape: GPTShape | None
    """Model's shape; None if config.json lacks it."""
    total_steps: int | None
    """Steps that the last start was to reach."""
    tokenizer: str | None
    bytes_per_token: float | None
    """UTF-8 bytes of text per token of the training split."""
    validation_bytes_per_token: float | None
    why_no_bytes: str
    """Reason why bytes_per_token is unknown; empty otherwise."""
    unigram_entropy: float | None
    """Entropy of the training split's token frequencies, nats."""
    tables: dict[str, Table]
    """Settings by section, without control characters."""


def load_facts(run: Path, history: RunHistory) -> RunFacts:
    """Read everything except the metrics, which are in `history`."""
    described, ds_config = _load(run / CONFIG_NAME), _load(run / DS_CONFIG_NAME)
    config, resolved = _mapping(described.get("config")), _mapping(described.get("resolved"))
    manifest = load_run_manifest(run)
    start = (history.of_kind("event", "start") or [(0, {})])[-1][1]
    splits = manifest.splits if manifest else {}
    total = resolved.get("total_steps")
    tokenizer = manifest.tokenizer if manifest else start.get("tokenizer")
    ratios = {name: split.bytes_per_token for name, split in splits.items()}
    ratio = ratios.get("train") or _positive(start.get("bytes_per_token"))
    return RunFacts(
        shape=_parse_shape(resolved.get("shape")),
        total_steps=total if isinstance(total, int) and total > 0 else None,
        tokenizer=show(tokenizer) if isinstance(tokenizer, str) else None,
        bytes_per_token=ratio,
        validation_bytes_per_token=ratios.get("val") or _measured_ratio(history) or ratio,
        why_no_bytes="" if ratio else _why_unknown(config.get("data")),
        unigram_entropy=splits["train"].unigram_entropy_nats if "train" in splits else None,
        tables={
            "Configuration": _table(
                {key: value for key, value in publish_keys(config).items() if value not in (None, [])}
            ),
            "Model": _table(_mapping(resolved.get("shape"))),
            "Batch": _table(_mapping(resolved.get("plan"))),
            "Schedule": _table(_mapping(resolved.get("schedule"))),
            "DeepSpeed": _table(ds_config),
            "Data": _data_table(manifest, config.get("data")),
            "Environment": _environment(run),
        },
    )


def show(value: object) -> str:
    """Format a value of a file as one line of bounded length, without folders of this machine."""
    text = publish_text(value if isinstance(value, str) else json.dumps(value))
    return make_visible_line(text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…")


def _load(path: Path) -> Mapping[str, object]:
    try:
        return load_json(path, _RULES)
    except (OSError, LlmscaleError):
        return {}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _positive(value: object) -> float | None:
    number = as_number(value)
    return number if number > 0 else None


def _parse_shape(values: object) -> GPTShape | None:
    """Return a shape from untrusted values, checked like a user's input, or None."""
    known = {key: value for key, value in _mapping(values).items() if value is not None}
    keys = {key: known[key] for key in (*SHAPE_KEYS, "vocab_size", "seq_len") if key in known}
    try:
        config = build_run_config(keys)
        return build_shape({key: getattr(config, key) for key in keys})
    except (LlmscaleError, TypeError):
        return None


def _measured_ratio(history: RunHistory) -> float | None:
    """Compute bytes per token from a validation that recorded both units."""
    for _, record in history.of_kind("validation"):
        loss, bits = as_number(record.get("loss")), as_number(record.get("bits_per_byte"))
        if loss > 0 and bits > 0:
            return loss / math.log(2) / bits
    return None


def _why_unknown(data: object) -> str:
    if not isinstance(data, str):
        return "the run folder does not say what it trained on"
    if is_mix(data):
        return "it trained on a mix, whose sets may differ in it"
    return f"its dataset ({show(data)}) cannot be read from here"


def _table(values: Mapping[str, object]) -> Table:
    """Flatten nested settings to one level, a.b.c."""
    table: Table = {}
    for key, value in _flat("", values):
        if len(table) == _MOST_ENTRIES:
            break
        table[show(key)] = show(value)
    return table


def _flat(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _data_table(manifest: Manifest | None, data: object) -> Table:
    if manifest is None:
        return {"set": f"{show(data)} (its manifest cannot be read from here)"} if isinstance(data, str) else {}
    table = {"set": show(data), "source": show(manifest.source), "tokenizer": show(manifest.tokenizer)}
    table |= {"vocabulary": f"{manifest.vocab_size:,} tokens", "sequence": f"{manifest.seq_len:,} tokens"}
    for name, split in manifest.splits.items():
        table[f"{show(name)} split"] = (
            f"{split.num_tokens:,} tokens of {split.num_documents:,} documents, {split.bytes_per_token:.3f} bytes per "
            f"token, unigram entropy {split.unigram_entropy_nats:.3f} nats"
        )
    if manifest.note_on_bytes:
        table["bytes"] = manifest.note_on_bytes
    return table | {"fingerprint": manifest.fingerprint}


def _environment(run: Path) -> Table:
    """Describe the last start, and how many there were."""
    starts: list[Record] = []
    try:
        starts.extend(load_json_lines(run / STARTS_NAME))
    except (OSError, LlmscaleError):
        return {}
    if not starts:
        return {}
    hosts = sorted({show(start.get("host")) for start in starts[-_MOST_ENTRIES:]})
    # The command line may hold secrets; the configuration is in its own table.
    last = {key: value for key, value in starts[-1].items() if key != "arguments"}
    return {**_table(last), "starts": str(len(starts)), "hosts of all starts": show(", ".join(hosts))}


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
    said = [
        f"{words} {f'{show(before[key])} → ' if before.get(key, record[key]) != record[key] else ''}{show(record[key])}"
        for key, words in _SAID.items()
        if record.get(key) is not None
    ]
    verb = "restart" if before else "start"
    ranks, stage = record.get("world_size"), record.get("zero_stage")
    short = f"{show(ranks)} rank{'' if ranks == 1 else 's'}, stage {show(stage)}"
    return (f"{verb}: {', '.join(said)}", short) if said else (verb, verb)


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
    said = [f"loss {as_number(record.get('loss')):.4g}"]
    for key, words in _SPIKE.items():
        if not math.isnan(value := as_number(record.get(key))):
            said.append(f"{words} {value:.3g}")
    said += [f"{key} {show(record[key])}" for key in ("samples", "checkpoint") if record.get(key) is not None]
    return f"loss spike: {', '.join(said)}", "spike"


def _nonfinite(record: Record) -> tuple[str, str]:
    known = {key: record[key] for key in ("parameters", "loss_scale") if record.get(key) is not None}
    said = ", ".join(f"{key.replace('_', ' ')} {show(value)}" for key, value in known.items())
    return f"NaN or infinite gradients{': ' if said else ''}{said}", "NaN"


def _slow(record: Record) -> tuple[str, str]:
    ratio = as_number(record.get("ratio"))
    times = "" if math.isnan(ratio) else f" {ratio:.3g} times the others' time"
    phase = f" in {show(record['phase'])}" if record.get("phase") is not None else ""
    return f"slow rank {show(record.get('rank'))} on {show(record.get('host'))}:{times}{phase}", "slow rank"


def _collapsed(record: Record) -> tuple[str, str]:
    said = [show(record.get(key)) for key in ("what", "experts", "blocks", "since")]
    return "collapsed router: {} experts {} of blocks {} since step {}".format(*said), "router"


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
    lowest, highest = np.where(gaps, np.inf, stretches).argmin(1), np.where(gaps, -np.inf, stretches).argmax(1)
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


Json = dict[str, object]
#: Ranges of records over which shares of time are summed.
MOST_STRETCHES = 100
#: Limits per run: a file may have any number.
MOST_SAMPLES, MOST_SAMPLE_LETTERS, MOST_EVALUATIONS = 200, 4_000, 64
MOST_EXPERTS, MOST_BLOCKS = 512, 128


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


def build_curves(history: RunHistory, hours: Sequence[float], most: int) -> Json:
    """Return `axis` (steps, tokens and hours, which a page interpolates) and `curves` (columns of training records).

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
        if name in ("tokens_seen", "time") or all(map(math.isnan, values)):
            continue
        chosen = thin(values, most)
        curve: Json = {"values": build_column(values[index] for index in chosen)}
        if len(steps) > most:
            curve["steps"] = [steps[index] for index in chosen]
        curves[make_visible_line(name[:80]) if name.startswith(OF_SET) else name] = curve
    return {"axis": axis, "curves": curves}


def build_time_shares(history: RunHistory) -> Json:
    """Return each phase's fraction of a step over equal ranges of records; `steps` are the ranges' last steps."""
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
    """Return a column per task and value."""
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
    """Return each start's estimated GPU memory per rank, bytes, and the `device` that was measured."""
    starts = history.of_kind("event", "start")
    return [
        {"step": step, "bytes": as_number(record["estimated_bytes"]), "device": show(record.get("device"))}
        for step, record in starts
        if as_number(record.get("estimated_bytes")) > 0
    ]


def build_expert_load(history: RunHistory) -> Json:
    """Return the newest load of every expert, 1 for the mean: a row of `loads` for each of `blocks`."""
    for step, record in reversed(history.of_kind("event", "expert_load")):
        blocks, loads = record.get("blocks"), record.get("loads")
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


def build_column(values: Iterable[float]) -> list[float | int | None]:
    """Round values to six digits, more than a picture shows; None for NaN and infinity."""
    return [round_value(value) for value in values]


def round_value(value: float | None) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    rounded = value if value == int(value) else float(f"{value:.6g}")
    return int(rounded) if abs(rounded) < 1e15 and rounded == int(rounded) else rounded


_POINTS = 65


@dataclass(frozen=True)
class Expectation:
    """Loss that a scaling law expects of N parameters after each number of tokens."""

    law: str
    source: str
    num_parameters: int
    tokens: tuple[float, ...]
    """Numbers of tokens, evenly spaced in the logarithm, at which the law expects less than a uniform guess. Below it
    the law does not apply; empty if it never does."""
    loss: tuple[float, ...]
    """Nats per token of a model of this size."""
    optimal_loss: tuple[float, ...]
    """Loss of the best model for the same training FLOPs, 6 N D, nats per token."""
    final: Interval | float
    """Loss of this size after the last token, with the fit's 80 % interval if its errors are published."""
    optimal_parameters: float
    """Size of the best model for the run's FLOPs."""
    optimal_tokens: float
    is_extrapolation: bool
    """True if the size is outside the range of the fit."""


def expect(
    num_parameters: int, vocab_size: int, first_tokens: float, last_tokens: float, law: ParametricLaw = BESIROGLU
) -> Expectation:
    """Return what `law` expects of a run from its first record to its last; both numbers of tokens are positive."""
    uniform = math.log(vocab_size)
    ratio = last_tokens / first_tokens
    spaced = [first_tokens * ratio ** (index / (_POINTS - 1)) for index in range(_POINTS)]
    tokens = tuple(count for count in spaced if law.loss(num_parameters, count) < uniform)
    flops = training_flops(num_parameters, last_tokens)
    low, high = FITTED_PARAMETERS
    return Expectation(
        law=law.name,
        source=law.source,
        num_parameters=num_parameters,
        tokens=tokens,
        loss=tuple(law.loss(num_parameters, count) for count in tokens),
        optimal_loss=tuple(law.optimal_loss(training_flops(num_parameters, count)) for count in tokens),
        final=law.estimate_loss(lambda moved: moved.loss(num_parameters, last_tokens)),
        optimal_parameters=law.optimal_parameters(flops),
        optimal_tokens=law.optimal_tokens(flops),
        is_extrapolation=not low <= num_parameters <= high,
    )


#: Most points of a curve, most of all runs' curves of a kind, and the least that a curve keeps.
MOST_POINTS, MOST_POINTS_OF_ALL, LEAST_POINTS = 20_000, 80_000, 2_000
_NATS_PER_BIT = math.log(2)


@dataclass(frozen=True)
class _Run:
    name: str
    folder: Path
    history: RunHistory
    facts: RunFacts


def build_report(folders: Sequence[Path], listed: Sequence[ListedRun] = ()) -> Json:
    """Build the report of one or more runs. Raises ConfigError for a run without readable metrics.

    `listed` are the runs of a folder: all are in a table, and those of them without readable metrics in no chart.
    """
    runs, optional = [], {run.path for run in listed}
    for folder, name in zip(folders, _names(folders), strict=True):
        try:
            history = load_history(folder)
        except ConfigError:
            if folder in optional:
                continue
            raise
        runs.append(_Run(name, folder, history, load_facts(folder, history)))
    if not runs:
        raise ConfigError(f"{len(folders)} runs have no training step yet. `llmscale runs` lists them.")
    drawn = {run.folder: run for run in runs}
    most = max(LEAST_POINTS, min(MOST_POINTS, MOST_POINTS_OF_ALL // len(runs)))
    unit, notes = _choose_unit(runs)
    return {
        "llmscale": __version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "unit": unit,
        "notes": [*notes, *(note for run in runs for note in _notes(run, len(runs)))],
        "charts": [
            {"name": name, **dataclasses.asdict(declared.chart)} for name, declared in METRICS.items() if declared.chart
        ],
        "runs": [_describe(run, most) for run in runs],
        "listed": [
            _listed(run, name, drawn) for run, name in zip(listed, _names([run.path for run in listed]), strict=True)
        ],
        "differences": _differences(runs),
    }


def _listed(run: ListedRun, name: str, drawn: Mapping[Path, _Run]) -> Json:
    """Return a run's row in the table of all runs of a folder, without control characters."""
    validations = drawn[run.path].history.validation.values() if run.path in drawn else ()
    row = run.publish() | {
        "run": name,
        "validation_loss": round_value(min((loss for loss in validations if not math.isnan(loss)), default=None)),
        "why": "; ".join(filter(None, (run.error, run.problem))),
    }
    return {key: show(value) if isinstance(value, str) else value for key, value in row.items()}


def _choose_unit(runs: Sequence[_Run]) -> tuple[str, list[str]]:
    """Choose `nats` per token, or `bits` per byte where only these compare; return it with notes for the reader."""
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
    """Return the last part of each path, or where two have the same the path below the folder of all."""
    paths = [folder.resolve() for folder in folders]
    short = [path.name for path in paths]
    above = os.path.commonpath([path.parent for path in paths]) if paths else ""
    return [
        make_visible_line(path.name if short.count(path.name) == 1 else os.path.relpath(path, above)) for path in paths
    ]


def _describe(run: _Run, most: int) -> Json:
    history, facts = run.history, run.facts
    shape = facts.shape
    hours = training_hours(history)
    law = _expectation(run)
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
        "summary": _summary(run, hours, law),
        **build_curves(history, hours, most),
        "time_shares": build_time_shares(history),
        "wall_time": {use: round_value(share) for use, share in history.wall_shares().items()},
        "validation": build_validation(history, most),
        "evaluations": build_evaluations(history),
        "expert_load": build_expert_load(history),
        "estimated_memory": build_estimated_memory(history),
        "law": _law(law),
        "marks": [dataclasses.asdict(mark) for mark in find_marks(history)],
        "samples": build_samples(history),
        "tables": facts.tables,
    }


def _expectation(run: _Run) -> Expectation | None:
    shape, tokens = run.facts.shape, run.history.steps.values["tokens_seen"]
    # The laws are of dense models.
    if shape is None or shape.num_experts or not 0 < tokens[0] <= tokens[-1]:
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
    """Return a run's row of the summary, in the units that the names say."""
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
        "goodput": round_value(history.wall_shares().get("steps")),
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
    """Return settings in which the runs differ; `values` are in the order of the runs, None where a run lacks one."""
    found: list[Json] = []
    sections = dict.fromkeys(section for run in runs for section in run.facts.tables)
    for section in sections:
        tables = [run.facts.tables.get(section, {}) for run in runs]
        for key in dict.fromkeys(key for table in tables for key in table):
            values = [table.get(key) for table in tables]
            if len(set(values)) > 1:
                found.append({"section": section, "key": key, "values": values})
    return found
