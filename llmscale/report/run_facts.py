"""Read the facts of a run folder besides its metrics: model, data, settings, environment. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmscale.architecture.shape import SHAPE_KEYS, GPTShape, build_shape
from llmscale.config.run_config import KEYS, build_run_config
from llmscale.config.run_keys import flatten, publish_keys, publish_text
from llmscale.data.mixture import is_mix
from llmscale.data.shards.manifest import Manifest
from llmscale.errors import ConfigError, LlmscaleError
from llmscale.report.history import Record, RunHistory, as_number, load_run_manifest
from llmscale.training.run_folder import CONFIG_NAME, DS_CONFIG_NAME, STARTS_NAME
from llmscale.untrusted.documents import Rules, load_json, load_json_lines
from llmscale.untrusted.terminal import make_visible_line

#: Limits of entries per table and letters per entry: a file may have any number.
_MOST_ENTRIES = 400
_MOST_LETTERS = 300
_RULES = Rules(ConfigError, not_finite=True)
Table = dict[str, str]
#: Facts of a "compilation" event (training/log_steps.py).
_OF_COMPILATION = ("compile_s", "tokens_per_second", "eager_tokens_per_second", "pays_after_steps", "is_measured")


@dataclass(frozen=True)
class RunFacts:
    """Facts of one run folder."""

    model: str
    """Preset; empty if config.json lacks it."""
    source: str
    """Source of the dataset's documents; empty if its manifest cannot be read."""
    shape: GPTShape | None
    """Model's shape; None if config.json lacks it."""
    total_steps: int | None
    """Steps that the last start was to reach."""
    tokenizer: str | None
    bytes_per_token: float | None
    """UTF-8 bytes of text per token of the training split; None for conversations, whose targets alone have a loss."""
    validation_bytes_per_token: float | None
    why_no_bytes: str
    """Reason why bytes_per_token is unknown; empty otherwise."""
    unigram_entropy: float | None
    """Entropy of the training split's token frequencies, nats."""
    tables: dict[str, Table]
    """Settings by section, without control characters."""


def load_facts(run: Path, history: RunHistory) -> RunFacts:
    """Read everything except the metrics, which are in `history`."""
    described = _load(run / CONFIG_NAME)
    ds_config = _load(run / DS_CONFIG_NAME)
    config = _mapping(described.get("config"))
    resolved = _mapping(described.get("resolved"))
    manifest = load_run_manifest(run)
    start = (history.of_kind("event", "start") or [(0, {})])[-1][1]
    compiled = (history.of_kind("event", "compilation") or [(0, {})])[-1][1]
    total = resolved.get("total_steps")
    tokenizer = manifest.tokenizer if manifest else start.get("tokenizer")
    ratio, validation_ratio = _ratios(manifest, start, history)
    return RunFacts(
        model=str(config.get("model") or ""),
        source=manifest.source if manifest else "",
        shape=_parse_shape(resolved.get("shape")),
        total_steps=total if isinstance(total, int) and total > 0 else None,
        tokenizer=show(tokenizer) if isinstance(tokenizer, str) else None,
        bytes_per_token=ratio,
        validation_bytes_per_token=validation_ratio,
        why_no_bytes="" if ratio else _why_unknown(manifest, config.get("data")),
        unigram_entropy=manifest.unigram_entropy("train") if manifest else None,
        tables={
            "Configuration": _table(
                {key: value for key, value in publish_keys(config).items() if value not in (None, [])}
            ),
            "Model": _table(_mapping(resolved.get("shape"))),
            "Batch": _table(_mapping(resolved.get("plan"))),
            "Schedule": _table(_mapping(resolved.get("schedule"))),
            "DeepSpeed": _table(ds_config),
            "Compilation": _table({key: compiled[key] for key in _OF_COMPILATION if compiled.get(key) is not None}),
            "Data": _data_table(manifest, config.get("data")),
            "Environment": _environment(run),
        },
    )


def load_starts(run: Path) -> list[Record]:
    """Return the records of a run's starts; none where they are missing or damaged."""
    try:
        return list(load_json_lines(run / STARTS_NAME))
    except (OSError, LlmscaleError):
        return []


def given_flags(starts: Iterable[Record]) -> dict[str, str]:
    """Return the flags of a run's starts by key, each with its last value."""
    given: dict[str, str] = {}
    for start in starts:
        listed = start.get("arguments")
        if isinstance(listed, list):
            words = [word for word in listed if isinstance(word, str)]
        else:
            words = []
        for word, following in zip(words, [*words[1:], ""], strict=False):
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                key = name.removeprefix("--").replace("-", "_")
                if key not in KEYS:
                    key = key.removeprefix("no_")
                given[key] = value if equals else following
    return given


def show(value: object) -> str:
    """Format a value of a file as one line of bounded length, without folders of this machine."""
    if not isinstance(value, str):
        value = json.dumps(value)
    # Cut first: a stranger's text may be as long as its file. Publishing shortens it.
    text = publish_text(value[: 10 * _MOST_LETTERS])
    if len(text) > _MOST_LETTERS:
        text = f"{text[:_MOST_LETTERS]}…"
    return make_visible_line(text)


def _load(path: Path) -> Mapping[str, object]:
    try:
        return load_json(path, _RULES)
    except (OSError, LlmscaleError):
        return {}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _parse_shape(values: object) -> GPTShape | None:
    """Return a shape from untrusted values, checked like a user's input, or None."""
    known = {key: value for key, value in _mapping(values).items() if value is not None}
    keys = {key: known[key] for key in (*SHAPE_KEYS, "vocab_size", "seq_len") if key in known}
    try:
        config = build_run_config(keys)
        return build_shape({key: getattr(config, key) for key in keys})
    except (LlmscaleError, TypeError):
        return None


def _ratios(
    manifest: Manifest | None, start: Mapping[str, object], history: RunHistory
) -> tuple[float | None, float | None]:
    """Return bytes per token of the training and of the validation split, each None if not known."""
    if manifest is not None and manifest.chat is not None:
        return None, None
    recorded = as_number(start.get("bytes_per_token"))
    if manifest:
        ratio = manifest.bytes_per_target("train")
    else:
        ratio = None
    ratio = ratio or (recorded if recorded > 0 else None)
    if manifest:
        of_validation = manifest.bytes_per_target("val")
    else:
        of_validation = None
    return ratio, of_validation or _measured_ratio(history) or ratio


def _measured_ratio(history: RunHistory) -> float | None:
    """Compute bytes per token from a validation that recorded both units."""
    for _, record in history.of_kind("validation"):
        loss = as_number(record.get("loss"))
        bits = as_number(record.get("bits_per_byte"))
        if loss > 0 and bits > 0:
            return loss / math.log(2) / bits
    return None


def _why_unknown(manifest: Manifest | None, data: object) -> str:
    if manifest is not None and manifest.chat is not None:
        return "it trained on conversations, some of whose tokens are targets"
    if not isinstance(data, str):
        return "the run folder does not say what it trained on"
    if is_mix(data):
        return "it trained on a mix, whose sets may differ in it"
    return f"its dataset ({show(data)}) cannot be read from here"


def _table(values: Mapping[str, object]) -> Table:
    """Flatten nested settings to one level, a.b.c."""
    table: Table = {}
    for key, value in flatten(values):
        if len(table) == _MOST_ENTRIES:
            break
        table[show(key)] = show(value)
    return table


def _data_table(manifest: Manifest | None, data: object) -> Table:
    if manifest is None:
        if isinstance(data, str):
            return {"set": f"{show(data)} (its manifest cannot be read from here)"}
        return {}
    table = {"set": show(data), "source": show(manifest.source), "tokenizer": show(manifest.tokenizer)}
    table |= {"vocabulary": f"{manifest.vocab_size:,} tokens", "sequence": f"{manifest.seq_len:,} tokens"}
    for name, split in manifest.splits.items():
        table[f"{show(name)} split"] = (
            f"{split.num_tokens:,} tokens of {split.num_documents:,} documents, {split.bytes_per_token:.3f} bytes per "
            "token"
        )
        if (entropy := manifest.unigram_entropy(name)) is not None:
            table[f"{show(name)} split"] += f", unigram entropy {entropy:.3f} nats"
    if manifest.note_on_bytes:
        table["bytes"] = manifest.note_on_bytes
    return table | {"fingerprint": manifest.fingerprint}


def _environment(run: Path) -> Table:
    """Describe the last start, and how many there were."""
    starts = load_starts(run)
    if not starts:
        return {}
    hosts = sorted({show(start.get("host")) for start in starts[-_MOST_ENTRIES:]})
    # The command line may hold secrets; the configuration is in its own table.
    last = {key: value for key, value in starts[-1].items() if key != "arguments"}
    return {**_table(last), "starts": str(len(starts)), "hosts of all starts": show(", ".join(hosts))}
